"""Pairs of processes that share every matrix, and replicas of such pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import Planner, PlannerOptions


class TensorPairs(Planner):
    """tp = 2, and replicas for the rest."""

    name: ClassVar[str] = "tensor-pairs"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        options: PlannerOptions | Mapping[str, Any] | None = None,
    ) -> Plan:
        """A plan of pairs; its mesh is chosen by `processes` where none is given."""
        processes = self.Options.model_validate(options or {"processes": 2}).processes
        shape = shape or MeshShape(dp=max(1, processes // 2), tp=2)
        if shape.tp != 2 or shape.pp > 1:
            raise PlanNotRunnable(
                "the plan 'tensor-pairs' needs pairs", expected="tp=2", found=f"a mesh of {shape}"
            )
        return Plan(planner=self.name, mesh=shape, model=model_fingerprint(model))
