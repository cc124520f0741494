"""A disk that is full: how much is kept free, and writes that wait until there is room.

A run holds before its disk is full: nothing new is begun while less than `reserve` bytes are free,
and what is at work may still write. What trains waits in the middle of a write, once it meets a
disk on which nothing more fits. Both go on by themselves as soon as somebody frees space.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

#: Bytes that a run leaves free, and the part of a small disk.
RESERVED_BYTES = 32 << 20
RESERVED_PART = 0.05
#: Between two tries of a write that waits for room.
WAIT_SECONDS = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)
_waiting = False
Written = TypeVar("Written")


def missing_bytes(path: Path) -> int:
    """Bytes that must be freed on a folder's disk until a run may go on; 0: it may.

    raises   OSError where the folder is not there
    """
    disk = os.statvfs(path)
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return max(0, min(RESERVED_BYTES, int(RESERVED_PART * whole)) - free)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that nothing more fits on a disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


@contextmanager
def os_errors(path: Path | str) -> Iterator[None]:
    """Inside, what a library in Rust raises of a file is the OSError that it stands for.

    tokenizers and safetensors raise other classes, whose text ends in "(os error 28)".

    path     that it writes to
    raises   OSError
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


@contextmanager
def waits_for_room() -> Iterator[None]:
    """Inside, writes of this process that may wait do so; otherwise they fail."""
    global _waiting  # noqa: PLW0603  (all threads of a worker write for its one order)
    before, _waiting = _waiting, True
    try:
        yield
    finally:
        _waiting = before


def until_there_is_room(write: Callable[[], Written]) -> Written:
    """Write, and try again for as long as the disk is full, if this process waits for room.

    write    can be done again from the beginning
    raises   what it raises for any other reason
    """
    while True:
        try:
            return write()
        except Exception as error:
            if not (_waiting and is_full(error)):
                raise
        time.sleep(WAIT_SECONDS)


def append(file: IO[bytes], line: bytes) -> None:
    """Append to an unbuffered file that nobody else writes: all of a line, or nothing.

    raises   OSError
    """
    end = os.fstat(file.fileno()).st_size
    try:
        done = 0
        while done < len(line):
            # A disk that becomes full takes a part.
            done += file.write(line[done:])
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise
