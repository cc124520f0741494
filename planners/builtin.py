"""One process that holds everything."""

from __future__ import annotations

from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import Planner


class Single(Planner):
    """Run on one device."""

    name: ClassVar[str] = "single"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of one process.

        options   `recompute`: layers are computed again in the backward
        raises    PlanNotRunnable for a mesh of several processes
        """
        if shape is not None and shape.size > 1:
            raise PlanNotRunnable(
                "the plan 'single' is for one process",
                found=f"a mesh of {shape}",
                help="choose replicated, fsdp, pipeline, tensor or auto",
            )
        recompute = bool(options.get("recompute", False))
        return Plan(planner=self.name, model=model_fingerprint(model), recompute=recompute)
