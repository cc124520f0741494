"""What groups are worth, and what merging two of them gains.

Where there is room for all, a group is worth its weighted speed-up, sum of T_solo over T, on the
GPUs that its jobs asked for together (or its samples a second, where that is the objective).

Where there is not, GPUs have a price. A group is then worth the GPU-seconds of lone training that
it does in a second, less the price of the GPUs it holds; the price is what a GPU does now, on
average. Raising it from round to round is Dinkelbach's method for the largest ratio of work to
GPUs, so groups share as few GPUs as their bounds allow, and jobs that wait can start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.bounds import ROUNDING
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.placement import tier_for
from tlora_fx.scheduler.state import State

Objective = Literal["weighted", "throughput"]
OBJECTIVES = ("weighted", "throughput")
Ints = NDArray[np.int64]
SAMPLES = 1
#: Step times that are kept, and the most groups of one call that are looked up.
MOST_KNOWN, MOST_LOOKED_UP = 150_000, 2048


@dataclass(slots=True, eq=False)
class Unit:
    """Jobs that run as one group, or would, with the sums that its worth needs.

    demand     [12] sum over its jobs
    asked      GPUs that its jobs asked for together
    solo       sum of T_solo, seconds
    gpu_solo   sum of GPUs times T_solo, GPU-seconds
    limit      the longest step that all its jobs bear, seconds
    left       fewest steps left of a job
    gpus       that it holds, or would
    seconds    of one step on them
    homes      what of it runs now, whole groups, first the one whose place it rather has
    settled    it is its home, nothing changed: re-forming it costs a switch
    held       nothing may join it or take from it now
    """

    jobs: tuple[str, ...]
    base: str
    demand: Array
    asked: int
    solo: float
    gpu_solo: float
    limit: float
    left: float
    gpus: int
    seconds: float
    homes: tuple[Group, ...] = ()
    settled: bool = False
    held: bool = False

    def with_(self, other: Unit, gpus: int, seconds: float) -> Unit:
        """Both together, on so many GPUs."""
        return Unit(
            self.jobs + other.jobs,
            self.base,
            self.demand + other.demand,
            self.asked + other.asked,
            self.solo + other.solo,
            self.gpu_solo + other.gpu_solo,
            min(self.limit, other.limit),
            min(self.left, other.left),
            gpus,
            seconds,
            tuple(sorted(self.homes + other.homes, key=lambda home: (-home.gpus, home.place))),
        )


@dataclass(slots=True)
class Many:
    """n candidate groups, as arrays.

    bases    [n] index into `Pricer.bases`
    demand   [n, 12]
    asked    [n] most GPUs that each may hold
    mass     [n] what its seconds divide
    limit    [n] the longest step that it may have, in seconds
    single   [n] one job alone, which no bound keeps from the GPUs that it asked for
    """

    bases: Ints
    demand: Array
    asked: Array
    mass: Array
    limit: Array
    single: NDArray[np.bool_]


@dataclass(slots=True)
class Known:
    """Step times that were asked for before: jobs of few kinds make the same sums again."""

    _times: dict[bytes, float] = field(default_factory=dict)
    _of: tuple[int, Cluster | None] = (0, None)

    def begin(self, state: State) -> None:
        """Forget what another estimator said, or of other places."""
        of = (id(state.estimator), state.cluster)
        if self._of != of or len(self._times) > MOST_KNOWN:
            self._times.clear()
            self._of = of

    def seconds(self, pricer: Pricer, base: str, demand: Array, gpus: Array) -> Array:
        """Of n groups of one base; only what is new is asked for."""
        rows = np.column_stack([demand, gpus])
        text, width, times = rows.tobytes(), rows.itemsize * rows.shape[1], self._times
        name = base.encode()
        keys = [name + text[at : at + width] for at in range(0, len(text), width)]
        found = [times.get(key, -1.0) for key in keys]
        missing = [place for place, value in enumerate(found) if value < 0]
        if missing:
            new = pricer.ask(base, demand[missing], gpus[missing]).tolist()
            for place, value in zip(missing, new, strict=True):
                found[place] = times[keys[place]] = value
        return np.array(found)


@dataclass(slots=True)
class Pricer:
    """What groups are worth in one moment.

    crowded   jobs ask for more GPUs than there are
    price     of a GPU, in the worth of a second; 0 where not crowded
    window    seconds that a gain lasts at most
    known     step times of earlier rounds
    """

    state: State
    objective: Objective = "weighted"
    crowded: bool = False
    price: float = 0.0
    window: float = 60.0
    known: Known | None = None
    bases: list[str] = field(default_factory=list)
    capacity: int = 0
    _tiers: NDArray[np.object_] = field(init=False)

    def __post_init__(self) -> None:
        self.capacity = self.state.cluster.capacity()
        names = sorted({job.request.base for job in self.state.jobs.values()})
        self.bases = names
        self._tiers = _tiers_of(self.state.cluster)
        if self.known is not None:
            self.known.begin(self.state)

    def mass(self, unit: Unit) -> float:
        """What a unit does in one step."""
        if self.objective == "throughput":
            return float(unit.demand[SAMPLES])
        return unit.gpu_solo if self.crowded else unit.solo

    def worth(self, unit: Unit) -> float:
        """Of a unit as it is."""
        return self.mass(unit) / unit.seconds - self.price * unit.gpus

    def lost(self, unit: Unit) -> float:
        """What re-forming it costs: worth of the time without progress."""
        if not unit.settled:
            return 0.0
        return self.state.switch_seconds * self.mass(unit) / unit.seconds

    def many(self, units: Sequence[Unit]) -> Many:
        """Units as arrays."""
        index = {base: place for place, base in enumerate(self.bases)}
        return Many(
            np.array([index[unit.base] for unit in units], dtype=np.int64),
            np.stack([unit.demand for unit in units]),
            np.array([unit.asked for unit in units], dtype=np.float64),
            np.array([self.mass(unit) for unit in units]),
            np.array([unit.limit for unit in units]),
            np.array([len(unit.jobs) == 1 for unit in units]),
        )

    def seconds(self, bases: Ints, demand: Array, gpus: Array) -> Array:
        """Of one step of n groups on so many GPUs each, at most as many as there are."""
        found = np.empty(len(gpus))
        for index in np.unique(bases):
            own = np.flatnonzero(bases == index)
            name = self.bases[index]
            if self.known is not None and len(own) <= MOST_LOOKED_UP:
                found[own] = self.known.seconds(self, name, demand[own], gpus[own])
            else:
                found[own] = self.ask(name, demand[own], gpus[own])
        return found

    def ask(self, base: str, demand: Array, gpus: Array) -> Array:
        """The estimator."""
        tiers = self._tiers[gpus.astype(np.int64)].tolist()
        return self.state.estimator.seconds(base, demand, gpus, tiers)

    def best(self, many: Many, choices: Array) -> tuple[Array, Array, Array]:
        """The best number of GPUs of each of n groups: worth [n], GPUs [n], seconds [n].

        choices   [m, n] GPUs to try; 0 is none. Worth is -inf where no choice is allowed
        """
        worth, gpus, seconds = self.table(many, choices)
        # Ties go to fewer GPUs: choices ascend.
        chosen = np.argmax(worth, axis=0), np.arange(choices.shape[1])
        return worth[chosen], gpus[chosen], seconds[chosen]

    def table(self, many: Many, choices: Array) -> tuple[Array, Array, Array]:
        """The same of every choice [m, n]."""
        gpus = np.minimum(choices, many.asked)
        allowed = (gpus > 0) & (gpus <= self.capacity)
        if len(gpus) > 1:
            allowed[:-1] &= gpus[:-1] != gpus[1:]
        seconds = np.full(gpus.shape, np.inf)
        if allowed.any():
            row = np.nonzero(allowed)[1]
            seconds[allowed] = self.seconds(many.bases[row], many.demand[row], gpus[allowed])
        free = many.single & (gpus == many.asked)
        fits = np.isfinite(seconds) & ((seconds <= many.limit * (1 + ROUNDING)) | free)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(fits, many.mass / seconds - self.price * gpus, -np.inf)
        return worth, gpus, seconds


@lru_cache(maxsize=8)
def _tiers_of(cluster: Cluster) -> NDArray[np.object_]:
    """The tier of every number of GPUs."""
    tiers = [tier_for(cluster, count) for count in range(cluster.capacity() + 1)]
    return np.array(tiers, dtype=object)


def powers(asked: Array) -> Array:
    """GPUs to try for each of n groups, ascending: powers of two below, then what it asked for."""
    most = int(asked.max()) if len(asked) else 1
    steps = [float(1 << power) for power in range(most.bit_length())]
    rows = [np.where(step < asked, step, 0.0) for step in steps]
    return np.stack([*rows, asked])


def seconds_of(state: State, base: str, demand: Array, gpus: int) -> float:
    """Of a step of one group on so many GPUs; infinite where nothing fits.

    demand   [12]
    """
    tiers = [tier_for(state.cluster, gpus)]
    found = state.estimator.seconds(base, demand[None], np.array([float(gpus)]), tiers)
    return float(found[0])
