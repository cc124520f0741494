"""Every process holds the whole model and runs rows of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import Planner


class Replicated(Planner):
    """Data parallelism: adapters' gradients are summed once a round, and nothing else is sent."""

    name: ClassVar[str] = "replicated"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        options   `recompute`: layers are computed again in the backward
        raises    PlanNotRunnable for another mesh
        """
        shape = replicas(self.name, shape, options)
        recompute = bool(options.get("recompute", False))
        return Plan(
            planner=self.name, mesh=shape, model=model_fingerprint(model), recompute=recompute
        )


def replicas(name: str, shape: MeshShape | None, options: dict[str, Any]) -> MeshShape:
    """The mesh of a plan that has replicas only.

    raises    PlanNotRunnable for another mesh
    """
    shape = shape or MeshShape(dp=int(options.get("processes", 1)))
    if shape.pp > 1 or shape.tp > 1:
        raise PlanNotRunnable(
            f"the plan '{name}' has replicas only",
            expected=f"a mesh of {MeshShape(dp=shape.size)}",
            found=f"a mesh of {shape}",
            help="choose pipeline, tensor or auto for the other dimensions",
        )
    return shape
