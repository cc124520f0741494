"""A simulated executor whose nodes are lost, whose groups fail, and whose steps take longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp, floor, inf, isfinite
from random import Random
from typing import Any

from tlora_fx.scheduler.executor import (
    ExecutorEvent,
    Failed,
    Finished,
    GroupLaunch,
    NodeBack,
    NodeLost,
)
from tlora_fx.scheduler.state import JobRequest
from tlora_fx.simulator.replay import SimulatedExecutor, SimulatedGroup


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong; by default nothing does.

    Every draw is keyed by the seed and by what it is of.

    noise                    spread of the logarithm of each group's step time, mean 1
    commit_seconds           between commits; what a group did since its last one is lost with it
    group_failure_seconds    mean time to the failure of a group, for each GPU it holds
    node_failure_seconds     mean time between two losses of a node
    """

    seed: int = 0
    noise: float = 0.0
    commit_seconds: float = 600.0
    group_failure_seconds: float = inf
    node_failure_seconds: float = inf
    repair_seconds: float = 3600.0

    def factor(self, *key: object) -> float:
        """Real step time over the predicted one."""
        return exp(self._random("speed", *key).gauss(-(self.noise**2) / 2, self.noise))

    def group_fails_after(self, epoch: int, gpus: int) -> float:
        """Seconds from a formation's launch to its failure; infinite where it does not fail."""
        if not isfinite(self.group_failure_seconds):
            return inf
        return self._random("group", epoch).expovariate(gpus / self.group_failure_seconds)

    def node_losses(self, node: int) -> Iterator[tuple[float, float]]:
        """Times when a node is lost and when it is back, in seconds from the begin, for ever."""
        if not isfinite(self.node_failure_seconds):
            return
        random, time = self._random("node", node), 0.0
        while True:
            time += random.expovariate(1.0 / self.node_failure_seconds)
            yield time, time + self.repair_seconds
            time += self.repair_seconds

    def _random(self, *key: object) -> Random:
        return Random(repr((self.seed, *key)))


#: Kinds of faults.
LOSS, RETURN, FAILURE = range(3)


class FaultyExecutor(SimulatedExecutor):
    """Runs groups as simulations do, with faults; a test may also call for one.

    steps_lost   by failures, summed over jobs: done and not committed
    """

    def __init__(self, *given: Any, faults: Faults | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.faults = faults or Faults()
        self.steps_lost = 0.0
        self._due: list[tuple[float, int, int]] = []
        self._losses = [self.faults.node_losses(node) for node in range(self._cluster.nodes)]
        for node in range(self._cluster.nodes):
            self._plan_loss(node)

    def _plan_loss(self, node: int) -> None:
        for lost, back in [*filter(None, [next(self._losses[node], None)])]:
            heappush(self._due, (lost, LOSS, node))
            heappush(self._due, (back, RETURN, node))

    def _begin(self, launch: GroupLaunch, begins: float) -> None:
        super()._begin(launch, begins)
        after = self.faults.group_fails_after(launch.epoch, launch.group.gpus)
        if isfinite(after):
            heappush(self._due, (self.clock.now + after, FAILURE, launch.epoch))

    def _seconds(self, jobs: Sequence[JobRequest], place: tuple[int, ...]) -> float:
        names = sorted(job.name for job in jobs)
        return super()._seconds(jobs, place) * self.faults.factor(*names)

    def events(self) -> list[ExecutorEvent]:
        while self._due and self._due[0][0] <= self.clock.now:
            _, kind, number = heappop(self._due)
            if kind == LOSS:
                self.lose_node(number)
            elif kind == RETURN:
                self.return_node(number)
                self._plan_loss(number)
            elif number in self._groups:
                self.fail_group(number)
        return super().events()

    def next_time(self) -> float:
        while self._due and self._due[0][1] == FAILURE and self._due[0][2] not in self._groups:
            heappop(self._due)
        return min(super().next_time(), self._due[0][0] if self._due else inf)

    def fail_group(
        self,
        epoch: int,
        reason: str = "a simulated failure",
        *,
        blameless: bool = False,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        """A group ends; its jobs go on from their last commits."""
        running, takeover = self._groups.pop(epoch, None), self._takeovers.pop(epoch, None)
        # Jobs that ended before their group failed, and a group that was drained, lose nothing.
        for number, event in list(self._late.items()):
            holder = self._holders[event.job] if isinstance(event, Finished) else event.epoch
            if holder == epoch:
                self._hear(replace(self._late.pop(number), time=self.clock.now))
        if running is not None or takeover is not None:
            steps: dict[str, float] = {}
            if running is not None:
                now, steps = self.clock.now, self.committed(running)
                self.steps_lost += sum(running.steps(now).values()) - sum(steps.values())
            failed = Failed(self.clock.now, epoch, None, reason, steps, blameless=blameless)
            self._events.append(replace(failed, absent=absent or {}))

    def fail_job(self, epoch: int, job: str, reason: str = "a simulated failure") -> None:
        """A job is at fault and ends; its group goes on."""
        now, running = self.clock.now, self._groups.get(epoch)
        if running is None or all(request.name != job for request in running.requests):
            return
        steps = self.committed(running)
        self.steps_lost += running.steps(now)[job] - steps[job]
        running._steps, running._from = running.steps_at(now), max(now, running._from)
        running.requests = [request for request in running.requests if request.name != job]
        self._events.append(Failed(now, epoch, job, reason, {job: steps[job]}))
        self._goes_on(running)

    def committed(self, group: SimulatedGroup) -> dict[str, float]:
        """Steps of each job that is left at its last commit, one being made every so often."""
        every, since = self.faults.commit_seconds, max(0.0, self.clock.now - group.begins)
        last = group.begins + floor(since / every) * every
        # What neighbours of a job that left had not committed by then is not looked up.
        done = group.steps_at(last) if last >= group._from else group._steps
        return {job.name: group._launched[job.name] + done for job in group.requests}

    def lose_node(self, node: int) -> None:
        """A node goes away, and what runs on it fails."""
        if node in self._cluster.lost:
            return
        self._cluster = replace(self._cluster, lost=self._cluster.lost | {node})
        self._events.append(NodeLost(self.clock.now, node))
        hit = {self._owner[gpu] for gpu in self._owner if self._cluster.node(gpu) == node}
        for epoch in sorted(hit):
            self.fail_group(epoch, f"node {node} was lost")

    def return_node(self, node: int) -> None:
        """A lost node is there again."""
        if node in self._cluster.lost:
            self._cluster = replace(self._cluster, lost=self._cluster.lost - {node})
            self._events.append(NodeBack(self.clock.now, node))
