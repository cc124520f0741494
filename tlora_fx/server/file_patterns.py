"""Look which files patterns name, in a process of its own that may be killed.

A pattern such as `**/**/**/*.jsonl` may take hours where folders are deep. The process that answers
requests expands none: it runs this file, and ends it after a while.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple


class Matches(NamedTuple):
    """Files that a pattern names.

    some     there is at least one
    inside   each may be read, whatever links lead there
    """

    some: bool
    inside: bool


def look_up(
    patterns: Sequence[str], folders: Sequence[str], closed: Sequence[str], seconds: float
) -> list[Matches] | None:
    """Files of each pattern; None where it takes longer than some seconds, or cannot be told.

    folders, closed   as of `is_open`
    """
    asked = json.dumps(
        {"patterns": list(patterns), "folders": list(folders), "closed": list(closed)}
    )
    command = [sys.executable, "-I", "-S", __file__]
    try:
        told = subprocess.run(  # noqa: S603  (our own file)
            command, input=asked.encode(), capture_output=True, timeout=seconds, check=True
        ).stdout
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return [Matches(*each) for each in json.loads(told)]


def is_open(path: str, folders: Sequence[str], closed: Sequence[str]) -> bool:
    """Whether a path may be read: the nearest of these folders that it lies below says so.

    path      absolute, without links, as the folders are
    folders   what lies in them may be read
    closed    what lies in them may not; one of both kinds is closed
    """
    above = [each for each in (*folders, *closed) if os.path.commonpath([path, each]) == each]
    nearest = max(above, key=len, default="")
    return nearest in folders and nearest not in closed


def may_enter(pattern: str, folder: str) -> bool:
    """Whether a pattern can name what lies in a folder, now or later.

    pattern   absolute, with no `..`
    folder    absolute, without links
    """
    *above, last = Path(pattern).parts
    for name, part in zip_longest(Path(folder).parts, above):
        if part == "**" or name is None:
            return True
        if part is None:
            return last == "**"
        if not fnmatch.fnmatchcase(name, part):
            return False
    return True


def matches(pattern: str, folders: Sequence[str], closed: Sequence[str]) -> Matches:
    """Files of one pattern; looks no further than the first that may not be read."""
    some = False
    for match in glob.iglob(pattern, recursive=True):  # noqa: PTH207  (absolute patterns too)
        real, some = os.path.realpath(match), True
        if not is_open(real, folders, closed):
            return Matches(some, inside=False)
    return Matches(some, inside=True)


if __name__ == "__main__":
    os.nice(10)
    asked = json.load(sys.stdin)
    folders, closed = asked["folders"], asked["closed"]
    json.dump([matches(pattern, folders, closed) for pattern in asked["patterns"]], sys.stdout)
