"""The formations of groups that an executor knows of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.state import ActiveJob

Membership = tuple[frozenset[str], frozenset[int]]


def membership(group: Group) -> Membership:
    """What tells two groups apart: who, and where."""
    return frozenset(group.jobs), frozenset(group.place)


@dataclass(slots=True, eq=False)
class Run:
    """One formation of a group, from its launch until its place is given back.

    epoch       its number
    group       as it is now: without the jobs that have ended
    launched    as it was reserved and launched, what the executor knows it by
    jobs        that are in it still, by name
    committed   steps of its jobs that are safe
    time        of its launch, seconds
    started     when its first step began; None: not yet
    settled     until when its jobs' credit is written down, seconds
    leaving     asked to stop, or about to be told that it failed: what a policy sees no more
    """

    epoch: int
    group: Group
    launched: Group
    jobs: dict[str, ActiveJob]
    committed: dict[str, float]
    time: float
    started: float | None = None
    settled: float = float("-inf")
    leaving: bool = False
    key: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.key = membership(self.group)

    def without(self, name: str, seconds: float) -> None:
        """A job ended; the others go on, with another step time."""
        del self.jobs[name]
        rest = tuple(other for other in self.group.jobs if other != name)
        self.group = replace(self.group, jobs=rest, seconds=seconds)
        self.key = membership(self.group)

    def advanced(self, steps: Mapping[str, float]) -> None:
        """Take over steps of jobs that are still in it; late news moves nothing back."""
        for name, done in steps.items():
            job = self.jobs.get(name)
            if job is not None and done > job.steps_done:
                job.steps_done = min(done, float(job.request.steps))
