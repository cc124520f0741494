"""Watches a loop over a simulated clock, and sums up what it does.

A run's account is closed whenever its jobs change, and opened anew. What it brought is counted by
the steps that its jobs advanced, so that steps are conserved: what a failure takes back is taken
back here too. GPU-seconds are counted twice, once as held by runs and once as idle in the cluster.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from tlora_fx.cost.cluster import Cluster
from tlora_fx.scheduler.bounds import ROUNDING
from tlora_fx.scheduler.loop_runs import Run
from tlora_fx.scheduler.loop_times import StepTimes
from tlora_fx.scheduler.loop_watch import NoWatch
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import ActiveJob, Decision
from tlora_fx.simulator.metrics import Span
from tlora_fx.simulator.metrics_jobs import DONE, FAILED, REFUSED, JobTable
from tlora_fx.simulator.metrics_series import Series


@dataclass(slots=True)
class Open:
    """A run's account since its jobs last changed.

    time          when that was
    jobs          row and job
    steps         of each job then
    busy_seconds  GPU-seconds at the roofline of one step
    """

    time: float
    jobs: list[tuple[int, ActiveJob]]
    steps: list[float]
    busy_seconds: float


class Recorder(NoWatch):
    """The metrics of a replay in the making."""

    def __init__(
        self,
        table: JobTable,
        times: StepTimes,
        cluster: Cluster,
        switch_seconds: float,
        join_seconds: float = 0.0,
    ) -> None:
        self.table, self.times, self.cluster = table, times, cluster
        self.switch_seconds, self.join_seconds = switch_seconds, join_seconds
        self.begin = float(table.submitted[0]) if len(table.names) else 0.0
        self.series = Series(self.begin)
        self.totals: dict[str, float] = {field.name: 0.0 for field in fields(Span)}
        self.wall_seconds = array("d")
        self.refusals: Counter[str] = Counter()
        self.evaluations = self.formations = self.switches = self.moves = 0
        self.group_failures = self.node_losses = 0
        self.job_seconds = self.group_seconds = 0.0
        self._open: dict[int, Open] = {}
        self._held = 0
        self._capacity = cluster.capacity()
        self._time = self._counted = self.begin

    @property
    def group_jobs(self) -> float:
        """Mean jobs in a group, over time and groups."""
        return self.job_seconds / self.group_seconds if self.group_seconds else 0.0

    def submitted(self, time: float, job: ActiveJob) -> None:
        """A job is waiting."""
        self.table.solo_seconds[self.table.index[job.name]] = job.solo_seconds

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """A job will never run."""
        self.table.outcome[self.table.index[request.name]] = REFUSED
        self.refusals[reason] += 1

    def decided(
        self, time: float, decision: Decision, wall_seconds: float, evaluations: int
    ) -> None:
        """The policy has decided."""
        self.wall_seconds.append(wall_seconds)
        self.evaluations += evaluations

    def launched(self, time: float, run: Run) -> None:
        """A group was formed."""
        self._pass(time)
        self._held += len(run.launched.place)
        self.formations += 1
        table, again = self.table, 0
        for name in run.jobs:
            row = table.index[name]
            if table.formations[row]:
                again += 1
            else:
                table.started[row] = time
            table.formations[row] += 1
        self.moves += again
        self.switches += again > 0
        self._begin(time, run, list(run.jobs), {})

    def left(self, time: float, run: Run, job: ActiveJob, reason: str) -> None:
        """A job ended; if it was done, its neighbours advanced as far as it did."""
        steps = self._close(time, run, None if reason else job)
        self._settle(time, job, FAILED if reason else DONE)
        self._begin(time, run, [name for name in run.jobs if name != job.name], steps)

    def ended(self, time: float, run: Run, how: str) -> None:
        """A group is over."""
        self._pass(time)
        if how == "failed":
            self.group_failures += 1
        self._close(time, run)
        self._held -= len(run.launched.place)

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """A job will not be run again."""
        self._settle(time, job, FAILED)

    def capacity(self, time: float, gpus: int) -> None:
        """How many GPUs there are from now on."""
        self._pass(time)
        self._count_capacity(time)
        self.node_losses += gpus < self._capacity
        self._capacity = gpus

    def cut(self, time: float, runs: Iterable[Run]) -> Span:
        """Close all accounts for a moment: what was until now. Progress must be up to date."""
        self._pass(time)
        self._count_capacity(time)
        for run in runs:
            if run.epoch in self._open:
                self._begin(time, run, list(run.jobs), self._close(time, run))
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
        self, time: float, run: Run, names: list[str], steps_done: Mapping[str, float]
    ) -> None:
        """A run has these jobs from now on; of some it is known better how far they are."""
        if not names:
            return
        jobs = [run.jobs[name] for name in names]
        requests = [job.request for job in jobs]
        step = self.times.of(requests, run.launched.place, self.cluster)
        rows = [(self.table.index[job.name], job) for job in jobs]
        steps = [steps_done.get(job.name, job.steps_done) for job in jobs]
        self._open[run.epoch] = Open(time, rows, steps, step.busy_seconds)
        if len(jobs) < 2:
            return
        for row, job in rows:
            slowdown = step.seconds / job.solo_seconds * (1 - ROUNDING)
            if slowdown > job.request.max_slowdown:
                consent = slowdown <= job.request.lends
                (self.table.lent if consent else self.table.violated)[row] = True

    def _close(self, time: float, run: Run, leaver: ActiveJob | None = None) -> Mapping[str, float]:
        """Count what a run did since its jobs last changed; how far its jobs are.

        leaver    of which it is known how far it came; the others came as far. None: all are known
        """
        account = self._open.pop(run.epoch, None)
        if account is None:
            return {}
        seconds = time - account.time
        switch = self.switch_seconds + self.join_seconds * (len(run.launched.jobs) - 1)
        begin = max(account.time, min(time, run.time + switch))
        self._count_jobs(account, seconds, time - begin)
        pairs = list(zip(account.jobs, account.steps, strict=True))
        advanced = [job.steps_done - before for (_, job), before in pairs]
        if leaver is not None:
            own = next(place for place, (_, job) in enumerate(account.jobs) if job is leaver)
            advanced = [advanced[own]] * len(pairs)
        for (row, _), steps in zip(account.jobs, advanced, strict=True):
            self.table.steps_done[row] += steps
        self._count_work(run, account, advanced, begin, time)
        return {
            job.name: before + steps
            for ((_, job), before), steps in zip(pairs, advanced, strict=True)
        }

    def _count_jobs(self, account: Open, seconds: float, stepping: float) -> None:
        table, many = self.table, len(account.jobs) > 1
        for row, _ in account.jobs:
            table.run_seconds[row] += seconds
            table.step_seconds[row] += stepping
            if many:
                table.grouped_seconds[row] += seconds
        self.job_seconds += seconds * len(account.jobs)
        self.group_seconds += seconds

    def _count_work(
        self, run: Run, account: Open, advanced: list[float], begin: float, time: float
    ) -> None:
        gpus = len(run.launched.place)
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
