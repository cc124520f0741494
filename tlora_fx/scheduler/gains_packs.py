"""Merge several groups at once, best gain first.

A job with many GPUs and a tight bound can often take on a slow one only together with others like
itself: no pair of them gains, and all together gain most. Looked at are all pairs, triples with two
of the idlest units (the hosts), and for every bound the idlest or widest hosts that bear it, three
to five of them, with each other unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.gains_merge import LEAST_GAIN
from tlora_fx.scheduler.search.objective import Ints, Many, Pricer, Unit

#: Units in one merge at most.
WIDTH = 6


class Packer:
    """Units of one moment, and what merging two to six of them gains."""

    def __init__(self, pricer: Pricer, units: Sequence[Unit], hosts: int, *, shared: bool) -> None:
        """Begin.

        hosts    how many of the idlest units count as hosts
        shared   a gain counts for each of its merges by a part
        """
        self.pricer = pricer
        self.units: list[Unit] = list(units)
        self._shared = shared
        self._alive = np.ones(len(units), dtype=np.bool_)
        self._many = pricer.many(units)
        self._worth = np.array([pricer.worth(unit) for unit in units])
        self._gpus = np.array([float(unit.gpus) for unit in units])
        idle = np.argsort(self._many.demand[:, 2] / self._many.asked, kind="stable")
        self._hosts = np.zeros(len(units), dtype=np.bool_)
        self._hosts[idle[:hosts]] = True
        self._idle = idle
        self._sets = np.zeros((0, WIDTH), dtype=np.int64)
        self._gain = self._on = self._took = np.zeros(0)
        self._passing = np.zeros(0, dtype=np.bool_)

    def run(self) -> list[Unit]:
        """Merge while it gains, and hand over what there is then."""
        self._add(np.flatnonzero(self._alive))
        while len(self._gain):
            best = int(self._gain.argmax())
            if self._gain[best] <= LEAST_GAIN:
                break
            self._merge(best)
        return [unit for unit, alive in zip(self.units, self._alive, strict=True) if alive]

    def _merge(self, best: int) -> None:
        a, *gone = (int(index) for index in self._sets[best] if index >= 0)
        unit = self.units[a]
        for index in gone:
            unit = unit.with_(self.units[index], 1, 1.0)
        unit.gpus, unit.seconds = int(self._on[best]), float(self._took[best])
        self.units[a], many = unit, self._many
        many.demand[a], many.asked[a], many.limit[a] = unit.demand, unit.asked, unit.limit
        many.mass[a], self._gpus[a] = self.pricer.mass(unit), unit.gpus
        self._worth[a] = self.pricer.worth(unit)
        self._hosts[a] = self._hosts[a] or bool(self._hosts[gone].any())
        self._alive[gone] = False
        self._keep(~np.isin(self._sets, [a, *gone]).any(axis=1) & ~self._passing)
        self._add(np.array([a]))

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self._sets, self._gain, self._on = self._sets[rows], self._gain[rows], self._on[rows]
        self._took, self._passing = self._took[rows], self._passing[rows]

    def _add(self, fresh: Ints) -> None:
        """Evaluate pairs and triples with something fresh in them."""
        alive = np.flatnonzero(self._alive)
        sets = [_pairs(fresh, alive)]
        hosts = alive[self._hosts[alive]]
        two = _pairs(hosts, hosts)
        for pairs, others in ((two, fresh), (_pairs(fresh[self._hosts[fresh]], hosts), alive)):
            triples = np.column_stack(
                [np.repeat(pairs[:, :2], len(others), axis=0), np.tile(others, len(pairs))]
            )
            sets.append(_padded(_sorted(triples)))
        found = np.unique(np.concatenate(sets), axis=0)
        self._fill(found[self._fit(found)], passing=False)
        if len(alive) > 3:
            found = self._carriers(alive)
            self._fill(found[self._fit(found)], passing=True)

    def _fit(self, sets: Ints) -> NDArray[np.bool_]:
        """Whether the members of each set are distinct and of one base."""
        repeated = (sets[:, 1:] == sets[:, :-1]) & (sets[:, 1:] >= 0)
        bases = np.where(sets >= 0, self._many.bases[sets], self._many.bases[sets[:, :1]])
        return np.asarray(~repeated.any(axis=1) & (bases == bases[:, :1]).all(axis=1))

    def _carriers(self, alive: Ints) -> Ints:
        """For every bound the idlest and the widest hosts that bear it, with each other unit."""
        limit, bases = self._many.limit, self._many.bases
        hosts = self._idle[self._alive[self._idle] & self._hosts[self._idle]]
        widest = hosts[np.argsort(-self._many.asked[hosts], kind="stable")]
        found = []
        for least in hosts:
            for order in (hosts, widest):
                bear = order[(limit[order] >= limit[least]) & (bases[order] == bases[least])]
                for count in range(3, min(WIDTH, len(bear) + 1)):
                    rows = np.tile(bear[:count], (len(alive), 1))
                    found.append(_padded(_sorted(np.column_stack([rows, alive]))))
        if not found:
            return np.zeros((0, WIDTH), dtype=np.int64)
        return np.unique(np.concatenate(found), axis=0)

    def _fill(self, sets: Ints, *, passing: bool) -> None:
        if not len(sets):
            return
        many, own = self._many, sets >= 0
        total = Many(
            many.bases[sets[:, 0]],
            np.where(own[:, :, None], many.demand[sets], 0.0).sum(axis=1),
            np.where(own, many.asked[sets], 0.0).sum(axis=1),
            np.where(own, many.mass[sets], 0.0).sum(axis=1),
            np.where(own, many.limit[sets], np.inf).min(axis=1),
            np.zeros(len(sets), dtype=np.bool_),
        )
        worth, gpus, seconds = self.pricer.best(total, self._choices(sets, own, total.asked))
        gain = worth - np.where(own, self._worth[sets], 0.0).sum(axis=1)
        self._sets = np.concatenate([self._sets, sets])
        merges = own.sum(axis=1) - 1
        self._gain = np.append(self._gain, gain / merges if self._shared else gain)
        self._passing = np.append(self._passing, np.full(len(sets), passing))
        self._on, self._took = np.append(self._on, gpus), np.append(self._took, seconds)

    def _choices(self, sets: Ints, own: NDArray[np.bool_], asked: Array) -> Array:
        if not self.pricer.crowded:
            return asked[None]
        gpus = np.where(own, self._gpus[sets], 0.0)
        return np.stack([gpus.max(axis=1), np.minimum(gpus.sum(axis=1), asked)])


def _pairs(one: Ints, other: Ints) -> Ints:
    """All pairs as sorted rows [n, WIDTH]."""
    first, second = np.repeat(one, len(other)), np.tile(other, len(one))
    apart = first != second
    first, second = first[apart], second[apart]
    return _padded(np.column_stack([np.minimum(first, second), np.maximum(first, second)]))


def _sorted(sets: Ints) -> Ints:
    return np.sort(sets, axis=1)


def _padded(sets: Ints) -> Ints:
    """Rows of WIDTH, filled up with -1."""
    wide = np.full((len(sets), WIDTH), -1, dtype=np.int64)
    wide[:, : sets.shape[1]] = sets
    return wide
