"""Every matrix is cut over processes, which compute each layer together."""

from __future__ import annotations

from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes.tensor_parallel.shard import nothing_cut
from tlora_fx.planners.feasible import demand_fits
from tlora_fx.planners.protocol import Planner


class Tensor(Planner):
    """Tensor parallelism: a process holds a piece of every matrix and of every adapter.

    For small rounds on processes that lie close together: two sums a layer in the forward, two in
    the backward. The graph pass `shard-tensor` does the cutting; its notes say what stays whole.
    """

    name: ClassVar[str] = "tensor"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` pieces, or of a mesh with tp, and replicas beside it.

        options   `recompute`: layers are computed again in the backward; `nano_batches`: parts of
                  a row whose sums and products overlap
        raises    MeshDoesNotFit where heads or widths do not divide; PlanNotRunnable where no
                  matrix can be cut, and for a mesh with stages
        """
        shape = shape or MeshShape(tp=int(options.get("processes", 1)))
        if shape.pp > 1:
            raise PlanNotRunnable(
                f"the plan '{self.name}' has pieces and replicas only",
                expected=f"a mesh of {MeshShape(tp=shape.tp, dp=shape.dp * shape.pp)}",
                found=f"a mesh of {shape}",
                help="choose pipeline or auto for stages",
            )
        demand_fits(model, shape)
        reasons = nothing_cut(model.group, shape.tp) if shape.tp > 1 else []
        if reasons:
            raise PlanNotRunnable(
                f"no layer of the base can be cut over tp={shape.tp} processes",
                base=model.backbone.title,
                found="\n".join(reasons),
                help="choose replicated, fsdp or pipeline",
            )
        return Plan(
            planner=self.name,
            mesh=shape,
            model=model_fingerprint(model),
            recompute=bool(options.get("recompute", False)),
            nano_batches=int(options.get("nano_batches", 1)),
        )
