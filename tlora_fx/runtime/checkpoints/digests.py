"""Digests of the contents of files, each made once.

The digest of a file is kept in the cache folder under the file's path, size, times and inode, so
that it is made again only after somebody has written to the file. Small files are read each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_fx.config.base_files import safetensors_header, weight_files
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseFileDamaged, errors_as
from tlora_fx.host.kept_objects import KeptObjects

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS = KeptObjects("digests", "the digest of a file")
#: Blocks of each tensor that a sampled digest reads, evenly spread from its first byte to its last.
BLOCKS = 8
BLOCK_BYTES = 4096
#: Digests of smaller files are not kept.
KEPT_FROM_BYTES = 1 << 20
#: A file that was written a moment ago may be written again within the same tick of its clock.
SETTLED_SECONDS = 2.0
_SHOWN = 32


def file_digest(path: Path | str) -> str:
    """The SHA-256 of a whole file, 32 hexadecimal digits of it; raises OSError."""

    def whole(file: BufferedReader) -> str:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_SHOWN]

    return str(_kept(Path(path), "whole", whole))


def base_digests(spec: BaseSpec, *, whole: bool = False) -> dict[str, str] | None:
    """A digest of each tensor of a base's safetensors files, by its name in them.

    whole     read every byte, which for a large base takes minutes; else a few blocks of each
              tensor, which shows another checkpoint but not one changed number
    returns   None for a base without files, and for one of the hub that is not on this machine
    raises    BaseNotLoadable when a file is no safetensors file, or cannot be read
    """
    files = weight_files(spec)
    if files is None:
        return None
    digests: dict[str, str] = {}
    kind = "tensors-whole" if whole else "tensors-sampled"
    for path in files:
        with errors_as(
            BaseFileDamaged, "a file of the base's weights cannot be read", OSError, ValueError,
            named=True, base=spec.model, file=path, help="copy or download the base again",
        ):  # fmt: skip
            kept = _kept(path, kind, lambda file: dict(_of_tensors(file, whole)))
        assert isinstance(kept, dict)
        digests |= kept
    return digests


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The same of tensors in memory, by a few blocks of each."""
    return {name: _in_memory(tensor) for name, tensor in sorted(tensors.items())}


def _in_memory(tensor: Tensor) -> str:
    import torch

    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start, length in _blocks(0, flat.numel(), whole=False):
        digest.update(flat[start : start + length].cpu().numpy().data)
    return digest.hexdigest()[:_SHOWN]


def _of_tensors(file: BufferedReader, whole: bool) -> Iterator[tuple[str, str]]:
    for name, tensor in safetensors_header(Path(file.name)).items():
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        begin, end = tensor.begin, tensor.end
        for start, length in _blocks(begin, end, whole):
            file.seek(start)
            block = file.read(length)
            if len(block) < length:
                raise ValueError(f"the file ends within {name}")
            digest.update(block)
        yield name, digest.hexdigest()[:_SHOWN]


def _blocks(begin: int, end: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Where to read, and how much."""
    length = end - begin
    if whole or length <= BLOCKS * BLOCK_BYTES:
        piece = 1 << 24
        yield from ((start, min(piece, end - start)) for start in range(begin, end, piece))
        return
    for block in range(BLOCKS):
        yield begin + (length - BLOCK_BYTES) * block // (BLOCKS - 1), BLOCK_BYTES


# Digests by file.


def _kept(path: Path, kind: str, make: Callable[[BufferedReader], object]) -> object:
    """What `make` says of a file's content: as it was kept, or made now and kept."""
    path = path.resolve()
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        if before.st_size < KEPT_FROM_BYTES:
            return make(file)
        key = _key(path, kind, before)
        if (known := DIGESTS.read(key)) is not None:
            return known["digest"]
        made = make(file)
        after = os.fstat(file.fileno())
    settled = time.time() - after.st_mtime > SETTLED_SECONDS
    if settled and _key(path, kind, after) == key:
        DIGESTS.write(key, {"file": str(path), "digest": made})
    return made


def _key(path: Path, kind: str, status: os.stat_result) -> str:
    """Under what the digest of a file, as it is now, is kept."""
    written = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    text = json.dumps([kind, str(path), status.st_dev, *written])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_SHOWN]
