"""Merge groups, best gain first, until no merge gains.

Only pairs with something new in them are looked at. Among very many groups each is compared with
some partners only, spread evenly from the busiest to the idlest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.residual import residuals
from tlora_fx.scheduler.search.objective import Ints, Many, Pricer, Unit

LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that was made, or the best that was not."""

    jobs: tuple[str, ...]
    others: tuple[str, ...]
    gain: float


class Merger:
    """Units of one moment and the gains of merging them."""

    def __init__(self, pricer: Pricer, units: Sequence[Unit], breadth: int) -> None:
        """Begin.

        units     in an order that does not depend on how they came
        breadth   units that are all compared with each other; of more, a quarter as many partners
        """
        self.pricer = pricer
        self.units: list[Unit | None] = list(units)
        self.merges: list[Merge] = []
        n = len(units)
        self._many = pricer.many(units)
        self._gpus = np.array([float(unit.gpus) for unit in units])
        self._worth = np.array([pricer.worth(unit) for unit in units])
        self._lost = np.array([pricer.lost(unit) for unit in units])
        self._left = np.array([unit.left for unit in units])
        self._open = np.array([not unit.held for unit in units])
        self._gain = np.full((n, n), -np.inf)
        self._on = np.zeros((n, n), dtype=np.int32)
        self._took = np.zeros((n, n))
        self._breadth, self._partners = breadth, max(2, breadth // 4)
        self._order = self._by_residual() if n > breadth else np.arange(n)

    def run(self, fresh: NDArray[np.bool_]) -> list[Unit]:
        """Merge while it gains, and hand over what there is then.

        fresh   [n] units to compare with the others
        """
        rows, columns = self._pairs(np.flatnonzero(fresh & self._open))
        self._fill(rows, columns)
        top = self._gain.argmax(axis=1)
        best = self._gain[np.arange(len(top)), top]
        while len(best):
            a = int(best.argmax())
            if best[a] <= LEAST_GAIN:
                break
            a, b = sorted((a, int(top[a])))
            self._merge(a, b)
            stale = (top == a) | (top == b)
            stale[[a, b]] = True
            top[stale] = self._gain[stale].argmax(axis=1)
            best[stale] = self._gain[stale, top[stale]]
            better = self._gain[:, a] > best
            top[better], best[better] = a, self._gain[better, a]
        return [unit for unit in self.units if unit is not None]

    def refused(self) -> list[Merge]:
        """The best merge of each unit that was looked at and not made."""
        found = []
        for row, unit in enumerate(self.units):
            if unit is None or not len(self._gain):
                continue
            column = int(self._gain[row].argmax())
            other = self.units[column]
            if other is not None and np.isfinite(self._gain[row, column]):
                found.append(Merge(unit.jobs, other.jobs, float(self._gain[row, column])))
        return found

    def _merge(self, a: int, b: int) -> None:
        """Put b into a."""
        one, other = self.units[a], self.units[b]
        assert one is not None
        assert other is not None
        self.merges.append(Merge(one.jobs, other.jobs, float(self._gain[a, b])))
        merged = one.with_(other, int(self._on[a, b]), float(self._took[a, b]))
        self.units[a], self.units[b] = merged, None
        many = self._many
        many.demand[a], many.asked[a] = merged.demand, merged.asked
        many.mass[a], many.limit[a], many.single[a] = many.mass[a] + many.mass[b], merged.limit, 0
        self._gpus[a], self._worth[a] = merged.gpus, self.pricer.worth(merged)
        self._lost[a] += self._lost[b]
        self._left[a], self._open[b] = merged.left, False
        for line in (a, b):
            self._gain[line, :] = -np.inf
            self._gain[:, line] = -np.inf
        self._fill(*self._pairs(np.array([a])))

    def _pairs(self, rows: Ints) -> tuple[Ints, Ints]:
        """Each of some units with its partners; every pair once."""
        order = self._order[self._open[self._order]]
        bases = self._many.bases
        firsts, seconds = [], []
        for base in np.unique(bases[rows]):
            partners = order[bases[order] == base]
            if len(bases) > self._breadth:
                few = min(self._partners, len(partners))
                spread = np.linspace(0, len(partners) - 1, few).astype(np.int64)
                partners = partners[spread]
            own = rows[bases[rows] == base]
            firsts.append(np.repeat(own, len(partners)))
            seconds.append(np.tile(partners, len(own)))
        if not firsts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first, second = np.concatenate(firsts), np.concatenate(seconds)
        codes = np.minimum(first, second) * len(bases) + np.maximum(first, second)
        codes = np.unique(codes[first != second])
        return codes // len(bases), codes % len(bases)

    def _fill(self, a: Ints, b: Ints) -> None:
        """Compute the gains of some pairs."""
        if not len(a):
            return
        many = self._many
        both = Many(
            many.bases[a],
            many.demand[a] + many.demand[b],
            many.asked[a] + many.asked[b],
            many.mass[a] + many.mass[b],
            np.minimum(many.limit[a], many.limit[b]),
            np.zeros(len(a), dtype=np.bool_),
        )
        worth, gpus, seconds = self.pricer.best(both, self._choices(a, b, both.asked))
        allowed = np.isfinite(worth)
        steps = np.minimum(self._left[a], self._left[b])
        lasting = np.minimum(self.pricer.window, steps * np.where(allowed, seconds, 1.0))
        cost = (self._lost[a] + self._lost[b]) / np.maximum(lasting, 1e-9)
        gain = np.where(allowed, worth - self._worth[a] - self._worth[b] - cost, -np.inf)
        self._gain[a, b] = self._gain[b, a] = gain
        self._on[a, b] = self._on[b, a] = gpus
        self._took[a, b] = self._took[b, a] = seconds

    def _choices(self, a: Ints, b: Ints, asked: Array) -> Array:
        if not self.pricer.crowded:
            return asked[None]
        widest = np.maximum(self._gpus[a], self._gpus[b])
        return np.stack([widest, np.minimum(self._gpus[a] + self._gpus[b], asked)])

    def _by_residual(self) -> Ints:
        many = self._many
        seconds = np.array([unit.seconds for unit in self.units if unit is not None])
        bases = [self.pricer.bases[index] for index in many.bases]
        left = residuals(self.pricer.state.estimator, bases, many.demand, self._gpus, seconds)
        return np.argsort(left, kind="stable")
