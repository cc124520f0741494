"""How far a workload's simulated completion times hang on little things, and which hangs least.

A scheduler that decides by thresholds may part from itself where a job comes a moment later. A real
run is one draw of that. What it says of a simulator it says of workloads whose simulated times stay
where they are, so `validation.py` can look for one, before anything has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import JobRequest
from tlora_fx.simulator.replay import ReplayResult, replay

if TYPE_CHECKING:
    from benchmarks.validation import Bench

DRAWS = 16
#: Of a completion time: nothing beside what validation asks for.
LITTLE = 0.05


class Parting(NamedTuple):
    """How far completion times of one draw are from those of another, relative, in the median.

    mean, worst   over jobs
    joins         that jobs did in the fewest of any draw
    """

    mean: float
    worst: float
    joins: int


class Simulated:
    """A policy's run of a workload on the simulated clock.

    came   when each job was submitted, seconds
    join   seconds that each further job adds to a switch
    """

    def __init__(
        self, bench: Bench, policy: str, came: Mapping[str, float], options: LoopOptions,
        join: float,
    ) -> None:  # fmt: skip
        self.bench, self.policy, self.options, self.join = bench, policy, options, join
        self.requests = [bench.request(one, came[one.name]) for one in bench.planned]

    def draws(self, most: float) -> list[dict[str, float]]:
        """By how many seconds each job comes later, many times."""
        chance = Random(0)  # noqa: S311  (arrivals, no secrets)
        names = [request.name for request in self.requests]
        return [{name: chance.uniform(-most, most) for name in names} for _ in range(DRAWS)]

    def seconds(self, moved: Mapping[str, float]) -> dict[str, float]:
        """From its coming to its end, of each job."""
        requests = self._moved(moved)
        return seconds_of(self.replayed(requests), requests)

    def replayed(self, requests: Sequence[JobRequest]) -> ReplayResult:
        """The whole run."""
        estimates = self.bench.estimates
        return replay(
            requests, find_policy(self.policy), estimates.estimator, estimates.cluster,
            options=self.options, join_seconds=self.join,
        )  # fmt: skip

    def parting(self, most: float) -> Parting:
        """How far it parts from itself where jobs come up to so many seconds apart."""
        each = [self._moved(moved) for moved in self.draws(most)]
        ran = [(self.replayed(requests), requests) for requests in each]
        times = [seconds_of(*one) for one in ran]
        apart = [[abs(b[name] / a[name] - 1) for name in a] for a, b in pairwise(times)]
        joins = min(result.summary.joins for result, _ in ran)
        if not all(isfinite(seconds) for each in times for seconds in each.values()):
            # A job that never ends parts from nothing, and says nothing.
            return Parting(inf, inf, joins)
        return Parting(median(map(fmean, apart)), median(map(max, apart)), joins)

    def _moved(self, moved: Mapping[str, float]) -> list[JobRequest]:
        return [
            replace(each, submitted=each.submitted + moved.get(each.name, 0.0))
            for each in self.requests
        ]


def seconds_of(ran: ReplayResult, requests: Iterable[JobRequest]) -> dict[str, float]:
    """From its coming to its end, of each job of a run."""
    ended, index = ran.jobs.ended, ran.jobs.index
    return {each.name: float(ended[index[each.name]]) - each.submitted for each in requests}


def steadiest(found: Mapping[int, Parting]) -> int:
    """The seed with most joins, of those whose worst job parts little; else that which does least.

    found   by seed
    """
    return min(
        found, key=lambda seed: (found[seed].worst > LITTLE, -found[seed].joins, found[seed].worst)
    )
