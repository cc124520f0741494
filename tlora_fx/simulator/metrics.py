"""What a replay brought: one flat set of numbers, JSON-able, with units in their names.

Two spans appear. `whole` is from the first submission to the end of the last job; `loaded` is from
the first submission to the last one, without the tail in which a cluster runs empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PERCENTS = tuple(range(101))
SIZES = ("small", "medium", "large")


@dataclass(frozen=True, slots=True)
class Distribution:
    """How some numbers are spread; all zero where there are none.

    count       how many
    quantiles   at 0, 1, ... 100 percent: the CDF, turned over
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    least: float
    most: float
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, numbers: Sequence[float] | Floats) -> Self:
        """Of some numbers; those that are not finite are left out."""
        given = np.asarray(numbers, dtype=np.float64)
        given = given[np.isfinite(given)]
        if not len(given):
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
        found = [float(value) for value in np.percentile(given, PERCENTS)]
        mean = float(given.mean())
        return cls(
            len(given), mean, found[50], found[95], found[99], found[0], found[100], tuple(found)
        )


@dataclass(frozen=True, slots=True)
class Span:
    """What a cluster did in a span of time.

    seconds                  its length
    capacity_gpu_seconds     GPUs that were there, over time; `allocated` and `idle` add up to it
    allocated_gpu_seconds    GPUs that a group held, switches included
    idle_gpu_seconds         GPUs that no group held
    busy_gpu_seconds         of the allocated: computing at the roofline, by the estimator
    switch_gpu_seconds       of the allocated: forming groups, without progress
    samples                  sequences trained; what a failure lost is not among them
    lone_seconds             sum of T_solo over all steps done; over `seconds` it is the weighted
                             speed-up
    lone_gpu_seconds         the same, times the GPUs that each job asked for
    """

    seconds: float = 0.0
    capacity_gpu_seconds: float = 0.0
    allocated_gpu_seconds: float = 0.0
    idle_gpu_seconds: float = 0.0
    busy_gpu_seconds: float = 0.0
    switch_gpu_seconds: float = 0.0
    samples: float = 0.0
    lone_seconds: float = 0.0
    lone_gpu_seconds: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of the cluster."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def weighted_speedup(self) -> float:
        """Mean over time of the sum over running jobs of T_solo / T."""
        return self.lone_seconds / self.seconds if self.seconds else 0.0

    @property
    def lone_work_share(self) -> float:
        """Lone training done per GPU-second there was: above 1 only where sharing pays."""
        return _share(self.lone_gpu_seconds, self.capacity_gpu_seconds)

    @property
    def allocated_share(self) -> float:
        """GPU utilisation, as a cluster's manager counts it: 0 to 1."""
        return _share(self.allocated_gpu_seconds, self.capacity_gpu_seconds)

    @property
    def busy_share(self) -> float:
        """GPU utilisation, as the estimator counts it: 0 to 1."""
        return _share(self.busy_gpu_seconds, self.capacity_gpu_seconds)


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Jobs of one third by compute cost: GPU-seconds of one step alone.

    name                 small, medium or large
    jobs                 that finished
    grouped_job_share    of them, the part that ever shared a group
    grouped_time_share   of their time in groups, the part in groups of two or more
    """

    name: str
    jobs: int
    grouped_job_share: float
    grouped_time_share: float


class Point(NamedTuple):
    """One bucket of a series; means over its time.

    time               seconds, of its begin
    seconds            how long it is
    capacity_gpus      that were there
    allocated_gpus     that groups held
    busy_gpus          that computed, by the estimator
    running_jobs       in groups
    waiting_jobs       submitted, and in no group
    groups             that ran
    samples_per_second throughput
    weighted_speedup   sum over running jobs of T_solo / T
    """

    time: float
    seconds: float
    capacity_gpus: float
    allocated_gpus: float
    busy_gpus: float
    running_jobs: float
    waiting_jobs: float
    groups: float
    samples_per_second: float
    weighted_speedup: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole replay.

    policy                  its name
    gpus                    of the cluster
    horizon_seconds         between decisions
    switch_seconds          what forming a group costs it
    runnable                most jobs that a policy saw at once
    seed                    of noise and failures
    options                 what else was chosen
    jobs                    that were submitted, refused ones included
    finished                jobs
    failed                  jobs given up, with a reason
    refused                 jobs that could never run, told at submission
    unfinished              jobs that had not ended when the replay did
    refusals                how often each reason of a refusal was given
    completion_seconds      submission to end, of finished jobs
    queue_seconds           of it: in no group
    run_seconds             of it: in a group, switches included
    slowdown                step time over T_solo, mean over a job's steps, of finished jobs
    stretch                 completion over steps * T_solo, of finished jobs
    violations              jobs that were ever in a group of two or more slower than they allow
    violating_job_share     of the finished and the unfinished that ran
    lent                    jobs that were slower than max_slowdown by consent
    grouping                by size of job
    grouped_job_share       of the finished jobs, those that ever shared a group
    group_jobs              mean jobs in a group, over time and groups
    formations              groups formed
    switches                formations of which a job had run before: those that cost progress
    moves                   jobs taken out of one formation into another, summed
    group_failures          groups that failed
    node_losses             nodes lost
    steps_lost              steps done twice, since they were not committed
    decisions               of the policy
    evaluations             (group, GPUs) pairs that the estimator was asked for by the policy
    decision_wall_seconds   of each decision
    wall_seconds            of the whole replay
    whole, loaded           what the cluster did, see above
    series                  the whole span in at most some hundred buckets
    """

    policy: str
    gpus: int
    horizon_seconds: float
    switch_seconds: float
    runnable: int
    seed: int
    options: Mapping[str, Any]
    jobs: int
    finished: int
    failed: int
    refused: int
    unfinished: int
    refusals: Mapping[str, int]
    completion_seconds: Distribution
    queue_seconds: Distribution
    run_seconds: Distribution
    slowdown: Distribution
    stretch: Distribution
    violations: int
    violating_job_share: float
    lent: int
    grouping: tuple[SizeClass, ...]
    grouped_job_share: float
    group_jobs: float
    formations: int
    switches: int
    moves: int
    group_failures: int
    node_losses: int
    steps_lost: float
    decisions: int
    evaluations: int
    decision_wall_seconds: Distribution
    wall_seconds: float
    whole: Span
    loaded: Span
    series: tuple[Point, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the rates of the spans; what never happens is null."""
        found = asdict(self)
        found["options"] = {name: _plain(value) for name, value in self.options.items()}
        for name, span in (("whole", self.whole), ("loaded", self.loaded)):
            found[name] |= {rate: getattr(span, rate) for rate in RATES}
        found["series"] = {
            name: [getattr(point, name) for point in self.series] for name in Point._fields
        }
        return found


#: The properties of `Span` that its JSON has too.
RATES = (
    "samples_per_second",
    "weighted_speedup",
    "lone_work_share",
    "allocated_share",
    "busy_share",
)


def thirds(costs: Floats) -> NDArray[np.int64]:
    """Which third each job is in by its cost, 0 to 2; equal costs go by their order.

    costs   [n]
    """
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[np.argsort(costs, kind="stable")] = np.arange(len(costs))
    return ranks * 3 // max(1, len(costs))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value
