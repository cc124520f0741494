"""The units that a round begins with: what runs, what was to run, and what is new.

A policy that is asked again and again keeps the units of its last answer. What nobody touched
since is taken over with its sums; only what changed is fresh, and looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tlora_fx.scheduler.bounds import ROUNDING, broken, limit_seconds
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.search.objective import Unit
from tlora_fx.scheduler.state import ActiveJob, State
from tlora_fx.scheduler.urgency import arrival


@dataclass(slots=True)
class Memory:
    """What a policy keeps from round to round.

    running   by group, as it was answered
    waiting   jobs that were to run together, and have not begun
    """

    running: dict[tuple[tuple[str, ...], tuple[int, ...]], Unit] = field(default_factory=dict)
    waiting: list[Unit] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """The units of one round.

    units    in order of the first arrival among their jobs
    fresh    of each, whether it is new or changed
    broke    jobs that were taken out of a group that slowed them down too much
    """

    units: list[Unit]
    fresh: list[bool]
    broke: list[str]


class Gathering:
    """Makes the units of a round."""

    def __init__(self, state: State, memory: Memory, *, lending: bool) -> None:
        self.state = state
        self.memory = memory
        self.lending = lending
        self.units: list[Unit] = []
        self.fresh: list[bool] = []
        self.broke: list[str] = []
        self._held: set[str] = set()

    def round(self, dwell: float) -> Round:
        """All units.

        dwell   seconds for which a new group is left alone
        """
        present = frozenset(self.state.cluster.lost)
        for group in self.state.groups:
            nodes = {self.state.cluster.node(gpu) for gpu in group.place}
            if group.place and not nodes & present:
                self._take_running(group, dwell)
        jobs = self.state.jobs
        for unit in self.memory.waiting:
            if all(name in jobs and name not in self._held for name in unit.jobs):
                self._refresh(unit)
                if len(unit.jobs) == 1 or unit.seconds <= unit.limit * (1 + ROUNDING):
                    self._add(unit, fresh=False)
        for name, job in jobs.items():
            if name not in self._held:
                self._add(self.alone(job), fresh=True)
        ranked = sorted(zip(self.units, self.fresh, strict=True), key=self._first)
        return Round([unit for unit, _ in ranked], [fresh for _, fresh in ranked], self.broke)

    def _first(self, entry: tuple[Unit, bool]) -> tuple[float, str]:
        return min(arrival(self.state.jobs[name]) for name in entry[0].jobs)

    def _add(self, unit: Unit, *, fresh: bool) -> None:
        self._held.update(unit.jobs)
        self.units.append(unit)
        self.fresh.append(fresh)

    def _take_running(self, group: Group, dwell: float) -> None:
        """A group that runs, without the jobs that ended or that it slows down too much."""
        jobs = [self.state.jobs[name] for name in group.jobs if name in self.state.jobs]
        if not jobs:
            return
        known = self.memory.running.get((group.jobs, group.place))
        if known is not None and len(jobs) == len(group.jobs):
            self._refresh(known)
            if len(jobs) == 1 or known.seconds <= known.limit * (1 + ROUNDING):
                known.settled = True
                known.homes = (group,)
                known.held = self.state.now - group.formed < dwell
                self._add(known, fresh=False)
                return
        out = broken(jobs, group.seconds, self.state.now)
        if not self.lending:
            out = [job for job in jobs if self._too_slow(job, group.seconds, len(jobs))]
        stay = [job for job in jobs if job not in out]
        self.broke += [job.name for job in out]
        if not stay:
            stay = [out[0]]
        whole = len(stay) == len(group.jobs)
        unit = self.unit(stay, group.gpus, group.seconds)
        unit.homes, unit.settled = (group,), whole
        unit.held = whole and self.state.now - group.formed < dwell
        # A group that only lost a job that ended goes on; new jobs will look at it.
        self._add(unit, fresh=not whole)

    def _too_slow(self, job: ActiveJob, seconds: float, count: int) -> bool:
        limit = limit_seconds(job, self.state.now, lending=self.lending)
        return count > 1 and seconds > limit * (1 + ROUNDING)

    def _refresh(self, unit: Unit) -> None:
        """Bring up to date what time changes."""
        jobs = [self.state.jobs[name] for name in unit.jobs]
        unit.left = min(job.steps_left for job in jobs)
        if any(job.request.deadline is not None for job in jobs):
            unit.limit = self._limit(jobs)

    def limit(self, name: str) -> float:
        """The longest step that one job bears, in seconds."""
        return limit_seconds(self.state.jobs[name], self.state.now, lending=self.lending)

    def _limit(self, jobs: Iterable[ActiveJob]) -> float:
        now = self.state.now
        return min(limit_seconds(job, now, lending=self.lending) for job in jobs)

    def alone(self, job: ActiveJob) -> Unit:
        """A job alone, on the GPUs that it asked for."""
        return self.unit([job], job.request.gpus, job.solo_seconds)

    def unit(self, jobs: list[ActiveJob], gpus: int, seconds: float) -> Unit:
        """Some jobs together."""
        return Unit(
            tuple(job.name for job in jobs),
            jobs[0].request.base,
            np.sum([job.request.demand for job in jobs], axis=0, dtype=np.float64),
            sum(job.request.gpus for job in jobs),
            sum(job.solo_seconds for job in jobs),
            sum(job.request.gpus * job.solo_seconds for job in jobs),
            self._limit(jobs),
            min(job.steps_left for job in jobs),
            gpus,
            seconds,
        )


def by_jobs(units: Iterable[Unit]) -> Mapping[str, Unit]:
    """The unit of each job."""
    return {name: unit for unit in units for name in unit.jobs}
