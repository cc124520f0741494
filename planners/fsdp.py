"""Replicas that share one copy of the frozen base: each layer is gathered while it is needed."""

from __future__ import annotations

from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.memory_choice import choose
from tlora_fx.planners.protocol import Planner
from tlora_fx.planners.replicated import replicas


class Fsdp(Planner):
    """FSDP2 over the frozen base; adapters and their optimizers stay whole on each replica."""

    name: ClassVar[str] = "fsdp"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        options   `keep_gathered`, `recompute`: chosen by the memory where they are left out;
                  `memory_bytes`: of one device, without which weights are gathered twice and
                  nothing is recomputed; `max_row_tokens`: of the longest row
        """
        shape = replicas(self.name, shape, options)
        kept, again = choose(
            model, shape.dp, options.get("memory_bytes"), int(options.get("max_row_tokens", 16384))
        )
        return Plan(
            planner=self.name,
            mesh=shape,
            model=model_fingerprint(model),
            shard_base=True,
            keep_gathered=_given(options.get("keep_gathered"), kept),
            recompute=_given(options.get("recompute"), again),
        )


def _given(option: bool | None, chosen: bool) -> bool:
    return chosen if option is None else bool(option)
