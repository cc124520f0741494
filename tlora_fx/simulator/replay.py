"""Replay jobs under a policy on a simulated clock: the real loop over a simulated executor.

Time goes from event to event: an arrival that a policy can see, the end of a job, a failure, a
decision that is due. Jobs that arrive while the window is full cost nothing until a slot is free,
so the cost of a replay grows with its jobs, not with its queue. The same arguments give the same
replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from math import inf, isfinite
from time import perf_counter

import numpy as np

from tlora_fx.cost.estimator import Estimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import ClockBackwards, PlaceTaken, ReplayStalled
from tlora_fx.scheduler.executor import (
    Drained,
    ExecutorEvent,
    Finished,
    GroupLaunch,
    GroupStarted,
    Progress,
)
from tlora_fx.scheduler.formations import StepTimes
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.state import ChangeCosts, Group, JobRequest, Policy
from tlora_fx.simulator.metrics import (
    DONE,
    FAILED,
    OPEN,
    REFUSED,
    SIZES,
    Distribution,
    Interval,
    JobTable,
    MetricsRecorder,
    Span,
    Summary,
)


class Clock:
    """Simulated time, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def go_to(self, time: float) -> None:
        """Advance the time; raises ClockBackwards."""
        if time < self.now:
            raise ClockBackwards(
                "a simulated clock cannot go back",
                expected=f"at least {self.now} s",
                found=f"{time} s",
            )
        self.now = time


class SimulatedGroup:
    """Formation that runs in the simulator.

    requests       of the jobs that are left, the one that ends next last
    begins         when its first step does, seconds
    version        grows whenever its next event moves
    """

    def __init__(
        self, launch: GroupLaunch, jobs: Sequence[JobRequest], begins: float, seconds: float
    ) -> None:
        self.group, self.epoch, self.seconds = launch.group, launch.epoch, seconds
        self.begins = begins
        self.version, self.announced = 0, False
        self._launched = {job.name: launch.steps_done.get(job.name, 0.0) for job in jobs}
        self._targets = {job.name: job.steps - self._launched[job.name] for job in jobs}
        self.requests = sorted(jobs, key=lambda job: (-self._targets[job.name], job.name))
        self._from, self._steps = begins, 0.0

    def next_end(self) -> float:
        """Time when the group's next job ends, seconds."""
        return self._from + (self._targets[self.requests[-1].name] - self._steps) * self.seconds

    def steps_at(self, time: float) -> float:
        """Steps of the group since its launch."""
        if time <= self._from:
            return self._steps
        most = self._targets[self.requests[-1].name] if self.requests else self._steps
        return min(most, self._steps + (time - self._from) / self.seconds)

    def steps(self, time: float) -> dict[str, float]:
        """Steps of each job that is left, in all."""
        done = self.steps_at(time)
        return {job.name: self._launched[job.name] + done for job in self.requests}

    def end_jobs(self, time: float) -> list[JobRequest]:
        """The jobs that end now leave; those with as many steps left end together."""
        target = self._targets[self.requests[-1].name]
        gone = []
        while self.requests and self._targets[self.requests[-1].name] <= target:
            gone.append(self.requests.pop())
        self._from, self._steps = time, target
        return gone


#: In the heap of events: a group becomes another one, after what else happens at that time; and
#: something is told.
TAKEOVER, TOLD = 1 << 62, 1 << 63


@dataclass(frozen=True, slots=True)
class Takeover:
    """Successor of a running group, once the jobs that move to it are there.

    came    names of those who join it
    """

    successor: GroupLaunch
    came: frozenset[str]


class SimulatedExecutor:
    """The `Executor` of the simulator.

    Nothing ticks: a group's next event is known when it is launched, and is computed anew only when
    a job leaves it. A group makes no progress for `switch_seconds` from its launch; then each step
    of it takes the predicted seconds. Steps are fractions between events. A job that ends leaves
    its group without a pause, and a drained group stops at once; both are told `changes.end` later.
    While a job moves to a group, that trains on without it.

    switch_seconds   from a launch to the first step of a job alone
    join_seconds     that each further job of a group adds to it
    changes          what joins and leaves cost a running group; None: it has to stop for them
    """

    def __init__(
        self,
        cluster: Cluster,
        times: StepTimes,
        clock: Clock,
        *,
        switch_seconds: float = 20.0,
        join_seconds: float = 0.0,
        changes: ChangeCosts | None = None,
    ) -> None:
        self.times, self.clock = times, clock
        self.switch_seconds, self.join_seconds = switch_seconds, join_seconds
        self.changes = changes
        self._cluster = cluster
        self._groups: dict[int, SimulatedGroup] = {}
        self._places: dict[int, tuple[int, ...]] = {}
        self._owner: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._events: list[ExecutorEvent] = []
        self._takeovers: dict[int, Takeover] = {}
        self._late: dict[int, Finished | Drained] = {}
        self._written = 0
        self._untold: set[str] = set()
        self._holders: dict[str, int] = {}
        self._pulled = -inf

    def inventory(self) -> Cluster:
        return self._cluster

    def reserve(self, group: Group, epoch: int) -> None:
        if epoch in self._places:
            return
        lost = self._cluster.lost
        for gpu in group.place:
            owner = self._owner.get(gpu)
            if owner is not None or self._cluster.node(gpu) in lost:
                reason = "it is not there" if owner is None else f"formation {owner} holds it"
                raise PlaceTaken(
                    f"GPU {gpu} is not free", group=", ".join(group.jobs), found=reason
                )
        self._places[epoch] = group.place
        self._owner.update(dict.fromkeys(group.place, epoch))

    def launch(self, launch: GroupLaunch) -> None:
        """Start a group on the place that it has reserved; the layout is the estimator's best.

        raises   PlaceTaken
        """
        group, epoch = launch.group, launch.epoch
        if epoch in self._groups:
            return
        if epoch not in self._places:
            raise PlaceTaken("nothing is reserved for this group", group=", ".join(group.jobs))
        self._holders.update(dict.fromkeys(group.jobs, epoch))
        switch = self.switch_seconds + self.join_seconds * (len(launch.jobs) - 1)
        self._begin(launch, self.clock.now + switch)

    def _begin(self, launch: GroupLaunch, begins: float) -> None:
        jobs = [job for job in launch.jobs if job.name not in self._untold]
        if not jobs:
            return
        seconds = self._seconds(jobs, launch.group.place)
        self._groups[launch.epoch] = running = SimulatedGroup(launch, jobs, begins, seconds)
        self._plan(running)

    def can_change(self, group: Group, epoch: int, successor: Group) -> bool:
        coming = (takeover.successor.epoch for takeover in self._takeovers.values())
        return self.changes is not None and (epoch in self._groups or epoch in coming)

    def change(self, group: Group, epoch: int, successor: GroupLaunch) -> None:
        if successor.epoch in self._groups or epoch in self._takeovers:
            return
        assert self.changes is not None
        running = self._groups.get(epoch)
        here = running.steps(self.clock.now).keys() if running is not None else set()
        came = frozenset(successor.group.jobs) - here - self._untold
        self._takeovers[epoch] = Takeover(successor, came)
        self._places[successor.epoch] = self._places[epoch]
        if self.changes.move and any(successor.steps_done.get(name) for name in came):
            heappush(self._heap, (self.clock.now + self.changes.move, TAKEOVER, epoch))
        else:
            self._take_over(epoch)

    def _take_over(self, epoch: int) -> None:
        """A group has become another one; of its jobs some may have ended, or all."""
        assert self.changes is not None
        takeover = self._takeovers.pop(epoch)
        successor, came = takeover.successor, takeover.came
        now, running = self.clock.now, self._groups.pop(epoch, None)
        steps = running.steps(now) if running is not None else {}
        jobs = [job for job in successor.jobs if job.name in steps or job.name in came]
        went = steps.keys() - set(successor.group.jobs)
        begins = now + self.changes.of(len(came), len(went))
        if running is not None:
            # One that had not begun yet is not ready any sooner.
            begins = max(begins, running.begins)
        self._events.append(Drained(now, epoch, steps, successor.epoch))
        self._holders.update(dict.fromkeys(successor.group.jobs, successor.epoch))
        self._owner.update(dict.fromkeys(successor.group.place, successor.epoch))
        done = {**successor.steps_done, **steps}
        self._begin(replace(successor, jobs=jobs, steps_done=done), begins)

    def events(self) -> list[ExecutorEvent]:
        now = self.clock.now
        while self._heap and self._heap[0][0] <= now:
            time, key, version = heappop(self._heap)
            if key == TAKEOVER:
                if version in self._takeovers:
                    self._take_over(version)
                continue
            if key == TOLD:
                if version in self._late:
                    self._hear(self._late.pop(version))
                continue
            group = self._groups.get(key)
            if group is not None and group.version == version:
                self._group_event(group, time)
        events, self._events = self._events, []
        return events

    def progress(self) -> list[Progress]:
        """Progress of all that runs, now."""
        now = self.clock.now
        if now == self._pulled:
            return []
        self._pulled = now
        return [
            Progress(now, epoch, group.steps(now))
            for epoch, group in self._groups.items()
            if now > group.begins
        ]

    def drain(self, group: Group, epoch: int) -> None:
        now, running = self.clock.now, self._groups.pop(epoch, None)
        takeover = self._takeovers.pop(epoch, None)
        if running is not None or takeover is not None:
            steps = running.steps(now) if running is not None else {}
            self._tell(Drained(now, epoch, steps))
        if takeover is not None:
            self._tell(Drained(now, takeover.successor.epoch, {}))

    def _tell(self, event: Finished | Drained) -> None:
        """What is written first, and then heard of."""
        seconds = 0.0 if self.changes is None else self.changes.end
        if not seconds:
            self._events.append(event)
            return
        if isinstance(event, Finished):
            self._untold.add(event.job)
        self._written += 1
        self._late[self._written] = replace(event, time=event.time + seconds)
        heappush(self._heap, (event.time + seconds, TOLD, self._written))

    def _hear(self, event: Finished | Drained) -> None:
        """Something is told, of whoever has the job by now."""
        if isinstance(event, Finished):
            self._untold.discard(event.job)
            event = replace(event, epoch=self._holders[event.job])
        self._events.append(event)

    def release(self, group: Group, epoch: int) -> None:
        self._groups.pop(epoch, None)
        self._takeovers.pop(epoch, None)
        for gpu in self._places.pop(epoch, ()):
            if self._owner.get(gpu) == epoch:
                del self._owner[gpu]

    def next_time(self) -> float:
        """Time of the next event; infinite where nothing will happen."""
        while self._heap:
            time, key, version = self._heap[0]
            group = self._groups.get(key)
            if key == TOLD or (key == TAKEOVER and version in self._takeovers):
                return time
            if group is not None and group.version == version:
                return time
            heappop(self._heap)
        return inf

    def _group_event(self, group: SimulatedGroup, time: float) -> None:
        """The next jobs of a group end."""
        if not group.announced:
            group.announced = True
            self._events.append(GroupStarted(group.begins, group.epoch))
        for request in group.end_jobs(time):
            self._tell(Finished(time, group.epoch, request.name, float(request.steps)))
        self._goes_on(group)

    def _goes_on(self, group: SimulatedGroup) -> None:
        """A group has fewer jobs now, or none."""
        if not group.requests:
            del self._groups[group.epoch]
            return
        group.seconds = self._seconds(group.requests, group.group.place)
        group.version += 1
        self._plan(group)

    def _plan(self, group: SimulatedGroup) -> None:
        heappush(self._heap, (group.next_end(), group.epoch, group.version))

    def _seconds(self, jobs: Sequence[JobRequest], place: tuple[int, ...]) -> float:
        return self.times.of(jobs, place, self._cluster).seconds


#: Decisions with nothing running and nothing started, after which a policy is said to stall.
PATIENCE = 100


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay.

    intervals    what every group did, by the end of each; empty where it was not recorded
    """

    summary: Summary
    jobs: JobTable
    intervals: list[Interval] = field(default_factory=list)


#: An arrival between horizons waits for the next one.
OPTIONS = LoopOptions(at_once="end")


def replay(
    requests: Iterable[JobRequest],
    policy: Policy,
    estimator: Estimator,
    cluster: Cluster,
    *,
    options: LoopOptions = OPTIONS,
    join_seconds: float = 0.0,
    seed: int = 0,
    record: bool = False,
) -> ReplayResult:
    """Replay jobs to the end of the last one.

    options          `switch_seconds` pass from the launch of a job alone to its first step, and
                     policies reckon with them for every group
    seed             of what the requests were drawn by, for the summary
    record           what every group did is kept
    raises           ReplayStalled, DecisionWrong, SubmittedTwice
    """
    ordered = sorted(requests, key=lambda request: (request.submitted, request.name))
    times = StepTimes(estimator)
    clock = Clock(min(0.0, ordered[0].submitted if ordered else 0.0))
    executor = SimulatedExecutor(
        cluster,
        times,
        clock,
        switch_seconds=options.switch_seconds,
        join_seconds=join_seconds,
        changes=options.changes,
    )
    table = JobTable(ordered)
    intervals: list[Interval] | None = [] if record else None
    switch = options.switch_seconds
    recorder = MetricsRecorder(
        table, times, cluster, switch, join_seconds, intervals, changes=options.changes
    )
    loop = Loop(policy, estimator, executor, options=options, callback=recorder, times=times)
    engine = _Engine(ordered, executor, loop, recorder)
    engine.run()
    return engine.replayed(seed)


class _Engine:
    def __init__(
        self,
        requests: Sequence[JobRequest],
        executor: SimulatedExecutor,
        loop: Loop,
        recorder: MetricsRecorder,
    ) -> None:
        self.begun = perf_counter()
        self.requests, self.executor, self.loop, self.recorder = requests, executor, loop, recorder
        self.clock = executor.clock
        self.loaded: Span | None = None
        self.stalled = 0

    def run(self) -> None:
        """Replay to the end of the last job, or until lost nodes leave no way on."""
        requests, loop, clock = self.requests, self.loop, self.clock
        count = len(requests)
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
            if not loop.running and loop.active and not loop.cluster.lost:
                self._stalls()
            else:
                self.stalled = 0

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
        self.loaded = self.recorder.cut(self.clock.now, self.loop.running.values())

    def _prompt(self) -> bool:
        """Nothing will happen by itself: ask the policy again; whether that may help."""
        self.loop.changed = self.loop.prompted = True
        if self.loop.cluster.lost:
            self.stalled += 1
        return bool(self.loop.active) and self.stalled < PATIENCE

    def _stalls(self) -> None:
        """Nothing runs though jobs wait: that may last for a while, but not for ever."""
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

    def replayed(self, seed: int) -> ReplayResult:
        recorder, table = self.recorder, self.recorder.table
        end = float(np.nanmax(table.ended)) if np.isfinite(table.ended).any() else self.clock.now
        whole = recorder.cut(max(end, self.clock.now), self.loop.running.values())
        gone = np.where(np.isfinite(table.ended), table.ended, self.clock.now)
        there = table.outcome != REFUSED
        recorder.series.count_waiting(table.submitted[there], gone[there])
        loaded = self.loaded if self.loaded and self.loaded.seconds > 0 else whole
        options = self.loop.options
        summary = Summary(
            policy=self.loop.policy.name,
            gpus=self.recorder.cluster.gpus,
            horizon_seconds=options.horizon,
            switch_seconds=options.switch_seconds,
            runnable=options.runnable,
            seed=seed,
            options=asdict(options) | {"seed": seed},
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
            joins=recorder.joins,
            leaves=recorder.leaves,
            group_failures=recorder.group_failures,
            node_losses=recorder.node_losses,
            decisions=len(recorder.wall_seconds),
            evaluations=recorder.evaluations,
            decision_wall_seconds=Distribution.of(np.array(recorder.wall_seconds)),
            wall_seconds=perf_counter() - self.begun,
            whole=whole,
            loaded=loaded,
            series=recorder.series.points(max(end, self.clock.now)),
        )
        return ReplayResult(summary, table, recorder.intervals or [])
