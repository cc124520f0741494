"""Metrics of a replay: one flat set of numbers, JSON-able, with units in their names.

Two spans appear. `whole` is from the first submission to the end of the last job; `loaded` is from
the first submission to the last one, without the tail in which a cluster runs empty.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.formations import Callback, Formation, StepTimes
from tlora_fx.scheduler.state import ROUNDING, ActiveJob, ChangeCosts, Decision, JobRequest

Floats = NDArray[np.float64]
PERCENTS = tuple(range(101))
SIZES = ("small", "medium", "large")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of some numbers; all zero where there are none.

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
        """Distribution of some numbers; those that are not finite are left out."""
        given = np.asarray(numbers, dtype=np.float64)
        given = given[np.isfinite(given)]
        if not len(given):
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
        quantiles = [float(value) for value in np.percentile(given, PERCENTS)]
        mean = float(given.mean())
        return cls(
            len(given),
            mean,
            quantiles[50],
            quantiles[95],
            quantiles[99],
            quantiles[0],
            quantiles[100],
            tuple(quantiles),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Work of a cluster in a span of time.

    capacity_gpu_seconds     GPUs that were there, over time; `allocated` and `idle` add up to it
    allocated_gpu_seconds    GPUs that a group held, switches included
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

    grouped_job_share    of them, the part that ever shared a group
    grouped_time_share   of their time in groups, the part in groups of two or more
    """

    name: str
    jobs: int
    grouped_job_share: float
    grouped_time_share: float


class SeriesPoint(NamedTuple):
    """One bucket of a series: means over its time; the speed-up sums T_solo / T of what runs."""

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
    """Metrics of a whole replay.

    runnable                most jobs that a policy saw at once
    refusals                how often each reason of a refusal was given
    completion_seconds      submission to end, of finished jobs
    queue_seconds           of it: in no group
    run_seconds             of it: in a group, switches included
    slowdown                step time over T_solo, mean over a job's steps, of finished jobs
    stretch                 completion over steps * T_solo, of finished jobs
    violations              jobs that were ever in a group of two or more slower than they allow
    violating_job_share     of the finished and the unfinished that ran
    lent                    jobs that were slower than max_slowdown by consent
    grouped_job_share       of the finished jobs, those that ever shared a group
    switches                formations of which a job had run before: those that cost progress
    moves                   of jobs that had run before, into groups that were formed or that they
                            joined
    joins, leaves           of jobs, from running groups that did not stop
    evaluations             (group, GPUs) pairs that the estimator was asked for by the policy
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
    joins: int
    leaves: int
    group_failures: int
    node_losses: int
    decisions: int
    evaluations: int
    decision_wall_seconds: Distribution
    wall_seconds: float
    whole: Span
    loaded: Span
    series: tuple[SeriesPoint, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the rates of the spans; what never happens is null."""
        document = asdict(self)
        document["options"] = {name: _plain(value) for name, value in self.options.items()}
        for name, span in (("whole", self.whole), ("loaded", self.loaded)):
            document[name] |= {rate: getattr(span, rate) for rate in RATES}
        document["series"] = {
            name: [getattr(point, name) for point in self.series] for name in SeriesPoint._fields
        }
        return document


#: The properties of `Span` that its JSON has too.
RATES = (
    "samples_per_second",
    "weighted_speedup",
    "lone_work_share",
    "allocated_share",
    "busy_share",
)


def thirds(costs: Floats) -> NDArray[np.int64]:
    """Third that each job is in by its cost [n], 0 to 2; equal costs go by their order."""
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[np.argsort(costs, kind="stable")] = np.arange(len(costs))
    return ranks * 3 // max(1, len(costs))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


Flags = NDArray[np.bool_]

OPEN, DONE, FAILED, REFUSED = range(4)
#: What became of a job, in words.
OUTCOMES = ("unfinished", "finished", "failed", "refused")


class JobTable:
    """One row a job, in order of submission; seconds, nan where a thing never happened.

    In columns: half a million jobs take some 50 MB.

    started            when it was first in a group
    run_seconds        in groups, switches included
    step_seconds       of them, in which steps were done
    grouped_seconds    of them, in groups of two or more
    solo_seconds       of a step alone
    violated           it was in a group of two or more, slower than it allows
    lent               likewise, with its consent
    """

    def __init__(self, requests: Sequence[JobRequest]) -> None:
        n = len(requests)
        self.names = tuple(request.name for request in requests)
        self.index = {name: row for row, name in enumerate(self.names)}
        self.outcome = np.zeros(n, dtype=np.int8)
        self.submitted = np.array([request.submitted for request in requests], dtype=np.float64)
        self.started, self.ended = np.full(n, np.nan), np.full(n, np.nan)
        self.run_seconds, self.step_seconds = np.zeros(n), np.zeros(n)
        self.grouped_seconds, self.solo_seconds = np.zeros(n), np.full(n, np.nan)
        self.steps = np.array([request.steps for request in requests], dtype=np.float64)
        self.steps_done = np.zeros(n)
        self.gpus = np.array([request.gpus for request in requests], dtype=np.float64)
        self.formations = np.zeros(n, dtype=np.int32)
        self.violated, self.lent = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)

    @property
    def done(self) -> Flags:
        """Mask of the jobs that finished."""
        done: Flags = self.outcome == DONE
        return done

    def count(self, outcome: int) -> int:
        """Number of jobs with an outcome."""
        return int(np.count_nonzero(self.outcome == outcome))

    def completion_seconds(self) -> Floats:
        """Seconds from submission to the end, of finished jobs."""
        seconds: Floats = (self.ended - self.submitted)[self.done]
        return seconds

    def distributions(self) -> dict[str, Distribution]:
        """Distributions over finished jobs, by the names that `Summary` has for them."""
        done = self.done
        completion, running = self.completion_seconds(), self.run_seconds[done]
        alone = (self.steps * self.solo_seconds)[done]
        return {
            "completion_seconds": Distribution.of(completion),
            "queue_seconds": Distribution.of(np.maximum(0.0, completion - running)),
            "run_seconds": Distribution.of(running),
            "slowdown": Distribution.of(self.step_seconds[done] / alone),
            "stretch": Distribution.of(completion / alone),
        }

    def violating_share(self) -> float:
        """Share of jobs that were ever slower than they allow, of those that ran."""
        ran = np.isfinite(self.started)
        return float(np.mean(self.violated[ran])) if ran.any() else 0.0

    def grouped_share(self) -> float:
        """Share of jobs that ever shared a group, of those that finished."""
        done = self.done
        return float(np.mean(self.grouped_seconds[done] > 0)) if done.any() else 0.0

    def by_size(self, names: Sequence[str]) -> tuple[SizeClass, ...]:
        """Thirds of the finished jobs by the GPU-seconds of one step alone."""
        rows = np.flatnonzero(self.done)
        third = thirds((self.gpus * self.solo_seconds)[rows])
        classes = []
        for index, name in enumerate(names):
            members = rows[third == index]
            grouped, whole = self.grouped_seconds[members], self.run_seconds[members].sum()
            share = float(np.mean(grouped > 0)) if len(members) else 0.0
            time_share = float(grouped.sum() / whole) if whole else 0.0
            classes.append(SizeClass(name, len(members), share, time_share))
        return tuple(classes)


class Interval(NamedTuple):
    """Time of a group between two changes of its jobs.

    group         epoch of its formation
    gpus          that it held
    begin, end    seconds
    jobs, steps   their names, and the steps that each of them did
    """

    group: int
    gpus: tuple[int, ...]
    begin: float
    end: float
    jobs: tuple[str, ...]
    steps: tuple[float, ...]


BUCKETS = 512
FIRST_SECONDS = 60.0
COLUMNS = ("capacity", "allocated", "busy", "running", "waiting", "groups", "samples", "lone")


class BucketedSum:
    """Sums by bucket from second `begin`; where time outgrows them, two neighbours become one."""

    def __init__(self, begin: float, buckets: int = BUCKETS) -> None:
        self.begin = begin
        self.width = FIRST_SECONDS
        self.sums = np.zeros((buckets, len(COLUMNS)))

    def add(self, start: float, end: float, rates: Floats) -> None:
        """Amounts that flow evenly for a while; rates [8] a second, in the order of COLUMNS."""
        if end <= start:
            return
        count = len(self.sums)  # two buckets become one until the end lies inside
        while end > self.begin + count * self.width:
            half = self.sums.reshape(count // 2, 2, -1).sum(axis=1)
            self.sums[: count // 2], self.sums[count // 2 :] = half, 0.0
            self.width *= 2
        first, last = int((start - self.begin) / self.width), int((end - self.begin) / self.width)
        last = min(last, len(self.sums) - 1)
        if first >= last:
            self.sums[last] += rates * (end - start)
            return
        edge = self.begin + (first + 1) * self.width
        self.sums[first] += rates * (edge - start)
        if last > first + 1:
            self.sums[first + 1 : last] += rates * self.width
        self.sums[last] += rates * (end - (self.begin + last * self.width))

    def count_waiting(self, starts: Floats, ends: Floats) -> None:
        """Fill in the jobs that wait: those between `starts` and `ends` [n] less those that run."""
        edges = self.begin + self.width * np.arange(len(self.sums) + 1, dtype=np.float64)
        inside = np.diff(_since(starts, edges) - _since(ends, edges))
        running, waiting = COLUMNS.index("running"), COLUMNS.index("waiting")
        self.sums[:, waiting] = np.maximum(0.0, inside - self.sums[:, running])

    def points(self, end: float) -> tuple[SeriesPoint, ...]:
        """Means of each bucket that has begun before the end."""
        points = []
        for index, row in enumerate(self.sums):
            time = self.begin + index * self.width
            seconds = min(self.width, end - time)
            if seconds <= 0:
                break
            points.append(SeriesPoint(time, seconds, *(float(value) / seconds for value in row)))
        return tuple(points)


def _since(times: Floats, edges: Floats) -> Floats:
    """For each edge, the time since each moment before it, summed."""
    times = np.sort(times)
    before = np.searchsorted(times, edges)
    sums = np.concatenate([[0.0], np.cumsum(times - edges[0])])
    sums_before: Floats = before * (edges - edges[0]) - sums[before]
    return sums_before


@dataclass(slots=True)
class OpenAccount:
    """A formation's account since its jobs last changed.

    busy_seconds  GPU-seconds at the roofline of one step
    """

    time: float
    jobs: list[tuple[int, ActiveJob]]
    steps: list[float]
    busy_seconds: float


class MetricsRecorder(Callback):
    """The metrics of a replay in the making.

    A formation's account is closed whenever its jobs change, and opened anew. Its work is counted
    by the steps that its jobs advanced, so that steps are conserved: what a failure takes back is
    taken back here too. GPU-seconds are counted twice, once as held by formations and once as idle
    in the cluster.
    """

    def __init__(
        self,
        table: JobTable,
        times: StepTimes,
        cluster: Cluster,
        switch_seconds: float,
        join_seconds: float = 0.0,
        intervals: list[Interval] | None = None,
        *,
        changes: ChangeCosts | None = None,
    ) -> None:
        """Begin to count.

        intervals   is filled with what every group did; None: that is not kept
        """
        self.intervals = intervals
        self.table, self.times, self.cluster = table, times, cluster
        self.switch_seconds, self.join_seconds = switch_seconds, join_seconds
        self.changes = changes or ChangeCosts()
        self.joins = self.leaves = 0
        self.begin = float(table.submitted[0]) if len(table.names) else 0.0
        self.series = BucketedSum(self.begin)
        self.totals: dict[str, float] = {field.name: 0.0 for field in fields(Span)}
        self.wall_seconds = array("d")
        self.refusals: Counter[str] = Counter()
        self.evaluations = self.formations = self.switches = self.moves = 0
        self.group_failures = self.node_losses = 0
        self.job_seconds = self.group_seconds = 0.0
        self._open: dict[int, OpenAccount] = {}
        self._begins: dict[int, float] = {}
        self._held = 0
        self._capacity = cluster.capacity()
        self._time = self._counted = self.begin

    @property
    def group_jobs(self) -> float:
        """Mean jobs in a group, over time and groups."""
        return self.job_seconds / self.group_seconds if self.group_seconds else 0.0

    def submitted(self, time: float, job: ActiveJob) -> None:
        self.table.solo_seconds[self.table.index[job.name]] = job.solo_seconds

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        self.table.outcome[self.table.index[request.name]] = REFUSED
        self.refusals[reason] += 1

    def decided(
        self, time: float, decision: Decision, wall_seconds: float, evaluations: int
    ) -> None:
        self.wall_seconds.append(wall_seconds)
        self.evaluations += evaluations

    def launched(self, time: float, formation: Formation) -> None:
        self._pass(time)
        self._held += len(formation.launched.place)
        switch = self.switch_seconds + self.join_seconds * (len(formation.launched.jobs) - 1)
        names = list(formation.jobs)
        if formation.origin is None:
            self.formations += 1
            self._begins[formation.epoch] = time + switch
        else:
            names = list(formation.came)
            self.joins, self.leaves = self.joins + len(names), self.leaves + len(formation.went)
            paused = time + self.changes.of(len(names), len(formation.went))
            self._begins[formation.epoch] = max(paused, self._begins.pop(formation.origin, paused))
        table, again = self.table, 0
        for name in names:
            row = table.index[name]
            if table.formations[row]:
                again += 1
            else:
                table.started[row] = time
            table.formations[row] += 1
        self.moves += again
        self.switches += again > 0
        self._begin(time, formation, list(formation.jobs), {})

    def left(self, time: float, formation: Formation, job: ActiveJob, reason: str) -> None:
        """A job ended; if it was done, its neighbours advanced as far as it did."""
        steps = self._close(time, formation, None if reason else job)
        self._settle(time, job, FAILED if reason else DONE)
        self._begin(time, formation, [name for name in formation.jobs if name != job.name], steps)

    def ended(self, time: float, formation: Formation, how: str) -> None:
        self._pass(time)
        if how == "failed":
            self.group_failures += 1
        self._close(time, formation)
        self._held -= len(formation.launched.place)
        if formation.successor is None or how == "failed":
            self._begins.pop(formation.epoch, None)

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        self._settle(time, job, FAILED)

    def capacity(self, time: float, gpus: int) -> None:
        self._pass(time)
        self._count_capacity(time)
        self.node_losses += gpus < self._capacity
        self._capacity = gpus

    def cut(self, time: float, formations: Iterable[Formation]) -> Span:
        """Close all accounts for a moment: what was until now. Progress must be up to date."""
        self._pass(time)
        self._count_capacity(time)
        for formation in formations:
            if formation.epoch in self._open:
                self._begin(time, formation, list(formation.jobs), self._close(time, formation))
        return Span(**{**self.totals, "seconds": time - self.begin})

    def _settle(self, time: float, job: ActiveJob, outcome: int) -> None:
        row = self.table.index[job.name]
        self.table.outcome[row] = outcome
        self.table.ended[row] = time

    def _pass(self, time: float) -> None:
        """Time passes for the cluster."""
        seconds, self._time = time - self._time, time
        self.totals["capacity_gpu_seconds"] += seconds * self._capacity
        self.totals["idle_gpu_seconds"] += seconds * (self._capacity - self._held)

    def _count_capacity(self, time: float) -> None:
        """The series is told of capacity only where that changes."""
        rates = np.array([self._capacity, 0, 0, 0, 0, 0, 0, 0], dtype=np.float64)
        self.series.add(self._counted, time, rates)
        self._counted = time

    def _begin(
        self, time: float, formation: Formation, names: list[str], steps_done: Mapping[str, float]
    ) -> None:
        """A run has these jobs from now on; of some it is known better how far they are."""
        if not names:
            return
        jobs = [formation.jobs[name] for name in names]
        requests = [job.request for job in jobs]
        step = self.times.of(requests, formation.launched.place, self.cluster)
        rows = [(self.table.index[job.name], job) for job in jobs]
        steps = [steps_done.get(job.name, job.steps_done) for job in jobs]
        self._open[formation.epoch] = OpenAccount(time, rows, steps, step.busy_seconds)
        if len(jobs) < 2:
            return
        for row, job in rows:
            slowdown = step.seconds / job.solo_seconds * (1 - ROUNDING)
            if slowdown > job.request.max_slowdown:
                consent = slowdown <= job.request.max_slowdown_opt_in
                (self.table.lent if consent else self.table.violated)[row] = True

    def _close(
        self, time: float, formation: Formation, leaver: ActiveJob | None = None
    ) -> Mapping[str, float]:
        """Count what a formation did since its jobs last changed; how far its jobs are.

        leaver    of which it is known how far it came; the others came as far. None: all are known
        """
        account = self._open.pop(formation.epoch, None)
        if account is None:
            return {}
        seconds = time - account.time
        begin = max(account.time, min(time, self._begins[formation.epoch]))
        self._count_jobs(account, seconds, time - begin)
        pairs = list(zip(account.jobs, account.steps, strict=True))
        advanced = [job.steps_done - before for (_, job), before in pairs]
        if leaver is not None:
            index = next(
                position for position, (_, job) in enumerate(account.jobs) if job is leaver
            )
            advanced = [advanced[index]] * len(pairs)
        for (row, _), steps in zip(account.jobs, advanced, strict=True):
            self.table.steps_done[row] += steps
        self._count_work(formation, account, advanced, begin, time)
        if self.intervals is not None and time > account.time:
            names = tuple(job.name for _, job in account.jobs)
            span = account.time, time
            self.intervals.append(
                Interval(formation.epoch, formation.launched.place, *span, names, tuple(advanced))
            )
        return {
            job.name: before + steps
            for ((_, job), before), steps in zip(pairs, advanced, strict=True)
        }

    def _count_jobs(self, account: OpenAccount, seconds: float, stepping: float) -> None:
        table, many = self.table, len(account.jobs) > 1
        for row, _ in account.jobs:
            table.run_seconds[row] += seconds
            table.step_seconds[row] += stepping
            if many:
                table.grouped_seconds[row] += seconds
        self.job_seconds += seconds * len(account.jobs)
        self.group_seconds += seconds

    def _count_work(
        self,
        formation: Formation,
        account: OpenAccount,
        advanced: list[float],
        begin: float,
        time: float,
    ) -> None:
        gpus = len(formation.launched.place)
        seconds, stepping = time - account.time, time - begin
        samples = lone = lone_gpu = 0.0
        for (_, job), steps in zip(account.jobs, advanced, strict=True):
            samples += steps * job.request.demand.samples
            lone += steps * job.solo_seconds
            lone_gpu += steps * job.solo_seconds * job.request.gpus
        busy = max(advanced) * account.busy_seconds
        totals = self.totals
        totals["allocated_gpu_seconds"] += seconds * gpus
        totals["switch_gpu_seconds"] += (seconds - stepping) * gpus
        totals["busy_gpu_seconds"] += busy
        totals["samples"] += samples
        totals["lone_seconds"] += lone
        totals["lone_gpu_seconds"] += lone_gpu
        # Capacity and waiting jobs come from elsewhere.
        jobs = len(account.jobs)
        self.series.add(account.time, time, np.array([0.0, gpus, 0, jobs, 0, 1.0, 0, 0]))
        if stepping > 0:
            rates = np.array([0.0, 0, busy, 0, 0, 0, samples, lone]) / stepping
            self.series.add(begin, time, rates)
