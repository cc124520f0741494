"""How long processes take to talk, by operation, number of processes, bytes and distance.

A ring's time is a start, a hop for each further process, and its bytes over the link's bandwidth:
all-reduce sends 2 (p - 1) / p of its payload, all-gather (p - 1) / p, a send all of it. Start, hop
and bandwidth are fitted to what a profile measured; where it measured none, the data sheet stands
in, and whoever asks is told that the result is an estimate.
"""

from __future__ import annotations

import math

import numpy as np

from tlora_fx.cost.hardware import GPUS, Tier, gpu_of_device
from tlora_fx.cost.profile import Operation, Profile
from tlora_fx.planners.nonnegative import Array, fit

#: Milliseconds to start, and the part of a link's bandwidth that is reached, without measurements.
START_MS = {"node": 0.012, "network": 0.030}
HOP_MS = {"node": 0.001, "network": 0.004}
REACHED = 0.75


class CollectiveTimes:
    """Milliseconds of collectives on one kind of hardware.

    estimated   whether anything that was asked for came from a data sheet
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.estimated = False
        self._known: dict[tuple[Operation, Tier], Array] = {}

    def ms(self, operation: Operation, tier: Tier, processes: int, payload_bytes: float) -> float:
        """One collective; nothing where a process is alone or has nothing to say."""
        if processes < 2 or payload_bytes <= 0:
            return 0.0
        key = (operation, tier)
        if key not in self._known:
            self._known[key] = self._coefficients(operation, tier)
        return float(self._known[key] @ _features(operation, processes, payload_bytes))

    def measured(self, operation: Operation, tier: Tier) -> bool:
        """Whether the profile has points of an operation at a distance."""
        points = self.profile.collectives
        return any((one.operation, one.tier) == (operation, tier) for one in points)

    def _coefficients(self, operation: Operation, tier: Tier) -> Array:
        points = [
            one for one in self.profile.collectives
            if (one.operation, one.tier) == (operation, tier)
        ]  # fmt: skip
        if not points:
            self.estimated = True
            gpu = gpu_of_device(self.profile.hardware.gpu) or GPUS["h100"]
            per_byte = 1 / (gpu.link_gbps(tier) * 1e6 * REACHED)
            return np.array([START_MS[tier], HOP_MS[tier], per_byte])
        rows = [_features(operation, one.processes, one.payload_bytes) for one in points]
        values = np.array([one.ms for one in points])
        weights = 1 / np.maximum(values, 1e-6)
        return fit(np.array(rows) * weights[:, None], values * weights)


def _features(operation: Operation, processes: int, payload_bytes: float) -> Array:
    part = {"all-reduce": 2.0, "all-gather": 1.0, "send": 1.0}[operation]
    ring = 1.0 if operation == "send" else (processes - 1) / processes
    hops = 0.0 if operation == "send" else math.log2(processes)
    return np.array([1.0, hops, part * ring * payload_bytes])
