"""Cut a sorted row of units into the best segments.

Merging pairs sees only the next step; a bound is broken by the fastest job of a group, so jobs of
like bounds belong together. Sorted by their bound, or by what they leave idle, the best cut into
neighbours is found exactly: every segment is evaluated at once, and a short dynamic program picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.search.objective import Ints, Many, Pricer, Unit, powers

Key = Callable[[Unit], float]


def by_limit(unit: Unit) -> float:
    """The step that it bears."""
    return unit.limit


def by_load(unit: Unit) -> float:
    """Step seconds that it bears, for each token on one of its GPUs."""
    return float(unit.demand[2]) / unit.asked


KEYS: tuple[Key, ...] = (by_limit, by_load)


def segmented(pricer: Pricer, units: Sequence[Unit], key: Key, longest: int) -> list[Unit]:
    """The best cut of units, sorted by a key within each base.

    longest   units in one segment at most
    """
    rows: dict[str, list[Unit]] = {}
    for unit in units:
        rows.setdefault(unit.base, []).append(unit)
    found: list[Unit] = []
    for _, row in sorted(rows.items()):
        found += _cut(pricer, sorted(row, key=key), longest)
    return found


def _cut(pricer: Pricer, row: list[Unit], longest: int) -> list[Unit]:
    """The best segments of one row."""
    count = len(row)
    first, last = np.triu_indices(count)
    short = last - first < longest
    first, last = first[short], last[short]
    worth, gpus, seconds = _evaluate(pricer, row, first, last)
    ends = zip(first.tolist(), last.tolist(), strict=True)
    table = {pair: place for place, pair in enumerate(ends)}
    best, cut = [0.0], [0]
    for j in range(count):
        options = range(max(0, j - longest + 1), j + 1)
        value, start = max((best[i] + worth[table[i, j]], -i) for i in options)
        best.append(value)
        cut.append(-start)
    found: list[Unit] = []
    end = count
    while end:
        start = cut[end]
        place = table[start, end - 1]
        unit = row[start]
        if end - start > 1:
            for other in row[start + 1 : end]:
                unit = unit.with_(other, 1, 1.0)
            unit.gpus, unit.seconds = int(gpus[place]), float(seconds[place])
        found.append(unit)
        end = start
    return found[::-1]


def _evaluate(
    pricer: Pricer, row: list[Unit], first: Ints, last: Ints
) -> tuple[Array, Array, Array]:
    """What each segment is worth, on which GPUs, and its seconds."""
    many = pricer.many(row)
    limit = np.minimum.accumulate(np.where(np.tri(len(row), dtype=bool).T, many.limit, np.inf), 1)
    segments = Many(
        np.full(len(first), many.bases[0]),
        _sums(many.demand)[last + 1] - _sums(many.demand)[first],
        _sums(many.asked)[last + 1] - _sums(many.asked)[first],
        _sums(many.mass)[last + 1] - _sums(many.mass)[first],
        limit[first, last],
        np.zeros(len(first), dtype=np.bool_),
    )
    choices = powers(segments.asked) if pricer.crowded else segments.asked[None]
    worth, gpus, seconds = pricer.best(segments, choices)
    alone = first == last
    worth[alone] = [pricer.worth(unit) for unit in row]
    lost = np.array([pricer.lost(unit) for unit in row])
    left = np.array([unit.left for unit in row])
    fewest = np.minimum.accumulate(np.where(np.tri(len(row), dtype=bool).T, left, np.inf), 1)
    lasting = np.minimum(pricer.window, fewest[first, last] * np.where(alone, 1.0, seconds))
    cost = (_sums(lost)[last + 1] - _sums(lost)[first]) / np.maximum(lasting, 1e-9)
    held = np.array([float(unit.held) for unit in row])
    barred = (_sums(held)[last + 1] - _sums(held)[first] > 0) & ~alone
    worth = np.where(alone, worth, worth - cost)
    return np.where(barred, -np.inf, worth), gpus, seconds


def _sums(rows: Array) -> Array:
    return np.concatenate([np.zeros_like(rows[:1]), np.cumsum(rows, axis=0)])
