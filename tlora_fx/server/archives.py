"""Tar archives of the folders of jobs: one that is sent as it is made, and one that is kept."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tlora_fx.scheduler.store import RESERVED
from tlora_fx.server.store import OwnedJob, ReplacedJob

#: Of a file, sent at a time.
CHUNK_BYTES = 256 << 10
_END = bytes(2 * tarfile.BLOCKSIZE)


def packed(folder: Path, name: str) -> tuple[int, Iterator[bytes]]:
    """The files of a folder as an archive: its size in bytes, and its content.

    The files are open from now on, so that the whole of them is sent although the folder is
    removed meanwhile. Nothing is written to the disk.

    name     of the folder in the archive
    raises   OSError
    """
    with ExitStack() as stack:
        paths = [
            path
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        ]
        files = [stack.enter_context(path.open("rb")) for path in paths]
        heads = [
            _head(f"{name}/{path.name}", file) for path, file in zip(paths, files, strict=True)
        ]
        size = sum(len(head) + length + _padding(length) for length, head in heads) + len(_END)
        return size, _content(files, heads, stack.pop_all())


def _head(name: str, file: IO[bytes]) -> tuple[int, bytes]:
    """Size of a file in bytes, and what stands before its content."""
    status, info = os.fstat(file.fileno()), tarfile.TarInfo(name)
    info.size, info.mtime = status.st_size, int(status.st_mtime)
    return info.size, info.tobuf()


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def _content(
    files: Sequence[IO[bytes]], heads: Sequence[tuple[int, bytes]], stack: ExitStack
) -> Iterator[bytes]:
    with stack:
        for file, (size, head) in zip(files, heads, strict=True):
            yield head
            left = size
            while left:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise OSError(f"{file.name} has become shorter while it was sent")
                left -= len(chunk)
                yield chunk
            yield bytes(_padding(size))
        yield _END


def archive(target: Path, folder: Path, job: OwnedJob | ReplacedJob) -> None:
    """Write what is left of a job into a tar file, with `archived.json` about it.

    target   folder of the tar files; one that holds the job already is replaced
    folder   of the job; it may be gone
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = target / f"{job.number:06d}-{job.name}.tar"
    part = path.with_suffix(".part")
    about = json.dumps({**asdict(job), "state": job.state}, indent=1).encode() + b"\n"
    with tarfile.open(part, "w") as tar:
        info = tarfile.TarInfo(f"{job.name}/archived.json")
        info.size = len(about)
        tar.addfile(info, io.BytesIO(about))
        if folder.is_dir() and job.name not in RESERVED:
            tar.add(folder, job.name)
    part.replace(path)
