"""What runs stays: the groups of a moment, without jobs that have ended and nodes that are lost.

The policies that never regroup start from here and only fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tlora_fx.cost.demand import Demand
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.placement import Placer
from tlora_fx.scheduler.search.objective import seconds_of
from tlora_fx.scheduler.state import ActiveJob, State
from tlora_fx.scheduler.urgency import arrival


@dataclass(slots=True)
class Seat:
    """A group in the making.

    group   what runs there now, if nothing has changed since
    """

    jobs: list[ActiveJob]
    place: tuple[int, ...]
    formed: float
    group: Group | None = None

    @property
    def base(self) -> str:
        """The base of its jobs."""
        return self.jobs[0].request.base

    def demand(self, *more: ActiveJob) -> Demand:
        """Of its jobs, and some more."""
        return Demand.total(job.request.demand for job in (*self.jobs, *more))


@dataclass(slots=True)
class Standing:
    """The groups that stand, the GPUs that are free, and the jobs that wait, first come first."""

    state: State
    placer: Placer
    seats: list[Seat]
    waiting: list[ActiveJob]
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> Standing:
        """As a moment has them."""
        placer, seats = Placer(state.cluster), []
        held: set[str] = set()
        for group in state.groups:
            jobs = [state.jobs[name] for name in group.jobs if name in state.jobs]
            if not jobs or not group.place or not placer.has(group.place):
                continue
            placer.take(group.place)
            whole = len(jobs) == len(group.jobs)
            seats.append(Seat(jobs, group.place, group.formed, group if whole else None))
            held.update(job.name for job in jobs)
        waiting = [job for name, job in state.jobs.items() if name not in held]
        return cls(state, placer, seats, sorted(waiting, key=arrival))

    def seconds(self, base: str, demand: Demand, gpus: int) -> float:
        """Of a step of a group on so many GPUs; infinite where nothing fits."""
        return seconds_of(self.state, base, demand.row(), gpus)

    def resize(self, seat: Seat, gpus: int) -> bool:
        """Give a group so many GPUs, near those that it has; False leaves it as it is."""
        self.placer.give(seat.place)
        found = self.placer.find(gpus, keep=seat.place)
        if found is None:
            self.placer.take(seat.place)
            return False
        self.placer.take(found)
        if found != seat.place:
            seat.place, seat.group = found, None
        return True

    def seat(self, jobs: Sequence[ActiveJob], gpus: int) -> Seat | None:
        """A new group; None where there is no room."""
        found = self.placer.find(gpus)
        if found is None:
            return None
        self.placer.take(found)
        self.seats.append(Seat(list(jobs), found, self.state.now))
        return self.seats[-1]

    def groups(self) -> tuple[Group, ...]:
        """As a decision has them."""
        return tuple(seat.group or self._group(seat) for seat in self.seats)

    def _group(self, seat: Seat) -> Group:
        gpus = len(seat.place)
        seconds = self.seconds(seat.base, seat.demand(), gpus)
        names = tuple(job.name for job in seat.jobs)
        return Group(names, gpus, seat.place, seconds, self.state.now)


def names_of(jobs: Iterable[ActiveJob]) -> tuple[str, ...]:
    """The names of jobs, in their order."""
    return tuple(job.name for job in jobs)
