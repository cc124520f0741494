"""Place groups on GPUs: what runs keeps its own, then those that wait, the most pressed first.

A group that fits into a node stands in one node, one that fits into a rack in one rack. Places are
chosen so that what is free stays whole: the fullest node with enough free GPUs, then the fullest
rack. The same questions in the same order get the same places.

A unit that is pressed and does not fit has nodes set aside for it; others start there only if
they end before it could begin. So wide jobs are not overtaken for ever (EASY backfill, by node).

GPUs that are free after that go to single jobs of units that wait whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.search.objective import (
    CandidateCollector,
    CandidateGroup,
    GroupValuation,
    powers,
    seconds_of,
    tier_for,
    widest_rack,
)
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    Group,
    SchedulerState,
    Urgency,
    pressed_first,
    urgency,
)

#: Units that wait, up to which a lone job takes fewer GPUs than are best for it.
SHORT_QUEUE = 8


class Placer:
    """The free GPUs of a cluster, by node; lost nodes have none."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._free: dict[int, set[int]] = {}
        self._barred: frozenset[int] = frozenset()
        size = cluster.gpus_per_node
        for node in range(cluster.nodes):
            if node not in cluster.lost:
                last = min(cluster.gpus, (node + 1) * size)
                self._free[node] = set(range(node * size, last))
        self._widest = widest_rack(cluster)
        self._count = sum(self.free_by_node().values())

    @property
    def free(self) -> int:
        """Number of free GPUs."""
        return self._count

    def free_by_node(self) -> dict[int, int]:
        """Number of free GPUs of each node that is there."""
        return {node: len(gpus) for node, gpus in self._free.items()}

    def has(self, place: Iterable[int]) -> bool:
        """Whether all of these GPUs are free."""
        per_node = self.cluster.gpus_per_node
        return all(gpu in self._free.get(gpu // per_node, ()) for gpu in place)

    def take(self, place: Sequence[int]) -> None:
        """Take free GPUs."""
        per_node = self.cluster.gpus_per_node
        for gpu in place:
            self._free[gpu // per_node].remove(gpu)
        self._count -= len(place)

    def give(self, place: Sequence[int]) -> None:
        """Give GPUs back; those of lost nodes are gone."""
        per_node = self.cluster.gpus_per_node
        for gpu in place:
            if gpu // per_node in self._free:
                self._free[gpu // per_node].add(gpu)
                self._count += 1

    @contextmanager
    def without(self, nodes: Iterable[int]) -> Iterator[None]:
        """Inside, `find` leaves some nodes alone."""
        before, self._barred = self._barred, self._barred | frozenset(nodes)
        try:
            yield
        finally:
            self._barred = before

    def find(self, count: int, keep: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Free GPUs for a group; None where there is no such place now.

        keep    free GPUs that it would rather have, as where it runs already
        """
        if count > self._count:
            return None
        # What a group is promised is what it takes in the smallest unit that could hold it.
        near = self.cluster.tier(keep) == tier_for(self.cluster, count)
        if len(keep) == count and near and not self._barred and self.has(keep):
            return tuple(keep)
        nodes = self._nodes_for(count, keep)
        if nodes is None:
            return None
        wanted = set(keep)
        gpu_ids: list[int] = []
        for node in nodes:
            free = sorted(self._free[node], key=lambda gpu: (gpu not in wanted, gpu))
            gpu_ids += free[: count - len(gpu_ids)]
            if len(gpu_ids) == count:
                return tuple(sorted(gpu_ids))
        return None

    def _nodes_for(self, count: int, keep: Sequence[int]) -> list[int] | None:
        """The nodes to take GPUs from, in order."""
        free_gpus = {node: len(gpus) for node, gpus in self._free.items() if gpus}
        for node in self._barred:
            free_gpus.pop(node, None)
        size = self.cluster.gpus_per_node
        held = dict.fromkeys(free_gpus, 0)
        for gpu in keep:
            if gpu // size in held:
                held[gpu // size] += 1
        if count <= size:
            return _tightest(free_gpus, held, count)
        racks: dict[int, list[int]] = {}
        for node in free_gpus:
            racks.setdefault(node // self.cluster.nodes_per_rack, []).append(node)
        if count <= self._widest:
            free_in_racks = {
                rack: sum(free_gpus[node] for node in nodes) for rack, nodes in racks.items()
            }
            held_in_racks = {
                rack: sum(held[node] for node in nodes) for rack, nodes in racks.items()
            }
            best = _tightest(free_in_racks, held_in_racks, count)
            return None if best is None else _fullest(racks[best[0]], free_gpus, held)
        return _fullest(list(free_gpus), free_gpus, held)


def _tightest(free_gpus: dict[int, int], held: dict[int, int], count: int) -> list[int] | None:
    """Of the units with enough free GPUs, the one with most of the group, then the least free."""
    fits = [unit for unit, free in free_gpus.items() if free >= count]
    if not fits:
        return None
    return [min(fits, key=lambda unit: (-held[unit], free_gpus[unit], unit))]


def _fullest(nodes: list[int], free_gpus: dict[int, int], held: dict[int, int]) -> list[int]:
    """Nodes with most of the group first, then those with most free GPUs: the group spans few."""
    return sorted(nodes, key=lambda node: (-held[node], -free_gpus[node], node))


@dataclass(slots=True)
class Placement:
    """Placement of all units.

    waiting    units without a place, in the order in which they are taken
    """

    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    running: list[CandidateGroup] = field(default_factory=list)
    waiting: list[CandidateGroup] = field(default_factory=list)
    reserved: frozenset[int] = frozenset()

    def groups(self, now: float) -> tuple[Group, ...]:
        """Groups of the units that run, in their order; an unchanged group is the same object."""
        groups = []
        for unit in self.running:
            place = self.places[id(unit)]
            new = Group(unit.jobs, len(place), place, unit.seconds, now)
            groups.append(unit.current_groups[0] if unit.settled else new)
        return tuple(groups)


def arrange(
    state: SchedulerState,
    collector: CandidateCollector,
    units: Sequence[CandidateGroup],
    *,
    reserve: bool,
    valuation: GroupValuation | None = None,
    backfill: bool = True,
) -> Placement:
    """Find places: what runs first, then what waits, the most pressed first.

    valuation    values single jobs, which start where their unit does not fit; None: none starts
    backfill     False: behind a unit that does not fit all others wait
    """
    arrangement = Arrangement(state)
    waiting = [unit for unit in units if not unit.current_groups]
    for unit in arrangement.settle([unit for unit in units if unit.current_groups]):
        waiting += _undo(state, collector, arrangement, unit)
    keys = {
        id(unit): min(pressed_first(state.jobs[name], state.now) for name in unit.jobs)
        for unit in waiting
    }
    waiting.sort(key=lambda unit: keys[id(unit)])
    arrangement.start(waiting, reserve=reserve, backfill=backfill)
    if valuation is not None:
        arrangement.start_apart(collector, valuation)
    return arrangement.placed


def _undo(
    state: SchedulerState,
    collector: CandidateCollector,
    arrangement: Arrangement,
    unit: CandidateGroup,
) -> list[CandidateGroup]:
    """Leave what runs where it is; the others wait."""
    left = set(unit.jobs)
    for home in unit.current_groups:
        jobs = [state.jobs[name] for name in home.jobs if name in left]
        left -= set(home.jobs)
        if not jobs:
            arrangement.placer.give(home.place)
            continue
        unit_at_home, out = _at_home(state, collector, jobs, home)
        left |= out
        arrangement.stay(unit_at_home, home.place)
    jobs = [state.jobs[name] for name in unit.jobs if name in left]
    return [collector.alone(job) for job in jobs]


def _at_home(
    state: SchedulerState, collector: CandidateCollector, jobs: list[ActiveJob], home: Group
) -> tuple[CandidateGroup, set[str]]:
    """What is left of a group on its GPUs, and the jobs that cannot stay with it."""
    unit = collector.unit(jobs, home.gpus, home.seconds)
    unit.current_groups, unit.settled = (home,), len(jobs) == len(home.jobs)
    out: set[str] = set()
    while not unit.settled:
        stay = [job for job in jobs if job.name not in out]
        unit = collector.unit(stay, home.gpus, home.seconds)
        unit.current_groups, unit.gpus = (home,), min(home.gpus, unit.asked)
        unit.seconds = seconds_of(state, unit.base, unit.demand, unit.gpus)
        if len(stay) == 1 or unit.seconds <= unit.limit * (1 + ROUNDING):
            break
        out.add(min((collector.limit(job.name), job.name) for job in stay)[1])
    return unit, out


class Arrangement:
    """Places for the units of one round."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.placer = Placer(state.cluster)
        self.placed = Placement()

    def settle(self, units: Sequence[CandidateGroup]) -> list[CandidateGroup]:
        """Units that run or have a home get their places; those that find none are returned."""
        moving = []
        for unit in units:
            for home in unit.current_groups:
                self.placer.take(home.place)
            if unit.settled:
                self.put(unit, unit.current_groups[0].place)
            else:
                moving.append(unit)
        homeless = []
        for unit in sorted(moving, key=lambda unit: (unit.gpus, unit.jobs)):
            old = [gpu for home in unit.current_groups for gpu in home.place]
            self.placer.give(old)
            place = self.placer.find(unit.gpus, keep=old)
            if place is None:
                self.placer.take(old)
                homeless.append(unit)
            else:
                self.placer.take(place)
                self.put(unit, place)
        return homeless

    def start(
        self, units: Iterable[CandidateGroup], *, reserve: bool, backfill: bool = True
    ) -> None:
        """Units that wait get places, in order; `reserve` sets nodes aside for a pressed one."""
        now, ready = self.state.now, 0.0
        for unit in units:
            reserved = self.placed.reserved
            if self.placed.waiting and not backfill:
                self.placed.waiting.append(unit)
                continue
            ends_late = bool(reserved) and now + self._lasts(unit) > ready
            with self.placer.without(reserved if ends_late else ()):
                place = self.placer.find(unit.gpus)
            if place is not None:
                self.placer.take(place)
                self.put(unit, place)
                continue
            jobs = (self.state.jobs[name] for name in unit.jobs)
            if reserve and not reserved and any(urgency(j, now) is Urgency.VIOLATING for j in jobs):
                self.placed.reserved, ready = self._reservation(unit.gpus)
            self.placed.waiting.append(unit)

    def start_apart(self, collector: CandidateCollector, valuation: GroupValuation) -> None:
        """Start jobs alone whose unit waits, on GPUs that nobody else takes.

        Where few wait a lone job may start on fewer GPUs too. Behind a long queue that would hold
        GPUs which the queue's units make more of.
        """
        waiting, self.placed.waiting = self.placed.waiting, []
        least = 1 if len(waiting) <= SHORT_QUEUE else 2
        for unit in waiting:
            names = unit.jobs if self.placer.free and len(unit.jobs) >= least else ()
            started = {name for name in names if self._starts(collector, valuation, name)}
            rest = [self.state.jobs[name] for name in unit.jobs if name not in started]
            if not started:
                self.placed.waiting.append(unit)
            elif rest:
                self.placed.waiting += self._together(collector, valuation, rest)

    def _together(
        self, collector: CandidateCollector, valuation: GroupValuation, jobs: list[ActiveJob]
    ) -> list[CandidateGroup]:
        """Jobs that wait as one unit, or each by itself where no number of GPUs serves them all."""
        unit = collector.unit(jobs, 1, 1.0)
        many = valuation.many([unit])
        worth, gpus, seconds = valuation.best(many, powers(many.asked))
        if not np.isfinite(worth[0]):
            return [collector.alone(job) for job in jobs]
        unit.gpus, unit.seconds = int(gpus[0]), float(seconds[0])
        return [unit]

    def _starts(self, collector: CandidateCollector, valuation: GroupValuation, name: str) -> bool:
        """Whether a job finds a place by itself, on the GPUs that are best for it or on fewer."""
        unit = collector.alone(self.state.jobs[name])
        many = valuation.many([unit])
        worth, gpus, seconds = valuation.table(many, powers(many.asked))
        for choice in np.argsort(-worth[:, 0], kind="stable"):
            # Where GPUs have a price, one that a lone job would not pay is left to shared groups.
            if worth[choice, 0] < -ROUNDING:
                return False
            with self.placer.without(self.placed.reserved):
                place = self.placer.find(int(gpus[choice, 0]))
            if place is not None:
                unit.gpus, unit.seconds = int(gpus[choice, 0]), float(seconds[choice, 0])
                self.placer.take(place)
                self.put(unit, place)
                return True
        return False

    def stay(self, unit: CandidateGroup, home: tuple[int, ...]) -> None:
        """A unit runs on GPUs that it holds; on fewer of them only as near as it was promised."""
        if unit.gpus == len(home):
            self.put(unit, home)
            return
        self.placer.give(home)
        place = self.placer.find(unit.gpus, keep=home)
        if place is None:
            place = home[: unit.gpus]
            tier = self.state.cluster.tier(place)
            unit.seconds = seconds_of(self.state, unit.base, unit.demand, unit.gpus, tier)
        self.placer.take(place)
        self.put(unit, place)

    def put(self, unit: CandidateGroup, place: tuple[int, ...]) -> None:
        """Place a unit on GPUs, where it runs."""
        self.placed.places[id(unit)] = place
        self.placed.running.append(unit)

    def _lasts(self, unit: CandidateGroup) -> float:
        """Seconds until the last of a unit's jobs is done."""
        jobs = self.state.jobs
        steps = max(jobs[name].steps_left for name in unit.jobs)
        return self.state.switch_seconds + steps * unit.seconds

    def _reservation(self, count: int) -> tuple[frozenset[int], float]:
        """The nodes that have so many free GPUs soonest, and when they do."""
        cluster = self.state.cluster
        ends: dict[int, list[float]] = {
            node: [self.state.now] * free for node, free in self.placer.free_by_node().items()
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
            nodes = [n for n in ready if not within or n // cluster.nodes_per_rack == rack]
            soonest = _soonest({node: ready[node] for node in nodes}, count)
            if soonest is not None and (best is None or soonest[0] < best[0]):
                best = soonest
        return (frozenset(best[1]), best[0]) if best else (frozenset(), self.state.now)


def _soonest(ready: dict[int, list[float]], count: int) -> tuple[float, list[int]] | None:
    """Whole nodes, soonest free first, until there are so many GPUs."""
    nodes: list[int] = []
    have = 0
    for when, node in sorted((times[-1], node) for node, times in ready.items()):
        nodes.append(node)
        have += len(ready[node])
        if have >= count:
            return when, nodes
    return None
