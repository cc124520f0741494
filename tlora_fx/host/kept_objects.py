"""Results that are kept between processes: JSON objects in files of a cache folder, by key.

What cannot be read, or is something else than was written, counts as not there. Where the disk
refuses, nothing is kept. A folder may have a largest size: what was used longest ago goes first.

To look through a folder of ten thousand files takes a tenth of a second, so a process does it again
only after it has written a `LOOK_PART` of the largest size, or where that may be exceeded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_fx.host import environment
from tlora_fx.host.durable import replace_shared_file
from tlora_fx.host.paths import cache_folder

logger = logging.getLogger(__name__)

#: Of a folder's largest size: what a process writes, and what it makes room for, between two looks.
LOOK_PART = 1 / 64
#: By folder: its bytes when this process last looked, and what it has written since.
_seen: dict[Path, tuple[float, int]] = {}


@dataclass(frozen=True, slots=True)
class KeptObjects:
    """The objects of one folder.

    name       of the folder, below the cache folder
    what       the objects are, in the log, such as "what was traced"
    format     of the objects: those of another one count as not there
    variable   environment variable of the folder's largest size; "": it has none
    """

    name: str
    what: str
    format: int = 1
    variable: str = ""

    @property
    def folder(self) -> Path:
        """Where the files are, beside generated kernels."""
        return cache_folder() / self.name

    @property
    def max_bytes(self) -> float:
        """How large the folder may be; 0 where nothing is kept. Raises EnvironmentVariableWrong."""
        return environment.max_bytes(self.variable) if self.variable else math.inf

    def read(self, key: str) -> dict[str, Any] | None:
        """The object that is kept under a key; None where there is none, or another one."""
        path = self._file(key)
        try:
            stored = json.loads(path.read_text("utf-8"))
            kept, digest = stored["kept"], stored["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("%s cannot be read from %s: %s", self.what, path, error)
            return None
        if digest != self._digest(key, kept) or not isinstance(kept, dict):
            logger.info("%s holds something else than was written", path)
            return None
        with suppress(OSError):
            os.utime(path)  # the oldest files go first
        return kept

    def write(self, key: str, kept: dict[str, Any]) -> None:
        """Keep an object, if it fits."""
        path = self._file(key)
        entry = json.dumps({"digest": self._digest(key, kept), "kept": kept}).encode()
        if len(entry) > self.max_bytes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_shared_file(path, entry)
            self._make_room(path, len(entry))
        except OSError as error:
            logger.info("%s cannot be kept in %s: %s", self.what, path, error)

    def _make_room(self, path: Path, size: int) -> None:
        """Remove what was used longest ago, unless it surely fits beside a new file."""
        limit, folder = self.max_bytes, path.parent
        part = limit * LOOK_PART
        size_before, written = _seen.get(folder, (math.inf, 0))
        written += size
        if limit == math.inf or (size_before + written <= limit and written <= part):
            _seen[folder] = size_before, written
            return
        size_now = _bytes_in(folder)
        if size_now > limit:
            for old in longest_unused(folder.iterdir(), limit - part, keep=path):
                old.unlink(missing_ok=True)
            size_now = int(limit - part)
        _seen[folder] = size_now, 0

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _digest(self, key: str, kept: object) -> str:
        text = json.dumps([self.format, key, kept], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _bytes_in(folder: Path) -> int:
    size = 0
    with os.scandir(folder) as files:
        for file in files:
            with suppress(OSError):  # another process removed it
                size += file.stat().st_size
    return size


def longest_unused(paths: Iterable[Path], max_bytes: float, *, keep: Path) -> Iterator[Path]:
    """Files, or folders of files, that are to be removed so that the rest fits.

    keep   is not among them
    """
    entries = []
    for path in paths:
        with suppress(OSError):  # another process removed it
            used = path.stat()
            files = path.iterdir() if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files)
            entries.append((path != keep, used.st_mtime_ns, size, path))
    excess = sum(size for _, _, size, _ in entries) - max_bytes
    for removable, _, size, path in sorted(entries):
        if excess > 0 and removable:
            yield path
            excess -= size
