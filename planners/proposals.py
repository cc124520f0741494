"""A better plan than the one a run has, by what its rounds took.

What a round took beside its prediction corrects the profile: work of a process and collectives are
scaled by the two factors nearest to 1 that explain it. Then all plans are searched anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Round
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.step_time import CostModel, step_time
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.auto import search

#: A plan is proposed where its round would take so much less.
GAIN = 0.1
#: No part of a round is taken to be so many times as fast as it was measured.
MIN_FACTOR = 0.05
_TIMES = ("forward_ms", "backward_ms", "first_ms", "frozen_ms", "ms")


def proposal(
    model: SuperModel,
    plan: Plan,
    profile: Profile,
    work: Round,
    round_seconds: float,
    *,
    gpus_per_node: int,
    longest: Round | None = None,
    meshes: Sequence[MeshShape] | None = None,
    nano_batches: Sequence[int] = (),
) -> Plan | None:
    """The plan that would be at least a tenth faster, with its estimate; None where none would be.

    plan            that the run has
    profile         by which it was chosen
    work            a typical round
    round_seconds   what a round took, in the median
    meshes          those to choose from; None: all of as many processes
    nano_batches    numbers of them to choose from beside one; empty: something else chooses them
    """
    known = corrected(model, plan, profile, work, round_seconds, gpus_per_node)
    size = plan.mesh.size
    plans = search(model, known, work, size, gpus_per_node, meshes, longest, nano_batches)
    if not plans.running:
        return None
    best = plans.best()
    assert best.estimate is not None
    chosen = plan if nano_batches else plan.model_copy(update={"nano_batches": 1})
    if _same(best, chosen) or best.estimate.step_seconds > (1 - GAIN) * round_seconds:
        return None
    return best


def corrected(
    model: SuperModel,
    plan: Plan,
    profile: Profile,
    work: Round,
    round_seconds: float,
    gpus_per_node: int,
) -> Profile:
    """The profile by which a plan's round takes what it took."""
    facts = facts_of(model)
    free = [one.model_copy(update={"ms": 0.0}) for one in profile.collectives]
    silent = profile.model_copy(update={"collectives": free})
    whole, alone = (
        step_time(CostModel(facts, one, gpus_per_node), plan, work).seconds
        for one in (profile, silent)
    )
    said = max(whole - alone, 0.0)
    # Of all factors that explain the time, those with the least sum of squared changes.
    share = (round_seconds - whole) / (alone * alone + said * said)
    compute, collectives = (max(MIN_FACTOR, 1 + share * part) for part in (alone, said))
    return _scaled(profile, compute, collectives)


def _scaled(profile: Profile, compute: float, collectives: float) -> Profile:
    layers = [
        layer.model_copy(update={"points": [_longer(one, compute) for one in layer.points]})
        for layer in profile.layers
    ]
    return profile.model_copy(
        update={
            "layers": layers,
            "root": [_longer(one, compute) for one in profile.root],
            "loss": [_longer(one, compute) for one in profile.loss],
            "optimizer": [_longer(one, compute) for one in profile.optimizer],
            "collectives": [_longer(one, collectives) for one in profile.collectives],
        }
    )


def _longer(point: Any, factor: float) -> Any:
    """A measured point all of whose times are so many times as long."""
    times = {
        name: getattr(point, name) * factor
        for name in _TIMES
        if getattr(point, name, None) is not None
    }
    graphs = getattr(point, "captured", None)
    if graphs is not None:
        times["captured"] = _longer(graphs, factor)
    return point.model_copy(update=times)


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans run alike."""
    bare = {"planner": "", "estimate": None, "model": ""}
    return one.model_copy(update=bare) == other.model_copy(update=bare)
