"""Look which files patterns name, in a process of its own that may be killed.

A pattern such as `**/**/**/*.jsonl` may take hours where folders are deep. The process that answers
requests expands none: it runs this file, and ends it after a while.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Matches(NamedTuple):
    """Files that a pattern names.

    some     there is at least one
    inside   each lies below one of the folders, whatever links lead there
    """

    some: bool
    inside: bool


def look_up(
    patterns: Sequence[str], folders: Sequence[str], seconds: float
) -> list[Matches] | None:
    """Files of each pattern; None where it takes longer than some seconds, or cannot be told.

    folders   absolute, without links
    """
    asked = json.dumps({"patterns": list(patterns), "folders": list(folders)})
    command = [sys.executable, "-I", "-S", __file__]
    try:
        told = subprocess.run(  # noqa: S603  (our own file)
            command, input=asked.encode(), capture_output=True, timeout=seconds, check=True
        ).stdout
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return [Matches(*each) for each in json.loads(told)]


def matches(pattern: str, folders: Sequence[str]) -> Matches:
    """Files of one pattern; looks no further than the first that lies elsewhere."""
    some = False
    for match in glob.iglob(pattern, recursive=True):  # noqa: PTH207  (absolute patterns too)
        real, some = os.path.realpath(match), True
        if not any(os.path.commonpath([real, folder]) == folder for folder in folders):
            return Matches(some, inside=False)
    return Matches(some, inside=True)


if __name__ == "__main__":
    os.nice(10)
    asked = json.load(sys.stdin)
    json.dump([matches(pattern, asked["folders"]) for pattern in asked["patterns"]], sys.stdout)
