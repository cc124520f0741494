"""Clock the stages of a pipeline: seconds of each for each micro-batch, beside a simulation's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_fx.cost.pipeline_simulation import Action, Kind, Times
from tlora_fx.model.batch import PackedBatch
from tlora_fx.parallel.pipeline import PipelineRunner


def clocked_round(
    runner: PipelineRunner, rows: Sequence[PackedBatch], weights: Tensor
) -> dict[Action, float]:
    """Run a round, and say how long each stage took for each micro-batch.

    Like `run` it adds to gradients; run such a round before, so that nothing is done for the first
    time.

    returns   seconds of every piece of work of this replica, the same on all stages
    """
    mesh = runner.mesh
    _, stages = runner._schedule(len(rows[mesh.dp_rank :: mesh.shape.dp]))
    clock = StageClock(mesh.device)
    for stage in stages:
        own = vars(stage)
        own["forward_one_chunk"] = clock.timed(stage.forward_one_chunk, stage.graph.index, "F")
        if stage.graph.learns:
            own["backward_one_chunk"] = clock.timed(
                stage.backward_one_chunk, stage.graph.index, "B"
            )
    try:
        runner.run(rows, weights)
    finally:
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                vars(stage).pop(name, None)
    by_stage: list[dict[Action, float]] = [{} for _ in range(mesh.shape.pp)]
    dist.all_gather_object(by_stage, clock.read(), group=runner.group)
    return {action: seconds for timed in by_stage for action, seconds in timed.items()}


def times_of(timed: Mapping[Action, float], stages: int, micro_batches: int) -> Times:
    """The times of a round that was clocked, for `simulate`; what was not run takes no time."""

    def table(kind: Kind) -> list[list[float]]:
        return [
            [timed.get(Action(s, kind, m), 0.0) for m in range(micro_batches)]
            for s in range(stages)
        ]

    return Times(table("F"), table("B"))


@dataclass(slots=True)
class StageClock:
    """Measures the work of the stages that one process runs, without waiting for the device.

    device   events of the current stream on CUDA, wall clock elsewhere
    """

    device: torch.device
    _marks: list[tuple[Action, Any, Any]] = field(default_factory=list)

    def timed(self, run: Callable[..., Any], stage: int, kind: Kind) -> Callable[..., Any]:
        """The same method of a stage, whose first argument is the micro-batch, measured."""

        def measured(micro_batch: int, *args: Any, **more: Any) -> Any:
            start = self._mark()
            result = run(micro_batch, *args, **more)
            self._marks.append((Action(stage, kind, micro_batch), start, self._mark()))
            return result

        return measured

    def read(self) -> dict[Action, float]:
        """Seconds of all that was measured, in the order in which it ran."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {action: self._seconds(start, end) for action, start, end in self._marks}

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
