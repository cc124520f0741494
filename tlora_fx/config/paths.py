"""Whether something lies at a path that a stranger wrote.

pathlib raises for a name that is too long or a folder that may not be entered; nothing is there.
"""

from __future__ import annotations

import glob
from pathlib import Path


def is_pattern(path: str) -> bool:
    """Whether text names files by a pattern, such as "data/*.jsonl", and no file is called so."""
    return glob.has_magic(path) and not is_there(path)


def is_there(path: Path | str) -> bool:
    """Whether there is anything that can be looked at."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path | str) -> bool:
    """Whether there is a file."""
    return is_there(path) and Path(path).is_file()


def is_folder(path: Path | str) -> bool:
    """Whether there is a folder."""
    return is_there(path) and Path(path).is_dir()
