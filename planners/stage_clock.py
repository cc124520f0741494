"""How long each stage takes for each micro-batch: the measured counterpart of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch

from tlora_fx.cost.pipeline_simulation import Action


class Timed(NamedTuple):
    """One piece of work and how long it took."""

    action: Action
    seconds: float


@dataclass(slots=True)
class StageClock:
    """Measures the work of the stages that one process runs, without waiting for the device.

    device   events of the current stream on CUDA, wall clock elsewhere
    """

    device: torch.device
    _marks: list[tuple[Action, Any, Any]] = field(default_factory=list)

    @contextmanager
    def time(self, action: Action) -> Iterator[None]:
        """Measure what runs inside."""
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    def read(self) -> list[Timed]:
        """All that was measured since the last call, in the order in which it ran."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = [Timed(action, self._seconds(start, end)) for action, start, end in self._marks]
        self._marks.clear()
        return found

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000
