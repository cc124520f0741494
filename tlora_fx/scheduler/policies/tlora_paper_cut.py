"""The binary cut of Algorithm 1: how long a suffix of a sorted queue a seed should merge with."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import numpy as np

from tlora_fx.scheduler.bounds import ROUNDING
from tlora_fx.scheduler.gains_merge import LEAST_GAIN
from tlora_fx.scheduler.search.objective import Pricer, Unit
from tlora_fx.scheduler.state import Reason

MOST_KNOWN = 200_000


class Cutter:
    """Evaluates suffixes, at most so many in a round, and remembers them."""

    def __init__(self, pricer: Pricer, budget: int, known: dict[int, float]) -> None:
        """Begin a round.

        budget   groups that may be evaluated
        known    seconds of groups by the keys of their jobs; kept from round to round
        """
        self.pricer = pricer
        self.budget = budget
        self.evaluations = 0
        self.reasons: list[Reason] = []
        self._known = known
        self._keys = {name: hash(job.request) for name, job in pricer.state.jobs.items()}
        if len(known) > MOST_KNOWN:
            known.clear()

    def cut(self, seed: Unit, queue: Sequence[Unit]) -> int:
        """How many of the last of a queue of one base the seed should merge with; 0 is none."""
        suffixes = _Suffixes(self, seed, queue)
        low, high = 0, len(queue)
        while low < high:
            middle = (low + high) // 2
            if suffixes.gain(middle + 1) > suffixes.gain(middle) + LEAST_GAIN:
                low = middle + 1
            else:
                high = middle
        gain = suffixes.gain(low)
        self._tell(seed, queue, low, gain)
        return low if gain > LEAST_GAIN else 0

    def merged(self, seed: Unit, others: Sequence[Unit]) -> Unit:
        """One unit of several, on all GPUs that their jobs asked for."""
        found = seed
        for other in others:
            found = found.with_(other, found.asked + other.asked, 0.0)
        found.gpus = found.asked
        found.seconds = self.seconds(self.key(found), found)
        return found

    def key(self, unit: Unit) -> int:
        """A number that stands for a set of jobs."""
        found = 0
        for name in unit.jobs:
            found ^= self._keys[name]
        return found

    def seconds(self, key: int, unit: Unit) -> float:
        """Of a group's step on all its jobs' GPUs; infinite once the budget is spent."""
        if key in self._known:
            return self._known[key]
        if self.evaluations >= self.budget or unit.asked > self.pricer.capacity:
            return inf
        self.evaluations += 1
        index = np.array([self.pricer.bases.index(unit.base)])
        gpus = np.array([float(unit.asked)])
        found = float(self.pricer.seconds(index, unit.demand[None], gpus)[0])
        self._known[key] = found
        return found

    def _tell(self, seed: Unit, queue: Sequence[Unit], taken: int, gain: float) -> None:
        others = tuple(name for unit in queue[len(queue) - taken :] for name in unit.jobs)
        verdict = "merged" if taken and gain > LEAST_GAIN else "kept apart"
        if verdict == "kept apart":
            others = tuple(name for unit in queue for name in unit.jobs)
        kept = gain if taken and isfinite(gain) else None
        self.reasons += [Reason(name, verdict, others, kept) for name in seed.jobs]


class _Suffixes:
    """The gains of merging one seed with suffixes of one queue."""

    def __init__(self, cutter: Cutter, seed: Unit, queue: Sequence[Unit]) -> None:
        self._cutter = cutter
        self._queue = queue
        self._total = [seed]
        self._keys = [cutter.key(seed)]
        self._parts = [cutter.pricer.worth(seed)]
        self._gains: dict[int, float] = {0: 0.0}

    def gain(self, count: int) -> float:
        """Of merging with the last `count`; -inf where a bound or memory forbids it."""
        if count not in self._gains:
            self._gains[count] = self._compute(count)
        return self._gains[count]

    def _compute(self, count: int) -> float:
        cutter, pricer = self._cutter, self._cutter.pricer
        while len(self._total) <= count:
            other = self._queue[len(self._queue) - len(self._total)]
            last = self._total[-1]
            self._total.append(last.with_(other, last.asked + other.asked, 0.0))
            self._keys.append(self._keys[-1] ^ cutter.key(other))
            self._parts.append(self._parts[-1] + pricer.worth(other))
        unit = self._total[count]
        seconds = cutter.seconds(self._keys[count], unit)
        if not isfinite(seconds) or seconds > unit.limit * (1 + ROUNDING):
            return -inf
        return pricer.mass(unit) / seconds - self._parts[count]
