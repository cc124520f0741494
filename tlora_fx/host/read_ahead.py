"""Read files into the page cache ahead of time: who reads them later waits for no disk.

The kernel hands a file's pages to /dev/null, without a copy, in one call for many of them. So the
interpreter is free meanwhile, and pages that are in the cache already cost next to nothing.

source    Linux, sendfile(2) and splice_write of /dev/null in drivers/char/mem.c
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tlora_fx.host.memory import free_bytes
from tlora_fx.host.phases import phase

#: Fewer bytes are read as fast when they are asked for.
MIN_BYTES = 64 * 2**20
#: Bytes of one call.
BLOCK_BYTES = 64 * 2**20


class ReadAhead(threading.Thread):
    """Reads files in their order; it ends with the process, and fails without a word.

    files        to read
    done_bytes   how much of them the page cache was given so far
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(name="read-ahead", daemon=True)
        self.files = tuple(files)
        self.done_bytes = 0

    def run(self) -> None:
        """Read all files; who needs one meets its errors."""
        with phase("base files"):
            for file in self.files:
                try:
                    self._read(file)
                except OSError:
                    continue

    def _read(self, file: Path) -> None:
        with file.open("rb") as source, Path(os.devnull).open("wb") as nowhere:
            offset = 0
            while count := os.sendfile(nowhere.fileno(), source.fileno(), offset, BLOCK_BYTES):
                offset += count
                self.done_bytes += count


def read_ahead(files: Sequence[Path], root: Path = Path("/")) -> ReadAhead | None:
    """Begin to read files, in a thread.

    root      folder in which /proc and /sys lie
    returns   None where that would bring nothing: of small files, and of more than fits into the
              memory that is free, whose first pages would be gone before they are asked for
    """
    try:
        size = sum(file.stat().st_size for file in files)
        if size < MIN_BYTES or size > free_bytes(root):
            return None
    except OSError:
        return None
    thread = ReadAhead(files)
    thread.start()
    return thread
