"""Run rounds through a pipeline of stages, by torch's schedules.

A micro-batch is one row: any mix of jobs, any number of tokens. All processes hold the round's
rows, so each knows what it will be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from tlora_fx.cost.facts import why_launched
from tlora_fx.cost.pipeline_simulation import require_schedule
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import TloraError
from tlora_fx.ir.graph import LOSS
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.fsdp import LayerSpan, first_trained, shard_spans
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.scores import RowScores
from tlora_fx.parallel.stage_graphs import StageGraphs
from tlora_fx.parallel.stages import Hidden, StageGraph, StageModule, cut_stages

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class PipelineRunner:
    """Forward and backward of a round over the pipeline of one replica.

    stages    those of this process; layers, loss and tensors are the model's own
    sharded   the same as one module, where the base is sharded over replicas
    graphs    of micro-batches that come again, where they may run so
    """

    def __init__(self, model: SuperModel, plan: Plan, mesh: Mesh, *, largest_row: int = 0) -> None:
        """Cut a model that has its tensors, or those of this process; raises NoStage.

        largest_row   as of `apply`
        """
        assert mesh.pp is not None, "a pipeline has several processes"
        self.model, self.plan, self.mesh, self.group = model, plan, mesh, mesh.pp
        graphs = cut_stages(model, plan.cuts)
        self.count = len(graphs)
        self.stages = [
            StageModule(model, graph)
            for graph in graphs
            if graph.index % mesh.shape.pp == mesh.pp_rank
        ]
        self.sharded: ShardedStages | None = None
        if plan.shard_base and mesh.shape.dp > 1:
            self.sharded = ShardedStages(model, self.stages, plan, mesh)
        self.graphs: StageGraphs | None = None
        if largest_row and mesh.device.type == "cuda":
            self.graphs = StageGraphs(model, self.stages, mesh.device, largest_row, group=mesh.tp)
            if reasons := why_launched(model.group):
                self.graphs.refused = f"tables of jobs are read on the host by {', '.join(reasons)}"
            elif not plan.captures:
                self.graphs.refused = "the base of its stages is sharded"
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
        replica = rows[self.mesh.dp_rank :: self.mesh.shape.dp]
        mine = [row.to(self.mesh.device) for row in replica]
        schedule, stages = self._schedule(len(mine))
        for stage in stages:
            stage.rows_module.rows = mine
        if self.graphs is not None:
            self.graphs.begin(replica, weights)
        self._weights = weights
        self._losses.clear()
        numbers = torch.arange(len(mine))
        first = (numbers,) if any(stage.graph.first for stage in stages) else ()
        target = numbers if any(stage.graph.last for stage in stages) else None
        try:
            with self.model.weighing(weights):
                schedule.step(
                    *first, number=numbers, target=target, losses=[], return_outputs=False
                )
        except RuntimeError as error:
            cause = _tlora_error(error)
            if cause is None:
                raise
            raise cause from error
        finally:
            for stage in stages:
                stage.rows_module.rows = ()
        if self.sharded is not None:
            self.sharded.end_round()
        if self.graphs is not None:
            self.graphs.end()
        return self._summed(weights)

    def evaluate(self, rows: Sequence[PackedBatch]) -> RowScores:
        """Forward of this replica's rows; see `StepRunner`.

        No schedule is needed where nothing comes back: a stage takes its next row while the stages
        above have those before. Stages of one process take turns.
        """
        device, processes = self.mesh.device, self.mesh.shape.pp
        mine = range(self.mesh.dp_rank, len(rows), self.mesh.shape.dp)
        total = torch.zeros(len(self.model.jobs), dtype=torch.float64, device=device)
        sent: list[tuple[Any, Tensor]] = []
        with self.model.evaluating() as predicted:
            for row in (rows[index].to(device) for index in mine):
                for index, stage in enumerate(self.stages):
                    graph, hidden = stage.graph, None
                    if graph.takes is not None:
                        shape = graph.takes.shape(row)
                        hidden = torch.empty(shape, dtype=graph.takes.dtype, device=device)
                        below = (graph.index - 1) % processes
                        dist.recv(hidden, group=self.group, group_src=below)
                    value = (self._call(index) or stage)(hidden, row).contiguous()
                    if graph.last:
                        total += value
                        continue
                    above = (graph.index + 1) % processes
                    work = dist.isend(value, group=self.group, group_dst=above)
                    sent.append((work, value))
        for work, _ in sent:
            work.wait()
        if self.sharded is not None:
            self.sharded.end_round()
        dist.all_reduce(total, group=self.group)
        tokens = [part.cpu() for part in predicted]
        return RowScores(total, dict(zip(mine, tokens, strict=False)))

    def _schedule(self, micro_batches: int) -> tuple[Any, list[RowStage]]:
        """The plan's pipeline schedule, for so many micro-batches: torch fixes their number."""
        if micro_batches not in self._schedules:
            processes, kind = self.mesh.shape.pp, self.plan.schedule
            require_schedule(kind, self.count, processes, micro_batches)
            stages = [
                RowStage(
                    stage,
                    self.mesh.device,
                    self.group,
                    self._call(index),
                    None if self.graphs is None else Replaying(self.graphs, index),
                )
                for index, stage in enumerate(self.stages)
            ]
            of_torch = SCHEDULES[kind]
            multi = issubclass(of_torch, PipelineScheduleMulti)
            # By default torch divides gradients by the number of micro-batches.
            schedule = of_torch(
                stages if multi else stages[0],
                micro_batches,
                loss_fn=self._weighted,
                scale_grads=False,
            )
            self._schedules[micro_batches] = (schedule, stages)
        return self._schedules[micro_batches]

    def _call(self, index: int) -> StageCall | None:
        """How a stage of this process is run, where not by itself."""
        return None if self.sharded is None else partial(self.sharded, index)

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


def _tlora_error(error: RuntimeError) -> TloraError | None:
    """The mistake of ours that torch wraps with a stage's arguments, if it is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TloraError):
        cause = cause.__cause__
    return cause


# A stage of torch's pipelining whose micro-batches are rows of any number of tokens.
#
# torch takes the size of every buffer from the first micro-batch. Here each buffer is made when it
# is needed, as long as the micro-batch's own row, and let go when it was read; where no adapter
# stands below a boundary, no gradient travels over it. What is overridden has the same names and
# meaning in torch 2.11 and 2.13.

StageCall = Callable[[Tensor | None, PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Replaying:
    """The graphs of one stage: its index is that among the stages of its process."""

    graphs: StageGraphs
    index: int


class RowModule(nn.Module):
    """Module of a stage that torch runs: it finds a micro-batch's row by its number.

    torch cuts every tensor that it is given into equal micro-batches, tables of a row too; a tensor
    of numbers is all that it may cut. Nor is it shown the stage's modules: it would forget the
    gradients of all that it sees below one of FSDP2's.

    call        runs the stage
    first       whether the stage is the first
    replaying   its graphs, where it may run so
    """

    def __init__(self, call: StageCall, first: bool, replaying: Replaying | None) -> None:
        super().__init__()
        assert not isinstance(call, nn.Module)
        self.call, self.first, self.replaying = call, first, replaying
        self.rows: Sequence[PackedBatch] = ()

    def forward(self, value: Tensor, *, number: Tensor) -> Tensor:
        """Run one micro-batch.

        value     the hidden value; in the first stage nothing of use
        number    int64 [1] on the CPU
        returns   as of the stage
        """
        hidden, own = None if self.first else value, int(number[0])

        def as_it_is() -> Tensor:
            return self.call(hidden, self.rows[own]).contiguous()

        if self.replaying is None:
            return as_it_is()
        return self.replaying.graphs.forward(self.replaying.index, own, hidden, as_it_is)


class RowStage(PipelineStage):
    """A stage for one number of micro-batches.

    call        runs the stage, where something has to be done around it
    replaying   its graphs, where it may run so
    clock       while it is set, times are kept there
    """

    def __init__(
        self,
        stage: StageModule,
        device: torch.device,
        group: dist.ProcessGroup,
        call: StageCall | None = None,
        replaying: Replaying | None = None,
    ) -> None:
        self.graph: StageGraph = stage.graph
        self.replaying = replaying
        self.rows_module = RowModule(call or stage.__call__, stage.graph.first, replaying)
        super().__init__(
            self.rows_module,
            self.graph.index,
            self.graph.count,
            device,
            input_args=(_example(self.graph.takes, device, self.graph.needs_grad),),
            output_args=(_example(self.graph.hands, device, self.graph.learns),),
            group=group,
        )
        self._nothing = torch.empty(0, device=device)

    @property
    def sends_grad(self) -> bool:
        """Whether the stage below waits for a gradient."""
        return self.graph.needs_grad

    @property
    def gets_grad(self) -> bool:
        """Whether the stage above sends a gradient."""
        return self.graph.learns and not self.graph.last

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a hidden value as long as its row."""
        if self.graph.takes is not None:
            self._allocate(self.args_recv_info[fwd_chunk_id], self.graph.takes, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a gradient as long as its row."""
        if not self.gets_grad:
            return []
        assert self.graph.hands is not None
        self._allocate(self.grad_recv_info[bwd_chunk_id], self.graph.hands, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the hidden value's gradient, where the stage below has a backward."""
        grads = self.bwd_cache.pop(bwd_chunk_id, ())
        if not self.sends_grad:
            return []
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in grads)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the hidden value of the stage below in this process."""
        (info,) = self.args_recv_info[mb_index]
        info.buffer = prev_stage_outputs.detach()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradient of the stage above in this process."""
        if self.gets_grad:
            (info,) = self.grad_recv_info[mb_index]
            info.buffer = next_stage_bwd_outputs[0]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a micro-batch's backward, where the stage has one."""
        if not self.graph.learns:
            self.bwd_cache[bwd_chunk_id] = (None,)
            self.fwd_cache.pop(bwd_chunk_id)
            return
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.replaying is not None:
            self.replaying.graphs.done(self.replaying.index, bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Forget the round before."""
        super().clear_runtime_states()
        self.bwd_cache.clear()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        (info,) = self.args_recv_info[fwd_chunk_id]
        return (self._taken(info).requires_grad_(self.sends_grad and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        (info,) = self.grad_recv_info[bwd_chunk_id]
        return (self._taken(info),)

    # Shapes are checked by the stage itself, against each micro-batch's own row.

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass

    def _allocate(self, infos: Sequence[Any], value: Hidden, micro_batch: int) -> None:
        (info,) = infos
        shape = value.shape(self.rows_module.rows[micro_batch])
        info.buffer = torch.empty(shape, dtype=value.dtype, device=self.device)

    def _taken(self, info: Any) -> Tensor:
        """What was received; its memory lives on only where it is needed."""
        tensor: Tensor = info.buffer
        info.buffer = self._nothing
        return tensor


def _example(value: Hidden | None, device: torch.device, needs_grad: bool) -> Tensor:
    """Stands for what travels: torch asks it for dtype and for whether gradients travel."""
    if value is None:
        return torch.empty(1, device=device, requires_grad=needs_grad)
    # One token: torch makes a buffer of this size for every micro-batch, which is never used.
    sizes = [size if isinstance(size, int) else 1 for size in value.sizes]
    return torch.empty(sizes, dtype=value.dtype, device=device, requires_grad=needs_grad)


# Shard the stages of a pipeline over its replicas: a stage's layers are gathered one by one.
#
# Every micro-batch gathers them anew, or, where a plan keeps what is gathered, the first of a
# round gathers and all are let go of at its end.


class ShardedStages(nn.Module):
    """The stages of one process as one module: FSDP2 shares buffers and streams below one root."""

    def __init__(
        self, model: SuperModel, stages: Sequence[StageModule], plan: Plan, mesh: Mesh
    ) -> None:
        """Shard stages whose model has its tensors, or those of this process.

        To be called on every process of dp, before a stage runs.
        """
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.keeps = plan.keep_gathered
        self.learns = any(stage.graph.learns for stage in stages)
        spans = [_span(model, stage) for stage in stages]
        tables = shard_spans(model, self, spans, plan, mesh).tables
        for stage, paths in zip(stages, tables, strict=True):
            for path in paths:
                # The stage's code has tensors of its own, which FSDP2 would not exchange.
                stage.code.set_submodule(path, model.net.get_submodule(path))
        if self.keeps:
            _sharded(self).set_reshard_after_backward(False)

    def forward(self, index: int, hidden: Tensor | None, row: PackedBatch) -> Tensor:
        """Run one micro-batch through the stage at this index; see `StageModule`."""
        return cast(Tensor, self.stages[index](hidden, row))

    def end_round(self) -> None:
        """Free what was kept for a round; to be called after its last micro-batch."""
        if self.keeps:
            from torch.distributed.fsdp import FSDPModule

            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if not self.learns:
            # FSDP2 notes every forward until a backward has ended, which never comes here.
            _sharded(self)._get_fsdp_state()._root_post_backward_final_callback()


def _span(model: SuperModel, stage: StageModule) -> LayerSpan:
    graph = stage.graph
    paths = [*graph.layers, LOSS] if graph.last else list(graph.layers)
    lowest = 0 if graph.needs_grad else first_trained(model, paths)
    return LayerSpan(stage, graph.nodes, paths, lowest if graph.learns else None)


def _sharded(module: nn.Module) -> Any:
    """A module that `fully_shard` has given FSDP2's methods."""
    return module
