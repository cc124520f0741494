"""Time pieces of work in turns, alone and as CUDA graphs; see their memory; time collectives.

In each round every piece has its turn, so that clocks, temperatures and neighbours fall on all
alike; a figure is the median over the rounds. On CUDA times come from events, so that what is
seen is what training has: the device while it is busy, the host where it cannot keep ahead.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_fx.cost.hardware import LinkTier
from tlora_fx.cost.profile import CollectivePoint, Operation
from tlora_fx.errors import TloraError
from tlora_fx.parallel.capturing import forget_capture

logger = logging.getLogger(__name__)
# Of one piece in a turn: a host that launches few layers has not come to its pace.
BLOCK_MS = 50.0
MAX_CALLS = 8


@dataclass(slots=True)
class TimedPass:
    """One forward, and its backward where it has one.

    forward    what is timed; gives what `backward` takes
    backward   of several forwards at once, as one backward runs through all layers of a model;
               None: the forward alone is timed
    times      milliseconds of forward and backward, one pair a round
    captured   the same as CUDA graphs; empty where that was not asked for, or does not go
    """

    forward: Callable[[], Any]
    backward: Callable[[Sequence[Any]], object] | None = None
    times: list[tuple[float, float]] = field(default_factory=list)
    captured: list[tuple[float, float]] = field(default_factory=list)
    calls: int = 1

    @property
    def forward_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(there for there, _ in self.times)

    @property
    def backward_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(back for _, back in self.times)

    @property
    def captured_ms(self) -> tuple[float, float] | None:
        """The medians of forward and backward as CUDA graphs, if there are any."""
        if not self.captured:
            return None
        there, back = zip(*self.captured, strict=True)
        return statistics.median(there), statistics.median(back)

    @property
    def noise(self) -> float:
        """The larger median deviation of both, over its median."""
        return max(_noise(values) for values in zip(*self.times, strict=True) if any(values))


def measure(
    pieces: Sequence[TimedPass],
    device: torch.device,
    rounds: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Warm every piece up, then time all of them in turns.

    progress   is told how many turns are done, and of how many
    """
    turns = len(pieces) * (rounds + 1)
    done = itertools.count(1)
    for piece in pieces:
        _block(piece, device, 1)
        once = sum(_block(piece, device, 1))
        piece.calls = max(1, min(math.ceil(BLOCK_MS / max(once, 1e-3)), MAX_CALLS))
        if progress is not None:
            progress(next(done), turns)
    for number in range(rounds):
        for piece in pieces if number % 2 == 0 else reversed(pieces):
            piece.times.append(_block(piece, device, piece.calls))
            if progress is not None:
                progress(next(done), turns)


def _block(piece: TimedPass, device: torch.device, calls: int) -> tuple[float, float]:
    """Milliseconds a call of forward and backward; one forward before them does not count."""
    stamp = _stamps(device)
    piece.forward()
    stamps = [stamp()]
    outputs = [piece.forward() for _ in range(calls)]
    stamps.append(stamp())
    if piece.backward is not None:
        piece.backward(outputs)
        stamps.append(stamp())
    first, second, *third = [when() for when in stamps]
    back = (third[0] - second) / calls if third else 0.0
    return (second - first) / calls, back


def measure_captured(pieces: Sequence[TimedPass], device: torch.device, rounds: int) -> None:
    """Time pieces that `measure` has timed as CUDA graphs too, one after the other.

    What reads tables of jobs on the host cannot be captured, and is left out.
    """
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    for piece in pieces:
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(device):
                graphs, kept = _graphs(piece, pool)
        except (RuntimeError, TloraError) as error:
            logger.info("not timed as a CUDA graph: %s", error)
            forget_capture(device, stream, pool)
            continue
        for _ in range(rounds + 1):
            piece.captured.append(_replayed(graphs, device, piece.calls))
        # The first replay of a graph loads it.
        del piece.captured[0], graphs, kept


def _graphs(piece: TimedPass, pool: Any) -> tuple[list[torch.cuda.CUDAGraph], object]:
    """The forward, and the backward where there is one; and what lies in their memory."""
    graphs = [torch.cuda.CUDAGraph() for _ in range(1 if piece.backward is None else 2)]
    stream = _capture_stream(torch.cuda.current_device())
    with torch.cuda.graph(graphs[0], pool=pool, stream=stream):
        output = piece.forward()
    if piece.backward is not None:
        with torch.cuda.graph(graphs[1], pool=pool, stream=stream):
            piece.backward([output])
    return graphs, output


@cache
def _capture_stream(_: int) -> torch.cuda.Stream:
    """A stream of a device: cuBLAS keeps memory for each on which it ever ran."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _replayed(
    graphs: Sequence[torch.cuda.CUDAGraph], device: torch.device, calls: int
) -> tuple[float, float]:
    """Milliseconds a replay of the first and of the second graph."""
    stamp = _stamps(device)
    graphs[0].replay()
    stamps = [stamp()]
    for graph in graphs:
        for _ in range(calls):
            graph.replay()
        stamps.append(stamp())
    first, second, *third = [when() for when in stamps]
    return (second - first) / calls, (third[0] - second) / calls if third else 0.0


def _stamps(device: torch.device) -> Callable[[], Callable[[], float]]:
    """What takes a stamp on the device; the stamp then says its milliseconds."""
    if device.type != "cuda":
        return _host_stamp
    event: Any = torch.cuda.Event
    zero = event(enable_timing=True)
    torch.cuda.synchronize(device)
    zero.record()

    def stamp() -> Callable[[], float]:
        taken = event(enable_timing=True)
        taken.record()

        def when() -> float:
            taken.synchronize()
            return float(zero.elapsed_time(taken))

        return when

    return stamp


def _host_stamp() -> Callable[[], float]:
    now = time.perf_counter() * 1e3
    return lambda: now


def _noise(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values) / middle if middle else 0.0


@dataclass(slots=True)
class Bytes:
    """Bytes that a forward leaves until the backward, and the most that each took meanwhile."""

    saved: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0


def bytes_of(piece: TimedPass, device: torch.device, shared: Sequence[Tensor]) -> Bytes:
    """See one forward and backward in memory.

    shared   tensors that stand before the forward and are not counted where no allocator counts
    """
    backward = piece.backward or (lambda outputs: None)
    if device.type != "cuda":
        known = {tensor.untyped_storage().data_ptr() for tensor in shared}
        with _kept_storages(known) as kept:
            output = piece.forward()
        for result in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(result, Tensor):
                kept[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
        saved = float(sum(kept.values()))
        backward([output])
        return Bytes(saved, saved, 0.5 * saved)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = piece.forward()
    saved = torch.cuda.memory_allocated(device) - before
    forward_peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    standing = torch.cuda.memory_allocated(device)
    backward([output])
    backward_peak = torch.cuda.max_memory_allocated(device) - standing
    return Bytes(float(saved), float(forward_peak), float(backward_peak))


@contextmanager
def _kept_storages(known: set[int]) -> Iterator[dict[int, int]]:
    """Sizes of the storages that autograd keeps meanwhile, but for known ones."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


# Collectives: run under torchrun, by all processes at once.

SIZES = (2**16, 2**20, 2**23, 2**26, 2**28)
ON_CPU = SIZES[:3]
REPEATS = 5


def collective_points(
    device: torch.device, per_node: int, rounds: int = 5
) -> list[CollectivePoint]:
    """All-reduce, all-gather and send over all processes, half of them, and two, by size.

    per_node   processes of a node: what stays inside one is told apart from what does not
    returns    the same on every process: medians of the slowest
    """
    world = dist.get_world_size()
    payloads = SIZES if device.type == "cuda" else ON_CPU
    points: list[CollectivePoint] = []
    for size in sorted({2, max(2, world // 2), world}):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            tier: LinkTier = "node" if size <= per_node else "network"
            points.extend(group_points(device, group, size, tier, payloads, rounds))
        dist.barrier()
    return points


def group_points(
    device: torch.device,
    group: dist.ProcessGroup | None,
    size: int,
    tier: LinkTier,
    payloads: Sequence[int],
    rounds: int,
    *,
    sends: bool = True,
) -> list[CollectivePoint]:
    """Collectives of one group of processes, by size; all of them call this together.

    sends   sends too, where there are two processes
    """
    points = []
    for payload in payloads:
        for operation, work in collective_works(device, group, size, payload).items():
            if operation == "send" and not sends:
                continue
            parts = 2 if operation == "send" else 1
            ms, noise = time_collective(work, device, group, rounds, parts)
            points.append(
                CollectivePoint(
                    operation=operation,
                    tier=tier,
                    processes=size,
                    payload_bytes=payload,
                    ms=ms,
                    noise=noise,
                )
            )
    return points


def time_collective(
    work: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None,
    rounds: int,
    parts: int = 1,
) -> tuple[float, float]:
    """Milliseconds of one collective, by the slowest process of a group, and this one's noise.

    All processes of the group call this together.

    parts    how many each call of `work` holds
    """
    _, *times = [_collective_ms(work, device, parts) for _ in range(rounds + 1)]
    median = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX, group=group)
    return float(median), _noise(times)


def collective_works(
    device: torch.device, group: dist.ProcessGroup | None, size: int, payload: int
) -> dict[Operation, Callable[[], object]]:
    """Collectives of a group of processes, by name; sends where there are two.

    payload    bytes that each process has in the end
    """
    whole = torch.zeros(payload // 2 // size * size, dtype=torch.bfloat16, device=device)
    piece = torch.zeros(whole.numel() // size, dtype=torch.bfloat16, device=device)
    works: dict[Operation, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: _all_gather(whole, piece, group=group),
    }
    if size == 2:
        works["send"] = lambda: _send(whole, group)
    return works


# torch 2.13 renames `all_gather_into_tensor`, and warns of the old name; torch 2.11 has no other.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _send(value: Tensor, group: dist.ProcessGroup | None) -> None:
    """From the first process to the second, and back: two sends."""
    rank = dist.get_rank(group)
    for sender in (0, 1):
        if rank == sender:
            dist.send(value, 1 - rank, group=group)
        else:
            dist.recv(value, 1 - rank, group=group)


def _collective_ms(work: Callable[[], object], device: torch.device, parts: int = 1) -> float:
    """Milliseconds of one; `parts`: how many each call holds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3 / REPEATS / parts
