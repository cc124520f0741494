"""Ways to group units: merge the pair that gains most, merge several at once, cut a sorted row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.load import Array
from tlora_fx.scheduler.search.objective import (
    CandidateBatch,
    CandidateGroup,
    GroupValuation,
    Ints,
    powers,
    residuals,
)

MIN_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that was made, or the best that was not."""

    jobs: tuple[str, ...]
    others: tuple[str, ...]
    gain: float


class Merger:
    """Units of one moment and the gains of merging them.

    Only pairs with something new in them are looked at. Among very many groups each is compared
    with some partners only, spread evenly from the busiest to the idlest.

    breadth   units that are all compared with each other; of more, a quarter as many partners
    """

    def __init__(
        self, valuation: GroupValuation, units: Sequence[CandidateGroup], breadth: int
    ) -> None:
        self.valuation = valuation
        self.units: list[CandidateGroup | None] = list(units)
        self.merges: list[Merge] = []
        n = len(units)
        self._many = valuation.many(units)
        self._gpus = np.array([float(unit.gpus) for unit in units])
        self._worth = np.array([valuation.worth(unit) for unit in units])
        self._lost = np.array([valuation.reforming_cost(unit) for unit in units])
        self._changed = np.array([valuation.change_cost(unit) for unit in units])
        self._moved = np.array([valuation.move_cost(unit) for unit in units])
        self._runs = np.array([unit.settled for unit in units])
        self._left = np.array([unit.left for unit in units])
        self._open = np.array([not unit.held for unit in units])
        self._gain = np.full((n, n), -np.inf)
        self._on = np.zeros((n, n), dtype=np.int32)
        self._took = np.zeros((n, n))
        self._breadth, self._partners = breadth, max(2, breadth // 4)
        self._order = self._by_residual() if n > breadth else np.arange(n)

    def run(self, fresh: NDArray[np.bool_]) -> list[CandidateGroup]:
        """Merge while it gains, units that are `fresh` [n] with the others; what there is then."""
        rows, columns = self._pairs(np.flatnonzero(fresh & self._open))
        self._fill(rows, columns)
        top = self._gain.argmax(axis=1)
        best = self._gain[np.arange(len(top)), top]
        while len(best):
            a = int(best.argmax())
            if best[a] <= MIN_GAIN:
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
        refused = []
        for row, unit in enumerate(self.units):
            if unit is None or not len(self._gain):
                continue
            column = int(self._gain[row].argmax())
            other = self.units[column]
            if other is not None and np.isfinite(self._gain[row, column]):
                refused.append(Merge(unit.jobs, other.jobs, float(self._gain[row, column])))
        return refused

    def _merge(self, a: int, b: int) -> None:
        """Put b into a."""
        unit, other = self.units[a], self.units[b]
        assert unit is not None
        assert other is not None
        self.merges.append(Merge(unit.jobs, other.jobs, float(self._gain[a, b])))
        merged = unit.with_(other, int(self._on[a, b]), float(self._took[a, b]))
        self.units[a], self.units[b] = merged, None
        many = self._many
        many.demand[a], many.asked[a] = merged.demand, merged.asked
        many.step_work[a], many.limit[a], many.single[a] = (
            many.step_work[a] + many.step_work[b],
            merged.limit,
            0,
        )
        self._gpus[a], self._worth[a] = merged.gpus, self.valuation.worth(merged)
        for costs in (self._lost, self._changed, self._moved):
            costs[a] += costs[b]
        self._runs[a] |= self._runs[b]
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
            rows_of_base = rows[bases[rows] == base]
            firsts.append(np.repeat(rows_of_base, len(partners)))
            seconds.append(np.tile(partners, len(rows_of_base)))
        if not firsts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first, second = np.concatenate(firsts), np.concatenate(seconds)
        codes = np.minimum(first, second) * len(bases) + np.maximum(first, second)
        codes = np.unique(codes[first != second])
        return codes // len(bases), codes % len(bases)

    def _fill(self, a: Ints, b: Ints) -> None:
        if not len(a):
            return
        many = self._many
        both = CandidateBatch(
            many.bases[a],
            many.demand[a] + many.demand[b],
            many.asked[a] + many.asked[b],
            many.step_work[a] + many.step_work[b],
            np.minimum(many.limit[a], many.limit[b]),
            np.zeros(len(a), dtype=np.bool_),
        )
        worth, gpus, seconds = self._by_choice(both, self._choices(a, b, both.asked))
        allowed = np.isfinite(worth)
        steps = np.minimum(self._left[a], self._left[b])
        lasting = np.minimum(self.valuation.window, steps * np.where(allowed, seconds, 1.0))
        cost = self._cost(a, b, gpus) / np.maximum(lasting, 1e-9)
        gain = np.where(allowed, worth - self._worth[a] - self._worth[b] - cost, -np.inf)
        # Ties go to fewer GPUs: choices ascend.
        chosen = np.argmax(gain, axis=0), np.arange(len(a))
        self._gain[a, b] = self._gain[b, a] = gain[chosen]
        self._on[a, b] = self._on[b, a] = gpus[chosen]
        self._took[a, b] = self._took[b, a] = seconds[chosen]

    def _by_choice(self, both: CandidateBatch, choices: Array) -> tuple[Array, Array, Array]:
        """Worth, GPUs and seconds [m, n]; where GPUs change nothing of the cost, of the best."""
        if self.valuation.state.changes is not None:
            return self.valuation.table(both, choices)
        worth, gpus, seconds = self.valuation.best(both, choices)
        return worth[None], gpus[None], seconds[None]

    def _cost(self, a: Ints, b: Ints, gpus: Array) -> Array:
        """What merging costs those that run: where one of them keeps its GPUs, it only changes."""
        formed: Array = self._lost[a] + self._lost[b]
        if self.valuation.state.changes is None:
            return formed
        keeps = (self._runs[a] & (gpus == self._gpus[a])) | (
            self._runs[b] & (gpus == self._gpus[b])
        )
        moved = np.minimum(self._moved[a], self._moved[b])
        cost: Array = np.where(keeps, self._changed[a] + self._changed[b] + moved, formed)
        return cost

    def _choices(self, a: Ints, b: Ints, asked: Array) -> Array:
        widest = np.maximum(self._gpus[a], self._gpus[b])
        if not self.valuation.crowded:
            elastic = self.valuation.state.changes is not None
            return np.stack([np.minimum(widest, asked), asked]) if elastic else asked[None]
        return np.stack([widest, np.minimum(self._gpus[a] + self._gpus[b], asked)])

    def _by_residual(self) -> Ints:
        many = self._many
        seconds = np.array([unit.seconds for unit in self.units if unit is not None])
        bases = [self.valuation.bases[index] for index in many.bases]
        left = residuals(self.valuation.state.estimator, bases, many.demand, self._gpus, seconds)
        return np.argsort(left, kind="stable")


#: Units in one merge at most.
WIDTH = 6


class UnitPacker:
    """Units of one moment, and what merging two to six of them gains.

    A job with many GPUs and a tight bound can often take on a slow one only together with others
    like itself: no pair of them gains, and all together gain most. Looked at are all pairs, triples
    with two of the idlest units (the hosts), and for every bound the idlest or widest hosts that
    bear it, three to five of them, with each other unit.

    shared   a gain counts for each of its merges by a part
    """

    def __init__(
        self,
        valuation: GroupValuation,
        units: Sequence[CandidateGroup],
        hosts: int,
        *,
        shared: bool,
    ) -> None:
        self.valuation = valuation
        self.units: list[CandidateGroup] = list(units)
        self._shared = shared
        self._alive = np.ones(len(units), dtype=np.bool_)
        self._many = valuation.many(units)
        self._worth = np.array([valuation.worth(unit) for unit in units])
        self._gpus = np.array([float(unit.gpus) for unit in units])
        idle = np.argsort(self._many.demand[:, 2] / self._many.asked, kind="stable")
        self._hosts = np.zeros(len(units), dtype=np.bool_)
        self._hosts[idle[:hosts]] = True
        self._idle = idle
        self._sets = np.zeros((0, WIDTH), dtype=np.int64)
        self._gain = self._on = self._took = np.zeros(0)
        self._passing = np.zeros(0, dtype=np.bool_)

    def run(self) -> list[CandidateGroup]:
        """Merge while it gains, and hand over what there is then."""
        self._add(np.flatnonzero(self._alive))
        while len(self._gain):
            best = int(self._gain.argmax())
            if self._gain[best] <= MIN_GAIN:
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
        many.step_work[a], self._gpus[a] = self.valuation.step_work(unit), unit.gpus
        self._worth[a] = self.valuation.worth(unit)
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
        candidates = np.unique(np.concatenate(sets), axis=0)
        self._fill(candidates[self._fit(candidates)], passing=False)
        if len(alive) > 3:
            candidates = self._carriers(alive)
            self._fill(candidates[self._fit(candidates)], passing=True)

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
        sets = []
        for least in hosts:
            for order in (hosts, widest):
                bear = order[(limit[order] >= limit[least]) & (bases[order] == bases[least])]
                for count in range(3, min(WIDTH, len(bear) + 1)):
                    rows = np.tile(bear[:count], (len(alive), 1))
                    sets.append(_padded(_sorted(np.column_stack([rows, alive]))))
        if not sets:
            return np.zeros((0, WIDTH), dtype=np.int64)
        return np.unique(np.concatenate(sets), axis=0)

    def _fill(self, sets: Ints, *, passing: bool) -> None:
        if not len(sets):
            return
        many, member = self._many, sets >= 0
        total = CandidateBatch(
            many.bases[sets[:, 0]],
            np.where(member[:, :, None], many.demand[sets], 0.0).sum(axis=1),
            np.where(member, many.asked[sets], 0.0).sum(axis=1),
            np.where(member, many.step_work[sets], 0.0).sum(axis=1),
            np.where(member, many.limit[sets], np.inf).min(axis=1),
            np.zeros(len(sets), dtype=np.bool_),
        )
        worth, gpus, seconds = self.valuation.best(total, self._choices(sets, member, total.asked))
        gain = worth - np.where(member, self._worth[sets], 0.0).sum(axis=1)
        self._sets = np.concatenate([self._sets, sets])
        merges = member.sum(axis=1) - 1
        self._gain = np.append(self._gain, gain / merges if self._shared else gain)
        self._passing = np.append(self._passing, np.full(len(sets), passing))
        self._on, self._took = np.append(self._on, gpus), np.append(self._took, seconds)

    def _choices(self, sets: Ints, member: NDArray[np.bool_], asked: Array) -> Array:
        if not self.valuation.crowded:
            return asked[None]
        gpus = np.where(member, self._gpus[sets], 0.0)
        return np.stack([gpus.max(axis=1), np.minimum(gpus.sum(axis=1), asked)])


def _pairs(left: Ints, right: Ints) -> Ints:
    """All pairs as sorted rows [n, WIDTH]."""
    first, second = np.repeat(left, len(right)), np.tile(right, len(left))
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


Key = Callable[[CandidateGroup], float]


#: The step that a unit bears, and the same over its tokens on one of its GPUs.
KEYS: tuple[Key, ...] = (
    lambda unit: unit.limit,
    lambda unit: float(unit.demand[2]) / unit.asked,
)


def segmented(
    valuation: GroupValuation, units: Sequence[CandidateGroup], key: Key, longest: int
) -> list[CandidateGroup]:
    """The best cut of units, sorted by a key within each base.

    Merging pairs sees only the next step; a bound is broken by the fastest job of a group, so jobs
    of like bounds belong together. Sorted by their bound, or by what they leave idle, the best cut
    into neighbours is found exactly: every segment is evaluated at once, and a short dynamic
    program picks.

    longest   units in one segment at most
    """
    rows: dict[str, list[CandidateGroup]] = {}
    for unit in units:
        rows.setdefault(unit.base, []).append(unit)
    segments: list[CandidateGroup] = []
    for _, row in sorted(rows.items()):
        segments += _cut(valuation, sorted(row, key=key), longest)
    return segments


def _cut(
    valuation: GroupValuation, row: list[CandidateGroup], longest: int
) -> list[CandidateGroup]:
    count = len(row)
    first, last = np.triu_indices(count)
    short = last - first < longest
    first, last = first[short], last[short]
    worth, gpus, seconds = _evaluate(valuation, row, first, last)
    ends = zip(first.tolist(), last.tolist(), strict=True)
    table = {pair: index for index, pair in enumerate(ends)}
    best, cut = [0.0], [0]
    for j in range(count):
        options = range(max(0, j - longest + 1), j + 1)
        value, start = max((best[i] + worth[table[i, j]], -i) for i in options)
        best.append(value)
        cut.append(-start)
    segments: list[CandidateGroup] = []
    end = count
    while end:
        start = cut[end]
        index = table[start, end - 1]
        unit = row[start]
        if end - start > 1:
            for other in row[start + 1 : end]:
                unit = unit.with_(other, 1, 1.0)
            unit.gpus, unit.seconds = int(gpus[index]), float(seconds[index])
        segments.append(unit)
        end = start
    return segments[::-1]


def _evaluate(
    valuation: GroupValuation, row: list[CandidateGroup], first: Ints, last: Ints
) -> tuple[Array, Array, Array]:
    """What each segment is worth, on which GPUs, and its seconds."""
    many = valuation.many(row)
    limit = np.minimum.accumulate(np.where(np.tri(len(row), dtype=bool).T, many.limit, np.inf), 1)
    segments = CandidateBatch(
        np.full(len(first), many.bases[0]),
        _sums(many.demand)[last + 1] - _sums(many.demand)[first],
        _sums(many.asked)[last + 1] - _sums(many.asked)[first],
        _sums(many.step_work)[last + 1] - _sums(many.step_work)[first],
        limit[first, last],
        np.zeros(len(first), dtype=np.bool_),
    )
    choices = powers(segments.asked) if valuation.crowded else segments.asked[None]
    worth, gpus, seconds = valuation.best(segments, choices)
    alone = first == last
    worth[alone] = [valuation.worth(unit) for unit in row]
    lost = np.array([valuation.reforming_cost(unit) for unit in row])
    left = np.array([unit.left for unit in row])
    fewest = np.minimum.accumulate(np.where(np.tri(len(row), dtype=bool).T, left, np.inf), 1)
    lasting = np.minimum(valuation.window, fewest[first, last] * np.where(alone, 1.0, seconds))
    cost = (_sums(lost)[last + 1] - _sums(lost)[first]) / np.maximum(lasting, 1e-9)
    held = np.array([float(unit.held) for unit in row])
    barred = (_sums(held)[last + 1] - _sums(held)[first] > 0) & ~alone
    worth = np.where(alone, worth, worth - cost)
    return np.where(barred, -np.inf, worth), gpus, seconds


def _sums(rows: Array) -> Array:
    return np.concatenate([np.zeros_like(rows[:1]), np.cumsum(rows, axis=0)])
