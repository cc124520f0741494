"""Shard the stages of a pipeline over its replicas: a stage's layers are gathered one by one.

Every micro-batch gathers them anew, or, where a plan keeps what is gathered, the first of a round
gathers and all are let go of at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tlora_fx.cost.plan import Plan
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.fsdp import Stretch, first_trained, shard_stretches
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.passes.lower_loss import LOSS
from tlora_fx.planners.stages import Stage


class ShardedStages(nn.Module):
    """The stages of one process as one module: FSDP2 shares buffers and streams below one root."""

    def __init__(self, model: SuperModel, stages: Sequence[Stage], plan: Plan, mesh: Mesh) -> None:
        """Shard stages whose model has its tensors, or those of this process.

        To be called on every process of dp, before a stage runs.
        """
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.keeps = plan.keep_gathered
        self.learns = any(stage.graph.learns for stage in stages)
        stretches = [_stretch(model, stage) for stage in stages]
        tables = shard_stretches(model, self, stretches, plan, mesh).tables
        for stage, own in zip(stages, tables, strict=True):
            for path in own:
                # The stage's code has tensors of its own, which FSDP2 would not exchange.
                stage.code.set_submodule(path, model.net.get_submodule(path))
        if self.keeps:
            _sharded(self).set_reshard_after_backward(False)

    def forward(self, place: int, hidden: Tensor | None, row: PackedBatch) -> Tensor:
        """Run one micro-batch through the stage at this place; see `Stage`."""
        return cast(Tensor, self.stages[place](hidden, row))

    def end_round(self) -> None:
        """Let go of what was kept; to be called after the last micro-batch of a round."""
        if self.keeps:
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if not self.learns:
            # FSDP2 notes every forward until a backward has ended, which never comes here.
            _sharded(self)._get_fsdp_state()._root_post_backward_final_callback()


def _stretch(model: SuperModel, stage: Stage) -> Stretch:
    graph = stage.graph
    paths = [*graph.layers, LOSS] if graph.last else list(graph.layers)
    lowest = 0 if graph.needs_grad else first_trained(model, paths)
    return Stretch(stage, graph.nodes, paths, lowest if graph.learns else None)


def _sharded(module: nn.Module) -> Any:
    """A module that `fully_shard` has given FSDP2's methods."""
    assert isinstance(module, FSDPModule)
    return module
