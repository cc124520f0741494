"""Run rounds through a pipeline of stages, by torch's schedules.

A micro-batch is one row: any mix of jobs, any number of tokens. All processes hold the round's
rows, so each knows what it will be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from tlora_fx.cost.pipeline_simulation import Action, demand_schedule
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import TloraError
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.row_stage import RowStage, StageCall
from tlora_fx.planners.stage_clock import StageClock, Timed
from tlora_fx.planners.stage_sharding import ShardedStages
from tlora_fx.planners.stages import Stage, cut_stages

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class PipelineRunner:
    """Forward and backward of a round over the pipeline of one replica.

    stages    those of this process; layers, loss and tensors are the model's own
    sharded   the same as one module, where the base is sharded over replicas
    """

    def __init__(self, model: SuperModel, plan: Plan, mesh: Mesh) -> None:
        """Cut a model that has its tensors, or those of this process.

        raises    NoStage
        """
        assert mesh.pp is not None, "a pipeline has several processes"
        self.plan, self.mesh, self.group = plan, mesh, mesh.pp
        graphs = cut_stages(model, plan.cuts)
        self.count = len(graphs)
        self.stages = [
            Stage(model, graph) for graph in graphs if graph.index % mesh.shape.pp == mesh.pp_rank
        ]
        self.sharded: ShardedStages | None = None
        if plan.shard_base and mesh.shape.dp > 1:
            self.sharded = ShardedStages(model, self.stages, plan, mesh)
        self._schedules: dict[int, tuple[Any, list[RowStage]]] = {}
        self._weights = torch.empty(0)
        self._losses: list[Tensor] = []

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round of this replica: forward and backward of its rows.

        rows      the whole round's, of all replicas, on the CPU; replica d has d, d + dp, ...
        weights   [J] on the process's device
        returns   [J] each job's weighted loss sum over the replica's rows, the same on all stages
        raises    ScheduleRefused, TokensMismatch, PipelineBroken
        """
        own = rows[self.mesh.dp_rank :: self.mesh.shape.dp]
        mine = [row.to(self.mesh.device) for row in own]
        schedule, stages = self._schedule(len(mine))
        for stage in stages:
            stage.rows_module.rows = mine
        self._weights = weights
        self._losses.clear()
        numbers = torch.arange(len(mine))
        first = (numbers,) if any(stage.graph.first for stage in stages) else ()
        target = numbers if any(stage.graph.last for stage in stages) else None
        try:
            schedule.step(*first, number=numbers, target=target, losses=[], return_outputs=False)
        except RuntimeError as error:
            ours = _ours(error)
            if ours is None:
                raise
            raise ours from error
        finally:
            for stage in stages:
                stage.rows_module.rows = ()
        if self.sharded is not None:
            self.sharded.end_round()
        return self._summed(weights)

    def measured(self, rows: Sequence[PackedBatch], weights: Tensor) -> dict[Action, float]:
        """Run a round, and say how long each stage took for each micro-batch.

        Like `run` it adds to gradients; run such a round before, so that nothing is done for the
        first time.

        returns   seconds of every piece of work of this replica, the same on all stages
        """
        _, stages = self._schedule(len(rows[self.mesh.dp_rank :: self.mesh.shape.dp]))
        clock = StageClock(self.mesh.device)
        for stage in stages:
            stage.clock = clock
        try:
            self.run(rows, weights)
        finally:
            for stage in stages:
                stage.clock = None
        told: list[list[Timed]] = [[] for _ in range(self.mesh.shape.pp)]
        dist.all_gather_object(told, clock.read(), group=self.group)
        return {one.action: one.seconds for own in told for one in own}

    def _schedule(self, micro_batches: int) -> tuple[Any, list[RowStage]]:
        """The schedule for so many micro-batches; torch fixes their number when it is made."""
        if micro_batches not in self._schedules:
            processes, kind = self.mesh.shape.pp, self.plan.schedule
            demand_schedule(kind, self.count, processes, micro_batches)
            stages = [
                RowStage(stage, self.mesh.device, self.group, self._call(place))
                for place, stage in enumerate(self.stages)
            ]
            made = SCHEDULES[kind]
            multi = issubclass(made, PipelineScheduleMulti)
            # By default torch divides gradients by the number of micro-batches.
            schedule = made(
                stages if multi else stages[0],
                micro_batches,
                loss_fn=self._weighted,
                scale_grads=False,
            )
            self._schedules[micro_batches] = (schedule, stages)
        return self._schedules[micro_batches]

    def _call(self, place: int) -> StageCall | None:
        """How the stage at a place is run, where not by itself."""
        return None if self.sharded is None else partial(self.sharded, place)

    def _weighted(self, losses: Tensor, number: Tensor) -> Tensor:
        """The value whose gradient is wanted, of one micro-batch in the last stage."""
        weighted = losses * self._weights
        self._losses.append(weighted.detach())
        return weighted.sum()

    def _summed(self, weights: Tensor) -> Tensor:
        """The losses of all micro-batches, from the last stage to all."""
        total = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        if self._losses:
            # One after the other in their own dtype, as one process adds them up.
            total += reduce(torch.add, self._losses)
        self._losses.clear()
        dist.all_reduce(total, group=self.group)
        return total


def _ours(error: RuntimeError) -> TloraError | None:
    """The mistake of ours that torch wraps with a stage's arguments, if it is one."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, TloraError):
        found = found.__cause__
    return found
