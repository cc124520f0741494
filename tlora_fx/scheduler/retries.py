"""Retry policy: which failures a job is tried again after, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tlora_fx.scheduler.state import (
    ActiveJob,
    Group,
)

#: A bound that no group of two or more can keep.
ALONE = 1e-9


#: How `Loop.ended` begins of a job that never ran; it may be submitted again.
REFUSED = "refused: "


#: Failures alone in a row, kills among them, after which a job is given up: it may be the job
#: that takes the machine's memory.
MAX_KILLS = 5


@dataclass(slots=True)
class FailureRecord:
    """Number of failures of a job's groups; `killed` of those alone were by a signal."""

    shared: int = 0
    alone: int = 0
    killed: int = 0
    steps: float = 0.0
    suspect: bool = True


class RetryPolicy:
    """The jobs whose groups failed: run alone to find who is at fault, and given up at last.

    A group that fails without naming a job says nothing of who it was. Its jobs are under suspicion
    and run alone, until one of them has got further than it was; a job that was suspected too often
    stays alone for good.

    tries   failures alone, without progress between, after which a job is given up; where groups
            were killed from outside, that says less of their job, and `MAX_KILLS` are borne
    """

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self._records: dict[str, FailureRecord] = {}

    def failed(self, jobs: Iterable[ActiveJob], *, killed: bool = False) -> list[ActiveJob]:
        """A group failed; its jobs' steps are settled. Returns those to give up.

        killed   its processes were killed, and had told nothing
        """
        members = list(jobs)
        lost = []
        for job in members:
            record = self._records.setdefault(job.name, FailureRecord(steps=job.steps_done))
            if job.steps_done > record.steps:
                record.alone = record.killed = 0
            record.steps = job.steps_done
            record.suspect = True
            if len(members) > 1:
                record.shared += 1
            else:
                record.alone += 1
                record.killed += killed
            own = record.alone - record.killed
            if own >= self.tries or record.alone >= max(self.tries, MAX_KILLS):
                lost.append(job)
        return lost

    def failures(self, name: str) -> int:
        """Failures of a job alone since it last got further."""
        record = self._records.get(name)
        return record.alone if record else 0

    def committed(self, steps: Mapping[str, float]) -> None:
        """Jobs got further: suspicion ends, unless it was raised too often."""
        for name, done in steps.items() if self._records else ():
            record = self._records.get(name)
            if record is not None and done > record.steps:
                record.suspect = record.shared >= self.tries
                record.alone = record.killed = 0

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        self._records.pop(name, None)

    def suspects(self, name: str) -> bool:
        """Whether a job must run alone."""
        record = self._records.get(name)
        return record is not None and record.suspect

    def shown(self, jobs: Mapping[str, ActiveJob]) -> dict[str, ActiveJob]:
        """Jobs as a policy shall see them: suspects bear no neighbour."""
        seen = dict(jobs)
        for name in self._records:
            if name in seen and self.suspects(name):
                job = seen[name]
                request = replace(job.request, max_slowdown=ALONE, max_slowdown_opt_in=0.0)
                seen[name] = ActiveJob(request, job.solo_seconds, job.steps_done, job.credit)
        return seen

    def parted(self, group: Group) -> Group:
        """A group of a policy that looks at no bounds, without suspects; of suspects the first."""
        if not self._records or len(group.jobs) < 2:
            return group
        rest = tuple(name for name in group.jobs if not self.suspects(name))
        if len(rest) == len(group.jobs):
            return group
        return replace(group, jobs=rest or group.jobs[:1])
