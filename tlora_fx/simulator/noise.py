"""What a real cluster does and a prediction does not: other speeds, failures, lost nodes.

Every draw is keyed by the seed and by what it is of, so a replay is the same however often it is
run, and a change of one part leaves the draws of the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, isfinite
from random import Random

from tlora_fx.errors import ReplayOptionWrong


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What is put between predictions and what happens; the defaults disturb nothing.

    seed                     of all draws
    speed_error              groups run this part slower than predicted; negative: faster
    noise                    spread of the logarithm of each formation's step time, mean 1
    commit_seconds           between commits; what a group did since its last one is lost with it
    group_failure_seconds    mean time to the failure of a group, for each GPU it holds
    node_failure_seconds     mean time between two losses of a node
    repair_seconds           until a lost node is back
    """

    seed: int = 0
    speed_error: float = 0.0
    noise: float = 0.0
    commit_seconds: float = 600.0
    group_failure_seconds: float = inf
    node_failure_seconds: float = inf
    repair_seconds: float = 3600.0

    def __post_init__(self) -> None:
        positive = (
            self.commit_seconds,
            self.group_failure_seconds,
            self.node_failure_seconds,
            self.repair_seconds,
        )
        if self.noise < 0 or self.speed_error <= -1 or not all(value > 0 for value in positive):
            raise ReplayOptionWrong(
                "a disturbance cannot have this value",
                expected="noise >= 0, speed_error > -1, seconds > 0",
                found=repr(self),
            )

    def factor(self, epoch: int, alone: int) -> float:
        """Real step time over the predicted one, of a formation with so many jobs left."""
        slower = 1.0 + self.speed_error
        if not self.noise:
            return slower
        draw = self._random("speed", epoch, alone).gauss(-(self.noise**2) / 2, self.noise)
        return slower * exp(draw)

    def group_fails_after(self, epoch: int, gpus: int) -> float:
        """Seconds from a formation's launch to its failure; infinite where it does not fail."""
        if not isfinite(self.group_failure_seconds):
            return inf
        return self._random("group", epoch).expovariate(gpus / self.group_failure_seconds)

    def node_losses(self, node: int) -> Iterator[tuple[float, float]]:
        """When a node is lost and when it is back, in seconds from the begin, for ever."""
        if not isfinite(self.node_failure_seconds):
            return
        random, time = self._random("node", node), 0.0
        while True:
            time += random.expovariate(1.0 / self.node_failure_seconds)
            yield time, time + self.repair_seconds
            time += self.repair_seconds

    def _random(self, *key: object) -> Random:
        return Random(repr((self.seed, *key)))  # noqa: S311 - no secrets
