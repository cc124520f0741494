"""Files that survive a crash: written, fsynced, then renamed into place; and transactions."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlora_fx.host.storage import until_there_is_room

#: Folders whose entries are a process's open files, and devices.
_STREAMS = {Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")}


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and wait until the disk holds it.

    raises   OSError, such as ENOSPC; the file may then hold a part
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk holds a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Put new content under a name that this process alone writes.

    A reader sees the old file or the new one. Several writers need `replace_shared_file`. In a
    process that waits for room (`storage`) it waits while the disk is full.

    raises   OSError; the old file then stays whole
    """
    # One name for all attempts: what a killed process left is overwritten, not gathered.
    fresh = path.with_name(f".{path.name}.tmp")
    until_there_is_room(lambda: _replace(path, fresh, data))


def _replace(path: Path, fresh: Path, data: bytes | memoryview) -> None:
    try:
        write_synced(fresh, data)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Put content where a user wants it, who may name a link, a pipe or a device.

    Its folder is made where there is none. A file is replaced as `replace_file` does it, behind a
    link the file that it leads to. What cannot be replaced, such as /dev/stdout, is written to.

    raises   OSError; an old file then stays whole
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent in _STREAMS or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            stream.write(data)
        return
    replace_file(path.resolve() if path.is_symlink() else path, data)


def replace_shared_file(path: Path, data: bytes) -> None:
    """Put new content under a name that several processes may write at once: the last one wins.

    raises   OSError; the old file then stays whole
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    _replace(path, Path(name), data)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it, to the disk, where it cannot have one.

    raises   OSError where the source is gone or the target is there
    """
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def whole_lines(path: Path, begin: int, most: int = -1) -> bytes:
    """Text of a file from a byte on, up to its last whole line: one that is being written waits.

    most     bytes that are read; -1: all
    raises   OSError
    """
    with path.open("rb") as file:
        file.seek(begin)
        content = file.read(most)
    return content[: content.rfind(b"\n") + 1]


@contextmanager
def transaction(base: sqlite3.Connection) -> Iterator[None]:
    """Inside, all is written, or nothing of it where anything is raised."""
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
        base.execute("COMMIT")
    except BaseException:
        # SQLite itself has ended a transaction that met a full disk.
        if base.in_transaction:
            base.execute("ROLLBACK")
        raise
