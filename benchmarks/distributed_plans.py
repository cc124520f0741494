"""The plans of the case `grid`: of each kind that `auto` offers, cut as `auto` cuts them."""

from __future__ import annotations

from typing import Any

from tlora_fx.cost.load import Round
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.step_time import CostModel
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.stages import legal_cuts
from tlora_fx.planners.auto import INTERLEAVED_STAGES, balanced_stages


def plans_of(model: SuperModel, cost: CostModel, work: Round, world: int) -> dict[str, Plan]:
    """Plans over all processes by name, those that want the same weights side by side.

    work   that stages are balanced for; it has a row for each process
    """
    legal = sorted(legal_cuts(model))

    def staged(mesh: MeshShape, count: int, **fields: Any) -> Plan:
        """A pipeline of `count` micro-batches a replica."""
        interleaved = fields.get("schedule") == "interleaved"
        stages = mesh.pp * (INTERLEAVED_STAGES if interleaved else 1)
        whole = Plan(
            planner="pipeline", mesh=MeshShape(dp=mesh.dp, tp=mesh.tp), micro_batches=count
        )
        cuts = balanced_stages(cost, whole, mesh.pp, stages, work, legal)
        return whole.model_copy(update={"mesh": mesh, "cuts": cuts, **fields})

    found = _mixed(world, staged) if world > 2 and world % 2 == 0 else {}
    replicas, pieces = MeshShape(dp=world), MeshShape(tp=world)
    if world <= 2:
        found["single"] = Plan(planner="single")
    found["replicated"] = Plan(planner="replicated", mesh=replicas)
    fsdp = Plan(planner="fsdp", mesh=replicas, shard_base=True)
    found["fsdp"] = fsdp
    found["fsdp, kept"] = fsdp.model_copy(update={"keep_gathered": True})
    found["tensor"] = Plan(planner="tensor", mesh=pieces)
    pipeline = MeshShape(pp=world)
    for count in (2 * world, 4 * world):
        found[f"pipeline, {count} micro-batches"] = staged(pipeline, count)
    found["fsdp, recomputed"] = fsdp.model_copy(update={"recompute": True})
    if len(legal) + 1 >= INTERLEAVED_STAGES * world:
        interleaved = staged(pipeline, 4 * world, schedule="interleaved")
        found[f"interleaved, {4 * world} micro-batches"] = interleaved
    return found


def _mixed(world: int, staged: Any) -> dict[str, Plan]:
    """Plans over two dimensions of a mesh."""
    half = world // 2
    replicas = MeshShape(pp=2, dp=half)
    return {
        "tp=2 x dp": Plan(planner="tensor", mesh=MeshShape(dp=half, tp=2)),
        "pp=2 x dp": staged(replicas, 4),
        "pp=2 x dp, sharded": staged(replicas, 4, shard_base=True),
        "pp=2 x tp": staged(MeshShape(pp=2, tp=half), 4),
    }
