"""Files of safetensors in main memory, where tensors are views of a file's content.

The library's own `save` and `load` keep all threads waiting for as long as they take, and `save`
refuses tensors that share storage. Content that is one piece goes to a device, or comes from it, in
one transfer.

source   https://huggingface.co/docs/safetensors, format
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from tlora_fx.parallel.capturing import free_gpu_bytes


class _Layout(NamedTuple):
    """How a file is laid out.

    first   what it begins with
    at      where each tensor begins, in bytes
    size    of all, in bytes
    """

    first: bytes
    at: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Layout:
        """Layout of a file with these tensors."""
        # Wide ones first, so that each lies where its dtype may begin.
        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = [0]
        for name in names:
            ends.append(ends[-1] + tensors[name].nbytes)
            shape, dtype = list(tensors[name].shape), _name_of(tensors[name].dtype)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        first = len(text).to_bytes(8, "little") + text
        at = {name: len(first) + end for name, end in zip(names, ends, strict=False)}
        return cls(first, at, len(first) + ends[-1])


@cache
def _name_of(dtype: torch.dtype) -> str:
    """How safetensors calls a dtype; raises KeyError for one that it does not know."""
    content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    size = int.from_bytes(content[:8], "little")
    return str(json.loads(content[8 : 8 + size])["x"]["dtype"])


@cache
def _dtype_of(name: str) -> torch.dtype:
    """The dtype that safetensors calls so; raises SafetensorError for what is none."""
    header = json.dumps({"x": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    return safetensors.torch.load(len(header).to_bytes(8, "little") + header)["x"].dtype


#: Bytes of small tensors that are put together on their device.
TOGETHER = 1 << 26


def as_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory that lie as in a file; small ones come together from their device."""
    layout = _Layout.of(tensors)
    content = torch.empty(layout.size, dtype=torch.uint8)
    end = len(layout.first)
    content.numpy().data[:end] = layout.first
    for names in _together(layout, tensors):
        pieces = [
            tensors[name].detach().contiguous().reshape(-1).view(torch.uint8) for name in names
        ]
        begin, end = end, end + sum(map(len, pieces))
        if tensors[names[0]].device.type == "cpu":
            torch.cat(pieces, out=content[begin:end])
        else:
            _copy(pieces[0] if len(pieces) == 1 else torch.cat(pieces), content[begin:end])
    return {
        name: _piece(content, at, tensors[name].nbytes, tensors[name].dtype, tensors[name].shape)
        for name, at in layout.at.items()
    }


def _together(layout: _Layout, tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names that follow on each other, of one device, and of few bytes unless there is one only."""
    names: list[str] = []
    nbytes = 0
    for name in layout.at:
        tensor = tensors[name]
        apart = names and tensor.device != tensors[names[0]].device
        if apart or (names and nbytes + tensor.nbytes > TOGETHER):
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += tensor.nbytes
    if names:
        yield names


def _piece(
    content: Tensor, at: int, nbytes: int, dtype: torch.dtype, shape: torch.Size | list[int]
) -> Tensor:
    piece = content[at : at + nbytes]
    # Only files of others have tensors where their dtype may not begin.
    piece = piece.clone() if at % dtype.itemsize else piece
    return piece.view(dtype).view(shape)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> memoryview:
    """The content of a file; tensors may be views of one storage, on any device.

    Tensors that lie as in a file are not copied.
    """
    layout = _Layout.of(tensors)
    if not tensors:
        return memoryview(layout.first)
    storage = next(iter(tensors.values())).untyped_storage()
    if not _lies(tensors, layout, storage):
        storage = next(iter(as_file(tensors).values())).untyped_storage()
    return _bytes_of(storage).numpy().data


def _lies(tensors: Mapping[str, Tensor], layout: _Layout, storage: torch.UntypedStorage) -> bool:
    """Whether tensors are views of a file's content, which is this storage."""
    if storage.device.type != "cpu" or storage.nbytes() != layout.size:
        return False
    return _bytes_of(storage).numpy().data[: len(layout.first)] == layout.first and all(
        tensor.is_contiguous() and tensor.data_ptr() - storage.data_ptr() == layout.at[name]
        for name, tensor in tensors.items()
        if tensor.nbytes
    )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Copies to and from a GPU. A page of main memory is made and cleared when it is touched first, and
# the driver touches one page after another. Here the GPU copies into pinned memory, and several
# threads copy from there.

#: Bytes of a piece, and threads that copy one in main memory.
STAGED = 1 << 24
THREADS = 8
#: Free GPU memory that a transfer needs, as a multiple of the bytes that are moved.
FREE_MEMORY_FACTOR = 4


class _Stage:
    """Two pieces of pinned memory: while the GPU copies one, threads copy the other."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.Lock()
        self.pieces = [torch.empty(STAGED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.done = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def up(self, source: Tensor, target: Tensor) -> None:
        """Copy to the GPU; it may go on afterwards, in the order of its stream."""
        pieces = zip(torch.split(source, STAGED), torch.split(target, STAGED), strict=True)
        with self.lock, torch.cuda.device(self.device):
            for index, (here, there) in enumerate(pieces):
                piece, done = self.pieces[index % 2][: len(here)], self.done[index % 2]
                done.synchronize()
                _copy_by_threads(here, piece)
                there.copy_(piece, non_blocking=True)
                done.record()

    def down(self, source: Tensor, target: Tensor) -> None:
        """Copy from the GPU."""
        pieces = list(zip(torch.split(source, STAGED), torch.split(target, STAGED), strict=True))
        with self.lock, torch.cuda.device(self.device):
            for index in range(len(pieces) + 1):
                if index < len(pieces):
                    there, done = pieces[index][0], self.done[index % 2]
                    done.synchronize()  # of one that goes up on another stream
                    self.pieces[index % 2][: len(there)].copy_(there, non_blocking=True)
                    done.record()
                if index > 0:
                    here, before = pieces[index - 1][1], (index - 1) % 2
                    self.done[before].synchronize()
                    _copy_by_threads(self.pieces[before][: len(here)], here)


@cache
def _threads() -> ThreadPoolExecutor:
    """What copies in main memory: in a process that was forked, torch itself has one thread."""
    return ThreadPoolExecutor(THREADS, "copies")


os.register_at_fork(after_in_child=_threads.cache_clear)


def _copy_by_threads(source: Tensor, target: Tensor) -> None:
    """Copy bytes in main memory."""
    share = max(1, -(-len(source) // THREADS))
    parts = zip(torch.split(source, share), torch.split(target, share), strict=True)
    asked = [_threads().submit(np.copyto, there.numpy(), here.numpy()) for here, there in parts]
    for each in asked:
        each.result()


_stage_of = cache(_Stage)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes from a device to another."""
    if target.is_cuda and not source.is_cuda:
        _stage_of(target.device).up(source, target)
    elif source.is_cuda and not target.is_cuda:
        _stage_of(source.device).down(source, target)
    else:
        target.copy_(source)


def file_tensors(content: memoryview) -> dict[str, Tensor]:
    """The tensors of a file, views of its content.

    raises    ValueError, KeyError, TypeError, AttributeError, RuntimeError or SafetensorError where
              it is none
    """
    start = 8 + int.from_bytes(content[:8], "little")
    if start > len(content):
        raise ValueError("it is cut short")
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    whole = torch.frombuffer(content, dtype=torch.uint8)
    found = {}
    for name, entry in header.items():
        (begin, end), dtype = entry["data_offsets"], _dtype_of(entry["dtype"])
        found[name] = _piece(whole, start + begin, end - begin, dtype, entry["shape"])
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of ours, which threads read into one piece of main memory.

    Pages of a mapped file are read a few at a time, by whoever copies them to a device. Here
    several reads are under way at once, and each thread clears the pages that it fills.

    raises    OSError; as `file_tensors` where it is none
    """
    size = file.stat().st_size
    # A bytearray would be filled with zeros first.
    content = torch.empty(size, dtype=torch.uint8).numpy().data
    parts = [
        _threads().submit(fill, file, content[at : at + STAGED], at)
        for at in range(0, size, STAGED)
    ]
    for part in parts:
        part.result()
    return file_tensors(content)


def fill(file: Path, into: memoryview, at: int) -> None:
    """Fill a piece of memory from its place in a file; behind the file's end nothing is read."""
    with file.open("rb", buffering=0) as source:
        source.seek(at)
        done = 0
        while done < len(into) and (read := source.readinto(into[done:])):
            done += read


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device, for a moment; those that share a storage come in one transfer.

    Where the device has too little free memory for them and what is made of them, they stay where
    they are.
    """
    away = {name: each.untyped_storage() for name, each in tensors.items() if each.device != device}
    storages = {storage.data_ptr(): storage for storage in away.values()}
    size = sum(storage.nbytes() for storage in storages.values())
    if device.type == "cuda" and FREE_MEMORY_FACTOR * size > free_gpu_bytes(device):
        return dict(tensors)
    there = {}
    for address, storage in storages.items():
        there[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        _copy(_bytes_of(storage), there[address])
    found = dict(tensors)
    for name, storage in away.items():
        tensor = tensors[name]
        found[name] = torch.empty(0, dtype=tensor.dtype, device=device).set_(
            there[storage.data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
    return found
