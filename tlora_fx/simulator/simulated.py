"""Groups that run on a simulated clock, as fast as an estimator says.

Nothing ticks: a group's next event is known when it is launched, and is computed anew only when a
job leaves it. A group makes no progress for `switch_seconds` from its launch; then each step of it
takes the predicted seconds, disturbed where that is asked for. Steps are fractions between events.
A job that ends leaves its group without a pause. A drained group stops at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from tlora_fx.cost.cluster import Cluster
from tlora_fx.errors import PlaceTaken
from tlora_fx.scheduler.estimating import Layout
from tlora_fx.scheduler.executor import (
    Drained,
    Event,
    Failed,
    Finished,
    NodeBack,
    NodeLost,
    Progress,
    Started,
)
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.loop_times import StepTimes
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.simulator.clock import Clock
from tlora_fx.simulator.noise import Disturbances
from tlora_fx.simulator.simulated_group import SimulatedGroup

#: What happens to a node, in the heap of events.
LOSS, RETURN = -1, -2


class SimulatedExecutor:
    """The `Executor` of the simulator.

    cluster          at the begin
    times            predicts steps
    clock            what time it is
    switch_seconds   from a launch to the first step of a job alone
    join_seconds     that each further job of a group adds to it
    disturbances     None: predictions come true
    steps_lost       by failures, summed over jobs: done and not committed
    """

    def __init__(
        self,
        cluster: Cluster,
        times: StepTimes,
        clock: Clock,
        *,
        switch_seconds: float = 20.0,
        join_seconds: float = 0.0,
        disturbances: Disturbances | None = None,
    ) -> None:
        self.times, self.clock = times, clock
        self.switch_seconds, self.join_seconds = switch_seconds, join_seconds
        self.disturbances = disturbances or Disturbances()
        self._cluster = cluster
        self._groups: dict[int, SimulatedGroup] = {}
        self._places: dict[int, tuple[int, ...]] = {}
        self._owner: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._told: list[Event] = []
        self._fails: dict[int, float] = {}
        self._losses: dict[int, Iterator[tuple[float, float]]] = {}
        self._pulled = -inf
        self.steps_lost = 0.0
        for node in range(cluster.nodes):
            self._losses[node] = self.disturbances.node_losses(node)
            self._plan_loss(node)

    def inventory(self) -> Cluster:
        """The GPUs, and which nodes are lost now."""
        return self._cluster

    def reserve(self, group: Group, epoch: int) -> None:
        """Hold the group's place for it.

        raises   PlaceTaken
        """
        if epoch in self._places:
            return
        lost = self._cluster.lost
        for gpu in group.place:
            owner = self._owner.get(gpu)
            if owner is not None or self._cluster.node(gpu) in lost:
                found = "it is not there" if owner is None else f"formation {owner} holds it"
                raise PlaceTaken(f"GPU {gpu} is not free", group=", ".join(group.jobs), found=found)
        self._places[epoch] = group.place
        self._owner.update(dict.fromkeys(group.place, epoch))

    def launch(
        self,
        group: Group,
        epoch: int,
        jobs: Sequence[JobRequest],
        steps_done: Mapping[str, float],
        layout: Layout | None = None,
    ) -> None:
        """Start a group on the place that it has reserved; the layout is the estimator's best.

        raises   PlaceTaken
        """
        if epoch in self._groups:
            return
        if epoch not in self._places:
            raise PlaceTaken("nothing is reserved for this group", group=", ".join(group.jobs))
        now = self.clock.now
        seconds = self._seconds(jobs, group.place, epoch)
        begin = now + self.switch_seconds + self.join_seconds * (len(jobs) - 1)
        made = SimulatedGroup(group, epoch, jobs, steps_done, begin, seconds)
        self._groups[epoch] = made
        self._fails[epoch] = now + self.disturbances.group_fails_after(epoch, group.gpus)
        self._plan(made)

    def events(self) -> list[Event]:
        """What happened since the last call, in order of time."""
        now = self.clock.now
        while self._heap and self._heap[0][0] <= now:
            time, key, version = heappop(self._heap)
            if key < 0:
                self._node_event(time, key, version)
                continue
            group = self._groups.get(key)
            if group is not None and group.version == version:
                self._group_event(group, time)
        told, self._told = self._told, []
        return told

    def progress(self) -> list[Progress]:
        """Of all that runs, now."""
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
        """The group stops at once, and says where."""
        found = self._groups.pop(epoch, None)
        if found is not None:
            now = self.clock.now
            self._told.append(Drained(now, epoch, found.steps(now)))

    def kill(self, group: Group, epoch: int) -> None:
        """The group stops, and what it has not committed is lost."""
        self._groups.pop(epoch, None)

    def release(self, group: Group, epoch: int) -> None:
        """The group's place is free."""
        self.kill(group, epoch)
        self._fails.pop(epoch, None)
        for gpu in self._places.pop(epoch, ()):
            del self._owner[gpu]

    def next_time(self) -> float:
        """When something happens next; infinite where nothing will."""
        while self._heap:
            time, key, version = self._heap[0]
            group = self._groups.get(key)
            if key < 0 or (group is not None and group.version == version):
                return time
            heappop(self._heap)
        return inf

    def begins(self, epoch: int) -> float:
        """When the first step of a running group does."""
        return self._groups[epoch].begins

    def fail_group(self, epoch: int, reason: str = "a simulated failure") -> None:
        """A group ends; its jobs go on from their last commits."""
        found = self._groups.pop(epoch, None)
        if found is not None:
            steps = self._safe(found)
            self._told.append(Failed(self.clock.now, epoch, None, reason, steps))

    def fail_job(self, epoch: int, job: str, reason: str = "a simulated failure") -> None:
        """A job is at fault and ends; its group goes on."""
        now = self.clock.now
        found = self._groups.get(epoch)
        if found is None or all(request.name != job for request in found.requests):
            return
        steps = self._safe(found, job)
        found.drop_job(job, now)
        self._told.append(Failed(now, epoch, job, reason, {job: steps[job]}))
        self._goes_on(found)

    def lose_node(self, node: int) -> None:
        """A node goes away, and what runs on it fails."""
        if node in self._cluster.lost:
            return
        self._cluster = replace(self._cluster, lost=self._cluster.lost | {node})
        self._told.append(NodeLost(self.clock.now, node))
        hit = {self._owner[gpu] for gpu in self._owner if self._cluster.node(gpu) == node}
        for epoch in sorted(hit):
            self.fail_group(epoch, f"node {node} was lost")

    def return_node(self, node: int) -> None:
        """A lost node is there again."""
        if node in self._cluster.lost:
            self._cluster = replace(self._cluster, lost=self._cluster.lost - {node})
            self._told.append(NodeBack(self.clock.now, node))

    def _safe(self, group: SimulatedGroup, job: str | None = None) -> dict[str, float]:
        """Steps at the last commit; what was done since is lost, of one job or of all."""
        now = self.clock.now
        done, safe = group.steps(now), group.committed(now, self.disturbances.commit_seconds)
        names = done if job is None else (job,)
        self.steps_lost += sum(done[name] - safe[name] for name in names)
        return safe

    def _group_event(self, group: SimulatedGroup, time: float) -> None:
        """A group fails, or its next jobs end."""
        if time >= self._fails[group.epoch] and time < group.next_end():
            self.fail_group(group.epoch)
            return
        if not group.told:
            group.told = True
            self._told.append(Started(group.begins, group.epoch))
        for request in group.end_jobs(time):
            self._told.append(Finished(time, group.epoch, request.name, float(request.steps)))
        self._goes_on(group)

    def _goes_on(self, group: SimulatedGroup) -> None:
        """A group has fewer jobs now, or none."""
        if not group.requests:
            del self._groups[group.epoch]
            return
        group.seconds = self._seconds(group.requests, group.group.place, group.epoch)
        group.version += 1
        self._plan(group)

    def _plan(self, group: SimulatedGroup) -> None:
        time = min(group.next_end(), self._fails[group.epoch])
        heappush(self._heap, (time, group.epoch, group.version))

    def _seconds(self, jobs: Sequence[JobRequest], place: tuple[int, ...], epoch: int) -> float:
        step = self.times.of(jobs, place, self._cluster)
        return step.seconds * self.disturbances.factor(epoch, len(jobs))

    def _node_event(self, time: float, kind: int, node: int) -> None:
        if kind == RETURN:
            self.return_node(node)
            self._plan_loss(node)
            return
        self.lose_node(node)

    def _plan_loss(self, node: int) -> None:
        """Put a node's next loss and return among the events."""
        times = next(self._losses[node], None)
        if times is not None:
            heappush(self._heap, (times[0], LOSS, node))
            heappush(self._heap, (times[1], RETURN, node))
