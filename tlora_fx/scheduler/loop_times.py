"""Step times of the groups that are formed, each asked of the estimator once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tlora_fx.cost.cluster import Cluster
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.request import JobRequest

#: Sums of demands that are remembered.
KEPT = 1 << 16


class StepTime(NamedTuple):
    """One step of a group where it stands.

    seconds        predicted
    busy_seconds   GPU-seconds of it that compute at the roofline
    """

    seconds: float
    busy_seconds: float


class StepTimes:
    """The step times of groups on the places that they got."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._known: dict[tuple[object, ...], StepTime] = {}

    def of(
        self, requests: Sequence[JobRequest], place: Sequence[int], cluster: Cluster
    ) -> StepTime:
        """Of a group of one base on some GPUs."""
        gpus, tier = len(place), cluster.tier(place)
        base = requests[0].base
        key = (base, gpus, tier, *sorted([request.demand for request in requests]))
        found = self._known.get(key)
        if found is None:
            rows = np.sum([request.demand for request in requests], axis=0)[None]
            held = np.array([float(gpus)])
            seconds = self.estimator.seconds(base, rows, held, [tier])
            busy = self.estimator.busy(base, rows, held, seconds)
            found = StepTime(float(seconds[0]), float(busy[0] * seconds[0]) * gpus)
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = found
        return found
