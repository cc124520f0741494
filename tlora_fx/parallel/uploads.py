"""Copy a base's tensors from main memory to a GPU ahead of who takes them, by several threads.

A checkpoint's tensors are pages of files. One thread that touches them and waits for each copy
moves a few GB a second; a GPU's bus takes ten times as much. Here each of some threads fills
buffers of pinned memory, from which copies run while it fills the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_fx.host.memory import usable_cpus
from tlora_fx.model.late_tensors import LoadedTensors, Piece

logger = logging.getLogger(__name__)
MAX_THREADS = 8
#: Of pinned memory, which torch keeps; each thread has two.
BUFFER_BYTES = 8 * 2**20
#: No tensor is sent ahead while so many bytes are on the way.
AHEAD_BYTES = 2 * 2**30
#: Smaller tensors are copied by who takes them.
MIN_BYTES = 2**20
#: So much of a tensor in pieces is one thread's.
PART_BYTES = 64 * 2**20
#: A tensor in main memory, and where it goes to.
Pair = tuple[Tensor, Tensor]


class Upload(NamedTuple):
    """A tensor on its way.

    target   on the GPU
    sent     when done, the event behind the last copy of a part of it, for each part
    """

    target: Tensor
    sent: list[Future[Any]]


class UploadedTensors(Mapping[str, Tensor]):
    """Tensors by name, which are on a GPU when they are asked for in an expected order.

    tensors   in main memory, or in pieces there (`LoadedTensors`)
    device    a GPU
    names     of tensors, each once, in the order in which they will be asked for

    A tensor that was taken once comes from main memory the next time, and so do tensors that were
    passed over and those that `names` lacks. Use it as a context: at its end no thread runs any
    more, and the current stream uses the memory of tensors that nobody took behind their copies.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, names: Iterable[str]
    ) -> None:
        self._tensors, self._device = tensors, device
        self._names = [name for name in names if name in tensors]
        self._places = {name: place for place, name in enumerate(self._names)}
        # Tensors from this place on were neither asked for nor sent.
        self._next = 0
        self._on_way: dict[str, Upload] = {}
        self._bytes = 0
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, usable_cpus()), "upload")
        self._own = threading.local()
        self._streams: list[torch.cuda.Stream] = []

    def __enter__(self) -> UploadedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        # Copies of tensors that nobody took may still run, and their memory is given away now.
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)
        self._on_way.clear()

    def __getitem__(self, name: str) -> Tensor:
        if (place := self._places.get(name, -1)) >= self._next:
            self._next = place + 1
            self._start(name)
        upload = self._on_way.pop(name, None)
        self._send()
        if upload is None:
            return self._tensors[name]
        self._bytes -= upload.target.nbytes
        for sent in upload.sent:
            torch.cuda.current_stream(self._device).wait_event(sent.result())
        return upload.target

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _send(self) -> None:
        """Send what comes next, as far as memory is meant for it, and there."""
        while self._bytes < AHEAD_BYTES and self._next < len(self._names):
            self._next += 1
            try:
                self._start(self._names[self._next - 1])
            except torch.OutOfMemoryError:
                # Who asks for the next one may have let go of others by then.
                self._next -= 1
                return

    def _start(self, name: str) -> None:
        late = self._tensors.late(name) if isinstance(self._tensors, LoadedTensors) else None
        source = self._tensors[name].detach() if late is None else late.stand_in
        if type(source) is not Tensor or source.nbytes < MIN_BYTES:
            return
        pieces = (Piece(source, (0,) * source.dim()),) if late is None else late.pieces
        if any(each.device.type != "cpu" or not each.is_contiguous() for each, _ in pieces):
            return
        # Memory of the stream that goes on with it, which others may still be reading.
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        pairs = [(piece.tensor, piece.of(target)) for piece in pieces]
        if not all(there.is_contiguous() for _, there in pairs):
            return
        free = torch.cuda.current_stream(self._device).record_event()
        self._bytes += source.nbytes
        sent = [self._pool.submit(self._copy, part, free) for part in _parts(pairs)]
        self._on_way[name] = Upload(target, sent)

    def _copy(self, pairs: Sequence[Pair], free: torch.cuda.Event) -> torch.cuda.Event:
        """Copy tensors into others on this thread's stream; the event behind it."""
        own = self._own
        with torch.cuda.device(self._device):
            if not hasattr(own, "stream"):
                own.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._streams.append(own.stream)
                own.buffers = _pinned_buffers()
                own.read = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
            own.stream.wait_event(free)
            with torch.cuda.stream(own.stream):
                if not own.buffers:
                    for source, target in pairs:
                        target.copy_(source)
                pieces = chain.from_iterable(starmap(_pieces, pairs if own.buffers else ()))
                for number, (here, there) in enumerate(pieces):
                    buffer, read = own.buffers[number % 2], own.read[number % 2]
                    read.synchronize()  # it may be filled again
                    filled = buffer[: len(here)].copy_(here)
                    there.copy_(filled, non_blocking=True)
                    read.record(own.stream)
                sent: torch.cuda.Event = own.stream.record_event()
                return sent


def _pinned_buffers() -> list[Tensor]:
    """Two buffers of pinned memory; none where the system gives no more of it."""
    try:
        return [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    except RuntimeError as error:
        logger.info("tensors are copied without pinned memory: %s", error)
        return []


def _parts(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs for one thread at a time."""
    part: list[Pair] = []
    for pair in pairs:
        part.append(pair)
        if sum(source.nbytes for source, _ in part) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def _pieces(source: Tensor, target: Tensor) -> Iterator[Pair]:
    """The bytes of two contiguous tensors, as many at a time as a buffer holds."""
    both = (torch.split(each.view(-1).view(torch.uint8), BUFFER_BYTES) for each in (source, target))
    return zip(*both, strict=True)
