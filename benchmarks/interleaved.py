"""Time several pieces of work against each other: in rounds, each piece once a round.

A round shows all pieces the same clock, temperature and neighbours, so ratios within a round are
steadier than the times themselves. Every call works on the next of several sets of inputs, which
together are larger than the caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch

Work = Callable[[int], object]
BLOCK_MS = 8.0  # of one piece in one round, so that clocks and events resolve it
MAX_CALLS = 20


@dataclass(frozen=True, slots=True)
class Runner:
    """Work that can be started again and again.

    run     does it `calls` times
    calls   how often one `run` does it
    """

    run: Callable[[], object]
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def json(self) -> dict[str, float]:
        """As a result file has it."""
        return asdict(self)


def eager(work: Work, sets: int) -> Runner:
    """One call after the other, over all sets of inputs in turn."""
    order = cycle(range(sets))
    return Runner(lambda: work(next(order)))


def captured(work: Work, sets: int) -> Runner:
    """A CUDA graph with one call on each set of inputs.

    raises   whatever stops the capture: a copy that waits for the device, for one
    """
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            for index in range(sets):
                work(index)
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            work(index)
    return Runner(graph.replay, sets)


def synchronize() -> None:
    """Wait until the GPU has nothing left to do, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], count: int = 1) -> float:
    """Of one of so many runs; the GPU has nothing left to do before and after all of them."""
    synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    synchronize()
    return (time.perf_counter() - started) / count


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """The number of each round with each name in turn.

    Odd rounds go through the names backwards, so that none is always behind the same other. A name
    that is taken out of a mapping meanwhile does not come in later rounds.
    """
    for number in range(rounds):
        order = list(names)
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def interleave(
    runners: Mapping[str, Runner], device: str, rounds: int, block_ms: float = BLOCK_MS
) -> dict[str, list[float]]:
    """Milliseconds a call of each runner, one figure a round."""
    repeats = {name: _repeats(runner, device, block_ms) for name, runner in runners.items()}
    found: dict[str, list[float]] = {name: [] for name in runners}
    for _, name in turns(runners, rounds):
        found[name].append(block(runners[name], device, repeats[name]))
    return found


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of the quotients of the rounds."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def _repeats(runner: Runner, device: str, block_ms: float) -> int:
    # The first block still meets cold caches and growing memory pools.
    block(runner, device, 1)
    once = block(runner, device, 1) * runner.calls
    return max(1, min(math.ceil(block_ms / max(once, 1e-3)), MAX_CALLS))


def block(runner: Runner, device: str, repeats: int) -> float:
    """Milliseconds a call over so many runs, after one that does not count.

    On CUDA the host runs ahead of the device as it does in training; where it cannot keep ahead,
    what is measured is the host, and that is meant.
    """
    if device != "cuda":
        return seconds_of(runner.run, repeats) * 1e3 / runner.calls
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    runner.run()
    start.record()
    for _ in range(repeats):
        runner.run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (repeats * runner.calls)
