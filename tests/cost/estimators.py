"""Estimators for tests, from the shipped profiles."""

from __future__ import annotations

from functools import cache

import numpy as np

from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand, demand_of
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import SHIPPED

BASE = "llama-3-8b"


@cache
def shipped(base: str = BASE, memory_gib: float | None = None) -> Profile:
    """A shipped profile; with less memory, where it is said."""
    found = Profile.load(SHIPPED / f"{base}-nvidia-h200.json")
    if memory_gib is None:
        return found
    hardware = found.hardware.model_copy(update={"memory_gib": memory_gib})
    return found.model_copy(update={"hardware": hardware})


def estimator(base: str = BASE, memory_gib: float | None = None, **options) -> ProfileEstimator:
    """An estimator of one base on 128 H200."""
    cluster = options.pop("cluster", Cluster(128))
    return ProfileEstimator({base: shipped(base, memory_gib)}, cluster, **options)


def some(rank: int = 8, batch: int = 4, length: int = 130, base: str = BASE) -> Demand:
    """A job with adapters on all linears."""
    return demand_of(base, rank, batch, length)


def seconds(of: ProfileEstimator, demand: Demand, gpus: int, base: str = BASE) -> float:
    """One group where its GPUs stand as close as they can."""
    tier = of.cluster.min_tier(gpus)
    return float(of.seconds(base, demand.row()[None], np.array([gpus]), [tier])[0])
