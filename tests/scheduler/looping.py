"""A small estimator and small jobs for the tests of the loop and of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tlora_fx.cost.estimator import Layout, Prediction
from tlora_fx.cost.hardware import Tier
from tlora_fx.cost.load import COLUMN, Array, Demand
from tlora_fx.scheduler.state import JobRequest

TOKENS = COLUMN["tokens"]


@dataclass
class Plain:
    """A step takes a part that does not grow, and one that grows with tokens over GPUs.

    fixed    seconds of every step
    each     seconds of a token on one GPU
    fits     tokens that fit on one GPU
    scale    of all times
    """

    fixed: float = 0.5
    each: float = 0.001
    fits: float = 1e9
    scale: float = 1.0
    evaluations: int = 0

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        self.evaluations += len(gpus)
        tokens = demands[:, TOKENS]
        found = self.scale * (self.fixed + self.each * tokens / gpus)
        return np.where(tokens <= self.fits * gpus, found, np.inf)

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        return np.minimum(1.0, self.scale * self.each * demands[:, TOKENS] / gpus / seconds)

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        return float(self.seconds(base, demand.row()[None], np.array([gpus]), ["node"])[0])

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        seconds = self.solo(base, demand, gpus)
        return Prediction(seconds, Layout(), 0.0, {"all": seconds}, {})


def request(name: str, **changes: Any) -> JobRequest:
    """A job of 1000 tokens a step, which alone on one GPU takes 1.5 s a step."""
    tokens = changes.pop("tokens", 1000.0)
    fields: dict[str, Any] = {"base": "one", "gpus": 1, "steps": 100} | changes
    demand = Demand(jobs=1, samples=4, tokens=tokens)
    return JobRequest(name, demand=demand, **fields)
