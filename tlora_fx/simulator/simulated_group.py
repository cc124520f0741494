"""One group on a simulated clock: steps at a steady rate, from one event to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.request import JobRequest


class SimulatedGroup:
    """A formation that runs.

    group, epoch   as it was launched
    requests       of the jobs that are left, the one that ends next last
    begins         when its first step does, seconds
    seconds        of a step now
    version        grows whenever its next event moves
    """

    __slots__ = (
        "_from",
        "_launched",
        "_steps",
        "_targets",
        "begins",
        "epoch",
        "group",
        "requests",
        "seconds",
        "told",
        "version",
    )

    def __init__(
        self,
        group: Group,
        epoch: int,
        jobs: Sequence[JobRequest],
        steps_done: Mapping[str, float],
        begins: float,
        seconds: float,
    ) -> None:
        self.group, self.epoch, self.seconds = group, epoch, seconds
        self.begins = begins
        self.version, self.told = 0, False
        self._launched = {job.name: steps_done.get(job.name, 0.0) for job in jobs}
        self._targets = {job.name: job.steps - self._launched[job.name] for job in jobs}
        self.requests = sorted(jobs, key=lambda job: (-self._targets[job.name], job.name))
        self._from, self._steps = begins, 0.0

    def next_end(self) -> float:
        """When its next job ends, seconds."""
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

    def committed(self, time: float, every: float) -> dict[str, float]:
        """Steps of each job that is left at its last commit, one being made every so often."""
        since = max(0.0, time - self.begins)
        last = self.begins + floor(since / every) * every
        # Whenever a job leaves, its neighbours are committed with it.
        done = self.steps_at(last) if last >= self._from else self._steps
        return {job.name: self._launched[job.name] + done for job in self.requests}

    def end_jobs(self, time: float) -> list[JobRequest]:
        """The jobs that end now leave; those with as many steps left end together."""
        target = self._targets[self.requests[-1].name]
        gone = []
        while self.requests and self._targets[self.requests[-1].name] <= target:
            gone.append(self.requests.pop())
        self._from, self._steps = time, target
        return gone

    def drop_job(self, name: str, time: float) -> None:
        """A job leaves before its end."""
        self._steps, self._from = self.steps_at(time), max(time, self._from)
        self.requests = [job for job in self.requests if job.name != name]
