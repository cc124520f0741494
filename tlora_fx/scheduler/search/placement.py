"""Find GPUs for units: what runs keeps its place, then those that wait, the most pressed first.

A unit that is pressed and finds no room has nodes set aside for it; others start there only if
they end before it could begin. So wide jobs are not overtaken for ever (EASY backfill, by node).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tlora_fx.scheduler.placement import Placer
from tlora_fx.scheduler.search.objective import CandidateCollector, CandidateGroup, seconds_of
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    Group,
    SchedulerState,
    Urgency,
    pressed_first,
    urgency,
)


@dataclass(slots=True)
class Placed:
    """Where everything stands.

    places     of each unit that runs
    waiting    units without a place, in the order in which they are taken
    reserved   nodes that were set aside for the first of these
    """

    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    running: list[CandidateGroup] = field(default_factory=list)
    waiting: list[CandidateGroup] = field(default_factory=list)
    reserved: frozenset[int] = frozenset()

    def groups(self, now: float) -> tuple[Group, ...]:
        """Of the units that run, in their order; what did not change is what it was."""
        found = []
        for unit in self.running:
            place = self.places[id(unit)]
            new = Group(unit.jobs, len(place), place, unit.seconds, now)
            found.append(unit.homes[0] if unit.settled else new)
        return tuple(found)


def arrange(
    state: SchedulerState,
    gathering: CandidateCollector,
    units: Sequence[CandidateGroup],
    *,
    reserve: bool,
) -> Placed:
    """Find places: what runs first, then what waits, the most pressed first.

    reserve   set nodes aside for a pressed unit that finds no room
    """
    arranging = Arranging(state)
    waiting = [unit for unit in units if not unit.homes]
    for unit in arranging.settle([unit for unit in units if unit.homes]):
        waiting += _undo(state, gathering, arranging, unit)
    keys = {
        id(unit): min(pressed_first(state.jobs[name], state.now) for name in unit.jobs)
        for unit in waiting
    }
    waiting.sort(key=lambda unit: keys[id(unit)])
    arranging.start(waiting, lambda unit: _pressed(state, unit), reserve=reserve)
    return arranging.placed


def _undo(
    state: SchedulerState, gathering: CandidateCollector, arranging: Arranging, unit: CandidateGroup
) -> list[CandidateGroup]:
    """Leave what runs where it is; the others wait."""
    left = set(unit.jobs)
    for home in unit.homes:
        jobs = [state.jobs[name] for name in home.jobs if name in left]
        left -= set(home.jobs)
        if not jobs:
            arranging.placer.give(home.place)
            continue
        one, out = _at_home(state, gathering, jobs, home)
        left |= out
        arranging.placer.give(home.place[one.gpus :])
        arranging.put(one, home.place[: one.gpus])
    jobs = [state.jobs[name] for name in unit.jobs if name in left]
    return [gathering.alone(job) for job in jobs]


def _at_home(
    state: SchedulerState, gathering: CandidateCollector, jobs: list[ActiveJob], home: Group
) -> tuple[CandidateGroup, set[str]]:
    """What is left of a group on its GPUs, and the jobs that cannot stay with it."""
    one = gathering.unit(jobs, home.gpus, home.seconds)
    one.homes, one.settled = (home,), len(jobs) == len(home.jobs)
    out: set[str] = set()
    while not one.settled:
        stay = [job for job in jobs if job.name not in out]
        one = gathering.unit(stay, home.gpus, home.seconds)
        one.homes, one.gpus = (home,), min(home.gpus, one.asked)
        one.seconds = seconds_of(state, one.base, one.demand, one.gpus)
        if len(stay) == 1 or one.seconds <= one.limit * (1 + ROUNDING):
            break
        out.add(min((gathering.limit(job.name), job.name) for job in stay)[1])
    return one, out


def _pressed(state: SchedulerState, unit: CandidateGroup) -> bool:
    jobs = (state.jobs[name] for name in unit.jobs)
    return any(urgency(job, state.now) is Urgency.VIOLATING for job in jobs)


class Arranging:
    """Places for the units of one round."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.placer = Placer(state.cluster)
        self.placed = Placed()

    def settle(self, units: Sequence[CandidateGroup]) -> list[CandidateGroup]:
        """Units that run or have a home get their places; those that find none are returned."""
        moving = []
        for unit in units:
            for home in unit.homes:
                self.placer.take(home.place)
            if unit.settled:
                self.put(unit, unit.homes[0].place)
            else:
                moving.append(unit)
        homeless = []
        for unit in sorted(moving, key=lambda unit: (unit.gpus, unit.jobs)):
            old = [gpu for home in unit.homes for gpu in home.place]
            self.placer.give(old)
            found = self.placer.find(unit.gpus, keep=old)
            if found is None:
                self.placer.take(old)
                homeless.append(unit)
            else:
                self.placer.take(found)
                self.put(unit, found)
        return homeless

    def start(
        self,
        units: Iterable[CandidateGroup],
        pressed: Callable[[CandidateGroup], bool],
        *,
        reserve: bool,
    ) -> None:
        """Units that wait get places, in their order.

        pressed   whether nodes are set aside for a unit that finds no room
        """
        now, ready = self.state.now, 0.0
        for unit in units:
            reserved = self.placed.reserved
            found = None
            if reserved and now + self._lasts(unit) > ready:
                with self.placer.without(reserved):
                    found = self.placer.find(unit.gpus)
            else:
                found = self.placer.find(unit.gpus)
            if found is not None:
                self.placer.take(found)
                self.put(unit, found)
                continue
            if reserve and not reserved and pressed(unit):
                self.placed.reserved, ready = self._reservation(unit.gpus)
            self.placed.waiting.append(unit)

    def put(self, unit: CandidateGroup, place: tuple[int, ...]) -> None:
        """A unit runs there."""
        self.placed.places[id(unit)] = place
        self.placed.running.append(unit)

    def _lasts(self, unit: CandidateGroup) -> float:
        """Seconds until the last of a unit's jobs is done."""
        jobs = self.state.jobs
        steps = max(jobs[name].steps_left for name in unit.jobs)
        return self.state.switch_seconds + steps * unit.seconds

    def _reservation(self, count: int) -> tuple[frozenset[int], float]:
        """The nodes that have room for so many GPUs soonest, and when they do."""
        cluster = self.state.cluster
        ends: dict[int, list[float]] = {
            node: [self.state.now] * self.placer.free_in(node) for node in self.placer.nodes
        }
        for unit in self.placed.running:
            end = self.state.now + self._lasts(unit)
            for gpu in self.placed.places[id(unit)]:
                ends[cluster.node(gpu)].append(end)
        ready = {node: sorted(times) for node, times in ends.items() if times}
        size = cluster.gpus_per_node
        if count <= size:
            fits = [
                (times[count - 1], node) for node, times in ready.items() if len(times) >= count
            ]
            when, node = min(fits, default=(self.state.now, -1))
            return frozenset({node} if fits else ()), when
        best: tuple[float, list[int]] | None = None
        within = count <= size * cluster.nodes_per_rack
        racks = {node // cluster.nodes_per_rack if within else 0 for node in ready}
        for rack in sorted(racks):
            own = [n for n in ready if not within or n // cluster.nodes_per_rack == rack]
            found = _soonest({node: ready[node] for node in own}, count)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return (frozenset(best[1]), best[0]) if best else (frozenset(), self.state.now)


def _soonest(ready: dict[int, list[float]], count: int) -> tuple[float, list[int]] | None:
    """Whole nodes, soonest free first, until there are so many GPUs."""
    found: list[int] = []
    have = 0
    for when, node in sorted((times[-1], node) for node, times in ready.items()):
        found.append(node)
        have += len(ready[node])
        if have >= count:
            return when, found
    return None
