"""Paths that a stranger wrote, and whether something lies there.

pathlib raises for a name that is too long, a folder that may not be entered, and a home that nobody
has; nothing is there.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path


def with_home(path: Path | str) -> Path:
    """A path whose `~` or `~user` is that home; it stays where there is no such home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib's raises)


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
