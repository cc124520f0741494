"""Replay jobs under a policy on a simulated clock: the real loop over a simulated executor.

Time goes from event to event: an arrival that a policy can see, the end of a job, a failure, a
decision that is due. Jobs that arrive while the window is full cost nothing until it has room, so
the cost of a replay grows with its jobs, not with its queue. The same arguments give the same
replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any

import numpy as np

from tlora_fx.cost.cluster import Cluster
from tlora_fx.errors import ReplayStalled
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.loop import (
    HORIZON_SECONDS,
    REFRESH,
    RUNNABLE,
    SWITCH_SECONDS,
    AtOnce,
    Loop,
)
from tlora_fx.scheduler.loop_times import StepTimes
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import Policy
from tlora_fx.simulator.clock import Clock
from tlora_fx.simulator.metrics import SIZES, Distribution, Span, Summary
from tlora_fx.simulator.metrics_jobs import DONE, FAILED, OPEN, REFUSED, JobTable
from tlora_fx.simulator.metrics_recorder import Recorder
from tlora_fx.simulator.noise import Disturbances
from tlora_fx.simulator.simulated import SimulatedExecutor

#: Is told how many jobs have ended, and how many there are.
Tell = Callable[[int, int], None]
TELL_EVERY = 1000
#: Decisions with nothing running and nothing started, after which a policy is said to stall.
PATIENCE = 100


@dataclass(slots=True)
class Replay:
    """What came of a replay.

    summary   all its numbers
    jobs      one row a job
    """

    summary: Summary
    jobs: JobTable


def replay(
    requests: Iterable[JobRequest],
    policy: Policy,
    estimator: Estimator,
    cluster: Cluster,
    *,
    horizon: float = HORIZON_SECONDS,
    switch_seconds: float = SWITCH_SECONDS,
    join_seconds: float = 0.0,
    runnable: int = RUNNABLE,
    at_once: AtOnce = "end",
    refresh: int = REFRESH,
    seed: int = 0,
    disturbances: Disturbances | None = None,
    progress: Tell | None = None,
) -> Replay:
    """Replay jobs to the end of the last one.

    requests         any order; they are taken by submission
    switch_seconds   from the launch of a job alone to its first step; policies reckon with it for
                     every group
    join_seconds     that each further job of a group adds to it
    at_once, refresh as of `Loop`; an arrival between horizons waits for the next one by default
    seed             of disturbances, where none are given
    progress         called every thousand jobs that ended
    raises           ReplayStalled, ReplayOptionWrong, DecisionWrong, SubmittedTwice
    """
    engine = _Engine(
        sorted(requests, key=lambda request: (request.submitted, request.name)),
        policy,
        estimator,
        cluster,
        (switch_seconds, join_seconds),
        disturbances or Disturbances(seed=seed),
        {"horizon": horizon, "runnable": runnable, "at_once": at_once, "refresh": refresh},
    )
    engine.run(progress)
    return engine.replayed()


class _Engine:
    """One replay."""

    def __init__(
        self,
        requests: Sequence[JobRequest],
        policy: Policy,
        estimator: Estimator,
        cluster: Cluster,
        switch: tuple[float, float],
        disturbances: Disturbances,
        options: dict[str, Any],
    ) -> None:
        self.begun = perf_counter()
        self.requests, self.options = requests, options
        self.table = JobTable.of(requests)
        self.times = StepTimes(estimator)
        switch_seconds, join_seconds = switch
        self.recorder = Recorder(self.table, self.times, cluster, switch_seconds, join_seconds)
        self.clock = Clock(min(0.0, self.recorder.begin))
        self.executor = SimulatedExecutor(
            cluster,
            self.times,
            self.clock,
            switch_seconds=switch_seconds,
            join_seconds=join_seconds,
            disturbances=disturbances,
        )
        self.loop = Loop(
            policy,
            estimator,
            self.executor,
            switch_seconds=switch_seconds,
            watch=self.recorder,
            times=self.times,
            **options,
        )
        self.loaded: Span | None = None
        self.stalled = 0

    def run(self, tell: Tell | None) -> None:
        """To the end of the last job, or until lost nodes leave no way on."""
        requests, loop, clock = self.requests, self.loop, self.clock
        count, told = len(requests), 0
        last = requests[-1].submitted if requests else 0.0
        came = 0
        while came < count or not loop.idle:
            time = self._next(requests[came].submitted if came < count else inf)
            if self.loaded is None and time >= last:
                self._cut(last)
            if not isfinite(time):
                if not self._prompt():
                    break
                time = clock.now
            clock.go_to(time)
            while came < count and requests[came].submitted <= time:
                loop.submit(requests[came])
                came += 1
            loop.advance(time)
            if not loop.runs and loop.active and not loop.cluster.lost:
                self._stalls()
            else:
                self.stalled = 0
            if tell and came - len(loop.window) - told >= TELL_EVERY:
                told = came - len(loop.window)
                tell(told, count)
        if tell:
            tell(count, count)

    def _next(self, arrival: float) -> float:
        """When something happens next; infinite where nothing will."""
        now = self.clock.now
        due = self.loop.next_due(now)
        time = min(self.executor.next_time(), inf if due is None else due)
        return time if self.loop.window.full else min(time, max(now, arrival))

    def _cut(self, time: float) -> None:
        """The last job comes: what the cluster did until then."""
        self.clock.go_to(max(time, self.clock.now))
        self.loop.state(self.clock.now)
        self.loaded = self.recorder.cut(self.clock.now, self.loop.runs.values())

    def _prompt(self) -> bool:
        """Nothing will happen by itself: ask the policy again; whether that may help."""
        self.loop.changed = self.loop.prompted = True
        if self.loop.cluster.lost:
            self.stalled += 1
        return bool(self.loop.active) and self.stalled < PATIENCE

    def _stalls(self) -> None:
        """Nothing runs though jobs wait: that may last for a while, but not for ever.

        raises   ReplayStalled
        """
        self.stalled += 1
        if self.stalled < PATIENCE:
            return
        waiting = list(self.loop.active)
        raise ReplayStalled(
            f"policy '{self.loop.policy.name}' starts none of {len(waiting)} jobs that wait",
            jobs=", ".join(waiting[:5]) + (", ..." if len(waiting) > 5 else ""),
            time=f"{self.clock.now:,.0f} s",
            gpus=f"{self.loop.cluster.capacity()} free",
            help="this is a mistake of the policy; ask it with `tlora-fx schedule explain`",
        )

    def replayed(self) -> Replay:
        """All numbers."""
        recorder, table = self.recorder, self.table
        end = float(np.nanmax(table.ended)) if np.isfinite(table.ended).any() else self.clock.now
        whole = recorder.cut(max(end, self.clock.now), self.loop.runs.values())
        gone = np.where(np.isfinite(table.ended), table.ended, self.clock.now)
        there = table.outcome != REFUSED
        recorder.series.count_waiting(table.submitted[there], gone[there])
        loaded = self.loaded if self.loaded and self.loaded.seconds > 0 else whole
        summary = Summary(
            policy=self.loop.policy.name,
            gpus=self.recorder.cluster.gpus,
            horizon_seconds=self.loop.horizon,
            switch_seconds=self.loop.switch_seconds,
            runnable=self.loop.window.runnable,
            seed=self.executor.disturbances.seed,
            options={**self.options, **asdict(self.executor.disturbances)},
            jobs=len(table.names),
            finished=table.count(DONE),
            failed=table.count(FAILED),
            refused=table.count(REFUSED),
            unfinished=table.count(OPEN),
            refusals=dict(recorder.refusals.most_common()),
            **table.distributions(),
            violations=int(table.violated.sum()),
            violating_job_share=table.violating_share(),
            lent=int(table.lent.sum()),
            grouping=table.by_size(SIZES),
            grouped_job_share=table.grouped_share(),
            group_jobs=recorder.group_jobs,
            formations=recorder.formations,
            switches=recorder.switches,
            moves=recorder.moves,
            group_failures=recorder.group_failures,
            node_losses=recorder.node_losses,
            steps_lost=self.executor.steps_lost,
            decisions=len(recorder.wall_seconds),
            evaluations=recorder.evaluations,
            decision_wall_seconds=Distribution.of(np.array(recorder.wall_seconds)),
            wall_seconds=perf_counter() - self.begun,
            whole=whole,
            loaded=loaded,
            series=recorder.series.points(max(end, self.clock.now)),
        )
        return Replay(summary, table)
