"""A small roofline of one 8B base, and clusters of jobs on it, for tests of policies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tlora_fx.cost.estimator import Layout, Prediction, ProfileEstimator
from tlora_fx.cost.hardware import Cluster, Tier
from tlora_fx.cost.load import COLUMN, Array, Demand
from tlora_fx.cost.model_facts import find_base
from tlora_fx.cost.plan import MeshShape
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import SHIPPED
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, JobRequest, SchedulerState

PARAMETERS = 8.03e9
FLOP = 312e12 * 0.55
LINK = {"gpu": 200e9, "node": 200e9, "rack": 50e9, "cluster": 20e9}
MEMORY = 72e9


class Roofline:
    """Compute with a knee, tensor-parallel and data-parallel traffic, and memory."""

    def __init__(self) -> None:
        self.evaluations = 0

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        self.evaluations += len(gpus)
        link = np.array([LINK[tier] for tier in tiers])
        return np.min([_seconds(demands, gpus, link, tp) for tp in (1, 2, 4, 8)], axis=0)

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        flop = 4 * PARAMETERS * demands[:, COLUMN["tokens"]]
        return np.minimum(1.0, flop / (seconds * gpus * FLOP))

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        found = float(self.seconds(base, demand.row()[None], np.array([float(gpus)]), [tier])[0])
        fits = np.isfinite(found)
        layout = Layout(MeshShape(dp=gpus)) if fits else None
        return Prediction(found, layout, 60e9, {"step": found}, {"all": 60e9}, why_not="memory")

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        tier: Tier = "gpu" if gpus == 1 else "node" if gpus <= 8 else "rack"
        return float(self.seconds(base, demand.row()[None], np.array([float(gpus)]), [tier])[0])


def _seconds(demands: Array, gpus: Array, link: Array, tp: int) -> Array:
    samples, tokens = demands[:, COLUMN["samples"]], demands[:, COLUMN["tokens"]]
    dp = np.maximum(1.0, np.minimum(gpus // tp, samples))
    rows = np.ceil(samples / dp) * tokens / samples
    adapters = demands[:, COLUMN["parameters"]]
    compute = 4 * PARAMETERS * (rows + 250) / (tp * FLOP)
    compute = compute + 0.013 + 1e-4 * demands[:, COLUMN["jobs"]]
    traffic = (tp > 1) * 128 * (20e-6 + rows * 16384 * (tp - 1) / tp / LINK["node"])
    traffic = traffic + (dp > 1) * (1.6e-3 + adapters * 8 * (dp - 1) / dp / tp / link)
    fits = (PARAMETERS * 2 / tp + 3e6 * rows / tp + adapters * 16 / tp <= MEMORY) & (tp <= gpus)
    return np.where(fits, np.maximum(compute, traffic) + np.minimum(compute, traffic) / 4, np.inf)


def demand(samples: int, length: int, rank: int) -> Demand:
    """One step of a job."""
    tokens = float(samples * length)
    return Demand(
        1, samples, tokens, tokens * length, tokens, 7, rank * 7e4, 7e4, rank, 448, 2.6e6 * rank
    )


def request(name: str, rng: random.Random, **more: object) -> JobRequest:
    """A job drawn as the field notes draw them."""
    draw = rng.random()
    gpus = 1 if draw < 0.558 else 2 if draw < 0.676 else 4 if draw < 0.703 else 8
    step = demand(rng.choice((1, 2, 4, 8)), rng.choice((128, 256, 512)), rng.choice((2, 4, 8, 16)))
    fields: dict[str, object] = {"base": "base", "demand": step, "gpus": gpus, "steps": 1000}
    return JobRequest(name, **(fields | more))


def active(requests: Sequence[JobRequest], estimator: Roofline) -> dict[str, ActiveJob]:
    """Jobs that are not done, in order of submission."""
    ranked = sorted(requests, key=lambda one: (one.submitted, one.name))
    return {
        one.name: ActiveJob(one, estimator.solo(one.base, one.demand, one.gpus)) for one in ranked
    }


def state(
    requests: Sequence[JobRequest],
    gpus: int = 64,
    *,
    now: float = 0.0,
    groups: tuple[Group, ...] = (),
    **more: object,
) -> SchedulerState:
    """A moment."""
    estimator = Roofline()
    return SchedulerState(
        now, Cluster(gpus), estimator, active(requests, estimator), groups, **more
    )


def measured(cluster: Cluster, base: str = "base") -> ProfileEstimator:
    """Llama-3-8B as it was measured on an H200, under another name."""
    profile = Profile.load(SHIPPED / "llama-3-8b-nvidia-h200.json")
    return ProfileEstimator({base: profile}, cluster, {base: find_base("llama-3-8b").facts()})


def drawn(count: int, seed: int = 0, **more: object) -> list[JobRequest]:
    """Some jobs."""
    rng = random.Random(seed)
    return [request(f"j{index:04}", rng, submitted=float(index), **more) for index in range(count)]


def checked(moment: SchedulerState, decision: Decision) -> None:
    """What every decision keeps: nobody twice, GPUs disjoint and there, one base a group."""
    names = [name for group in decision.groups for name in group.jobs]
    assert sorted([*names, *decision.waiting]) == sorted(moment.jobs)
    places = [gpu for group in decision.groups for gpu in group.place]
    assert len(set(places)) == len(places)
    assert set(places) <= set(moment.cluster.present())
    for group in decision.groups:
        assert len(group.place) == group.gpus
        assert len({moment.jobs[name].request.base for name in group.jobs}) == 1
        asked = sum(moment.jobs[name].request.gpus for name in group.jobs)
        assert group.gpus <= asked or group in moment.groups
