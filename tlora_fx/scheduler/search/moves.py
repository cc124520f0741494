"""Move, swap and split off jobs of groups, best gain first, until nothing gains.

For K jobs in U units three tables are kept: what a job's unit is worth without it [K], what each
unit is worth with the job added [K, U], and what a job's unit is worth with another job in its
place [K, K]. A move changes two units, and only their rows and columns are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.gains_merge import LEAST_GAIN
from tlora_fx.scheduler.search.objective import Ints, Many, Pricer, Unit

LEAST = -np.inf


@dataclass(frozen=True, slots=True)
class Move:
    """Something that was done: `job` went to `others`, or `swapped` came for it."""

    job: str
    others: tuple[str, ...]
    swapped: str | None
    gain: float


class Mover:
    """Units of one moment, their jobs, and what moving each would gain."""

    def __init__(self, pricer: Pricer, units: Sequence[Unit], alone: Mapping[str, Unit]) -> None:
        """Begin.

        alone   each job as a unit of its own, on the GPUs that it asked for
        """
        self.pricer = pricer
        self.moves: list[Move] = []
        # An empty unit at the end is where a job goes that is split off.
        self.units: list[Unit | None] = [*units, None]
        self.names = [name for unit in units for name in unit.jobs]
        self._alone = [alone[name] for name in self.names]
        self._jobs = pricer.many(self._alone)
        self._at = np.repeat(np.arange(len(units)), [len(unit.jobs) for unit in units])
        self._gpus = np.array([float(unit.gpus) for unit in self._alone])
        count, rooms = len(self.names), len(self.units)
        self._tables = pricer.many([*units, units[0]])
        self._unit_gpus = np.array([float(unit.gpus) for unit in (*units, units[0])])
        self._worth, self._lost = np.zeros(rooms), np.zeros(rooms)
        self._left, self._open = np.zeros(rooms), np.ones(rooms, dtype=np.bool_)
        self._rest = np.full(count, np.inf)
        self._without = np.full(count, LEAST)
        self._with = np.full((count, rooms), LEAST)
        self._instead = np.full((count, count), LEAST)
        for index in range(rooms):
            self._load(index)
        self._evaluate(list(range(rooms)))

    def run(self, limit: int) -> list[Unit]:
        """Make at most so many moves, and hand over what there is then."""
        for _ in range(limit):
            if not self._step():
                break
        return [unit for unit in self.units if unit is not None]

    def _step(self) -> bool:
        """Make the best move; False where none gains."""
        at, worth = self._at, self._worth
        cost = self._lost / np.maximum(self._lasting(), 1e-9)
        to = self._without[:, None] + self._with - (worth + cost)[at][:, None] - (worth + cost)
        swap = self._instead + self._instead.T
        swap -= (worth + cost)[at][:, None] + (worth + cost)[at][None, :]
        job, room = np.unravel_index(int(to.argmax()), to.shape)
        one, other = np.unravel_index(int(swap.argmax()), swap.shape)
        if max(to[job, room], swap[one, other]) <= LEAST_GAIN:
            return False
        if to[job, room] >= swap[one, other]:
            self._move(int(job), int(room), float(to[job, room]))
        else:
            self._swap(int(one), int(other), float(swap[one, other]))
        return True

    def _lasting(self) -> Array:
        """Seconds for which a gain of each unit lasts."""
        return np.minimum(self.pricer.window, self._left)

    def _move(self, job: int, room: int, gain: float) -> None:
        source, target = int(self._at[job]), self.units[room]
        others = target.jobs if target is not None else ()
        self.moves.append(Move(self.names[job], others, None, gain))
        self._at[job] = room
        if room == len(self.units) - 1:
            self._grow()
        self._rebuild([source, room])

    def _swap(self, one: int, other: int, gain: float) -> None:
        here, there = int(self._at[one]), int(self._at[other])
        target = self.units[there]
        assert target is not None
        self.moves.append(Move(self.names[one], target.jobs, self.names[other], gain))
        self._at[one], self._at[other] = there, here
        self._rebuild([here, there])

    def _grow(self) -> None:
        """Another empty unit at the end."""
        self.units.append(None)
        tables = self._tables
        for name in ("bases", "demand", "asked", "mass", "limit", "single"):
            old = getattr(tables, name)
            setattr(tables, name, np.concatenate([old, old[-1:]]))
        self._unit_gpus = np.append(self._unit_gpus, 0.0)
        self._worth, self._lost = np.append(self._worth, 0.0), np.append(self._lost, 0.0)
        self._left, self._open = np.append(self._left, 0.0), np.append(self._open, True)
        more = np.full((len(self.names), 1), LEAST)
        self._with = np.concatenate([self._with, more], axis=1)

    def _rebuild(self, rooms: list[int]) -> None:
        """Make some units anew from the jobs that are in them now."""
        for room in rooms:
            inside = np.flatnonzero(self._at == room)
            before = self.units[room]
            if not len(inside):
                self.units[room] = None
                continue
            unit = replace(self._alone[inside[0]])
            for index in inside[1:]:
                unit = unit.with_(self._alone[index], 1, 1.0)
            unit.homes = before.homes if before is not None else ()
            gpus = self._choice(before, unit.asked)
            many = self.pricer.many([unit])
            _, chosen, seconds = self.pricer.best(many, gpus[:, None])
            unit.gpus, unit.seconds = int(chosen[0]), float(seconds[0])
            self.units[room] = unit
        last = len(self.units) - 1
        for room in {*rooms, last}:
            self._load(room)
        self._evaluate(sorted({*rooms, last}))

    def _choice(self, before: Unit | None, asked: int) -> Array:
        """GPUs that a changed unit may have, ascending."""
        if not self.pricer.crowded or before is None:
            return np.array([float(asked)])
        kept = min(before.gpus, asked)
        return np.unique(np.array([max(1, kept // 2), kept, min(asked, kept + 1)], dtype=float))

    def _load(self, room: int) -> None:
        """Put a unit's sums into the tables."""
        unit = self.units[room]
        tables = self._tables
        if unit is None:
            tables.demand[room], tables.asked[room], tables.mass[room] = 0.0, 0.0, 0.0
            tables.limit[room], self._unit_gpus[room] = np.inf, 0.0
            self._worth[room], self._lost[room], self._left[room] = 0.0, 0.0, np.inf
            self._open[room] = room == len(self.units) - 1
            return
        tables.bases[room] = self.pricer.bases.index(unit.base)
        tables.demand[room], tables.asked[room] = unit.demand, unit.asked
        tables.mass[room], tables.limit[room] = self.pricer.mass(unit), unit.limit
        self._unit_gpus[room], self._worth[room] = unit.gpus, self.pricer.worth(unit)
        self._lost[room], self._left[room] = self.pricer.lost(unit), unit.left * unit.seconds
        self._open[room] = not unit.held

    def _evaluate(self, rooms: list[int]) -> None:
        """Compute again what some units take part in."""
        at, open_ = self._at, self._open
        changed = np.zeros(len(self.units), dtype=np.bool_)
        changed[rooms] = True
        own = np.flatnonzero(changed[at] & open_[at])
        self._rest = self._limits_without(rooms)
        stuck = ~open_[at]
        self._without[stuck] = LEAST
        self._instead[stuck] = LEAST
        self._without[own] = self._of(own, None, at[own])
        everyone = np.flatnonzero(open_[at])
        empty = len(self.units) - 1
        for room in rooms:
            self._with[:, room] = LEAST
            if not open_[room]:
                continue
            fits = everyone if room == empty else everyone[self._same_base(everyone, room)]
            fits = fits[at[fits] != room]
            self._with[fits, room] = self._of(None, fits, np.full(len(fits), room))
        first = np.repeat(own, len(everyone))
        second = np.tile(everyone, len(own))
        apart = (at[first] != at[second]) & (self._jobs.bases[first] == self._jobs.bases[second])
        self._instead[own] = LEAST
        first, second = first[apart], second[apart]
        self._instead[first, second] = self._of(first, second, at[first])

    def _same_base(self, jobs: Ints, room: int) -> Array:
        return np.asarray(self._jobs.bases[jobs] == self._tables.bases[room])

    def _of(self, out: Ints | None, into: Ints | None, rooms: Ints) -> Array:
        """What units are worth with some jobs taken out and some put in."""
        if not len(rooms):
            return np.zeros(0)
        tables, jobs = self._tables, self._jobs
        demand, asked = tables.demand[rooms].copy(), tables.asked[rooms].copy()
        mass, limit = tables.mass[rooms].copy(), tables.limit[rooms].copy()
        bases, gpus = tables.bases[rooms], self._unit_gpus[rooms].copy()
        if out is not None:
            demand, asked = demand - jobs.demand[out], asked - jobs.asked[out]
            mass, limit = mass - jobs.mass[out], self._rest[out]
        if into is not None:
            demand, asked = demand + jobs.demand[into], asked + jobs.asked[into]
            mass, limit = mass + jobs.mass[into], np.minimum(limit, jobs.limit[into])
            bases = jobs.bases[into]
        # Differences of sums: an emptied unit has none left, whatever rounding says.
        empty = asked <= 0.5
        count = np.rint(demand[:, 0])
        many = Many(bases, demand, asked, mass, limit, count == 1)
        worth = np.zeros(len(rooms))
        full = np.flatnonzero(~empty)
        if len(full):
            part = Many(
                bases[full], demand[full], asked[full], mass[full], limit[full], many.single[full]
            )
            choices = self._choices(
                gpus[full], asked[full], swap=out is not None and into is not None
            )
            worth[full] = self.pricer.best(part, choices)[0]
        return worth

    def _choices(self, gpus: Array, asked: Array, *, swap: bool) -> Array:
        if not self.pricer.crowded:
            return asked[None]
        kept = np.minimum(np.where(gpus > 0, gpus, asked), asked)
        if swap:
            return kept[None]
        half = np.maximum(1.0, np.floor(kept / 2))
        return np.stack([half, kept, np.minimum(kept + 1, asked)])

    def _limits_without(self, rooms: list[int]) -> Array:
        """For each job, the least limit among the others of its unit; of these units anew."""
        limits = self._rest
        for room in rooms:
            inside = np.flatnonzero(self._at == room)
            if not len(inside):
                continue
            own = self._jobs.limit[inside]
            ranked = np.argsort(own, kind="stable")
            limits[inside] = own[ranked[0]]
            limits[inside[ranked[0]]] = own[ranked[1]] if len(inside) > 1 else np.inf
        return limits
