"""Pairs of processes that share every matrix, and replicas of such pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import Planner, PlannerOptions


class TensorPairs(Planner):
    """tp = 2, and replicas for the rest."""

    name: ClassVar[str] = "tensor-pairs"

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: PlannerOptions, profile: Any
    ) -> Plan:
        """A plan of pairs; its mesh is chosen by `processes` where none is given."""
        shape = shape or MeshShape(dp=max(1, options.processes // 2), tp=2)
        if shape.tp != 2 or shape.pp > 1:
            raise PlanNotRunnable(
                "the plan 'tensor-pairs' needs pairs", expected="tp=2", found=f"a mesh of {shape}"
            )
        return Plan(planner=self.name, mesh=shape, model=model_fingerprint(model))
