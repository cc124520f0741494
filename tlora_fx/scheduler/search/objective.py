"""Worth of groups, and the gain of merging two of them.

Where there are GPUs for all, a group is worth its weighted speed-up, sum of T_solo over T, on the
GPUs that its jobs asked for together (or its samples a second, where that is the objective).

Where there is not, GPUs have a price. A group is then worth the GPU-seconds of lone training that
it does in a second, less the price of the GPUs it holds; the price is what a GPU does now, on
average. Raising it from round to round is Dinkelbach's method for the largest ratio of work to
GPUs, so groups share as few GPUs as their bounds allow, and jobs that wait can start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.estimator import Estimator
from tlora_fx.cost.hardware import Cluster, Tier
from tlora_fx.cost.load import Array
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    Group,
    SchedulerState,
    arrival,
    broken,
    limit_seconds,
)

Objective = Literal["weighted", "throughput"]
OBJECTIVES = ("weighted", "throughput")
Ints = NDArray[np.int64]
SAMPLES = 1
#: Step times that are kept, and the most groups of one call that are looked up.
MAX_KNOWN, MAX_LOOKED_UP = 150_000, 2048


@dataclass(slots=True, eq=False)
class CandidateGroup:
    """Jobs that run as one group, or would, with the sums that its worth needs.

    demand           [15] sum over its jobs
    asked            GPUs that its jobs asked for together
    solo             sum of T_solo, seconds
    gpu_solo         sum of GPUs times T_solo, GPU-seconds
    limit            the longest step that all its jobs bear, seconds
    left             fewest steps left of a job
    current_groups   running groups whose jobs it holds, whole ones, first the one whose GPUs it
                     would rather keep
    settled          it is its only current group, unchanged: re-forming it costs a switch
    held             nothing may join it or be taken from it now
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
    current_groups: tuple[Group, ...] = ()
    settled: bool = False
    held: bool = False

    def with_(self, other: CandidateGroup, gpus: int, seconds: float) -> CandidateGroup:
        """Union with another group, on so many GPUs."""
        return CandidateGroup(
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
            tuple(
                sorted(
                    self.current_groups + other.current_groups,
                    key=lambda home: (-home.gpus, home.place),
                )
            ),
        )


@dataclass(slots=True)
class CandidateBatch:
    """n candidate groups, as arrays.

    bases       [n] index into `GroupValuation.bases`
    demand      [n, 15]
    asked       [n] most GPUs that each may hold
    step_work   [n] work of one step; its worth a second is this over its seconds
    limit       [n] the longest step that it may have, in seconds
    single      [n] one job alone, which no bound keeps from the GPUs that it asked for
    """

    bases: Ints
    demand: Array
    asked: Array
    step_work: Array
    limit: Array
    single: NDArray[np.bool_]


@dataclass(slots=True)
class StepTimeCache:
    """Step times that were asked for before: jobs of few kinds make the same sums again."""

    _times: dict[bytes, float] = field(default_factory=dict)
    _of: tuple[int, Cluster | None] = (0, None)

    def begin(self, state: SchedulerState) -> None:
        """Forget what another estimator said, or of other places."""
        of = (id(state.estimator), state.cluster)
        if self._of != of or len(self._times) > MAX_KNOWN:
            self._times.clear()
            self._of = of

    def seconds(self, valuation: GroupValuation, base: str, demand: Array, gpus: Array) -> Array:
        """Seconds of a step of n groups of one base; only what is new is asked for."""
        rows = np.column_stack([demand, gpus])
        text, width, times = rows.tobytes(), rows.itemsize * rows.shape[1], self._times
        name = base.encode()
        keys = [name + text[at : at + width] for at in range(0, len(text), width)]
        seconds = [times.get(key, -1.0) for key in keys]
        missing = [index for index, value in enumerate(seconds) if value < 0]
        if missing:
            new = valuation.ask(base, demand[missing], gpus[missing]).tolist()
            for index, value in zip(missing, new, strict=True):
                seconds[index] = times[keys[index]] = value
        return np.array(seconds)


@dataclass(slots=True)
class GroupValuation:
    """Values of groups at one moment.

    crowded   jobs ask for more GPUs than there are
    price     price of a GPU, in worth a second; 0 where not crowded
    window    seconds that a gain lasts at most
    """

    state: SchedulerState
    objective: Objective = "weighted"
    crowded: bool = False
    price: float = 0.0
    window: float = 60.0
    known: StepTimeCache | None = None
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

    def step_work(self, unit: CandidateGroup) -> float:
        """Work of a group in one step."""
        if self.objective == "throughput":
            return float(unit.demand[SAMPLES])
        return unit.gpu_solo if self.crowded else unit.solo

    def worth(self, unit: CandidateGroup) -> float:
        """Value of a group on its GPUs."""
        return self.step_work(unit) / unit.seconds - self.price * unit.gpus

    def reforming_cost(self, unit: CandidateGroup) -> float:
        """Cost of re-forming a group: worth of the time without progress."""
        return self._worth_of(self.state.switch_seconds, unit)

    def change_cost(self, unit: CandidateGroup) -> float:
        """Cost of jobs that join a group or leave it, where it keeps its GPUs."""
        return self._worth_of(self.state.change_seconds, unit)

    def move_cost(self, unit: CandidateGroup) -> float:
        """Additional cost of moving all jobs of a group to another group that runs."""
        changes = self.state.changes
        return self._worth_of(changes.move if changes else 0.0, unit)

    def _worth_of(self, seconds: float, unit: CandidateGroup) -> float:
        return seconds * self.step_work(unit) / unit.seconds if unit.settled else 0.0

    def many(self, units: Sequence[CandidateGroup]) -> CandidateBatch:
        """Units as arrays."""
        index = {base: number for number, base in enumerate(self.bases)}
        return CandidateBatch(
            np.array([index[unit.base] for unit in units], dtype=np.int64),
            np.stack([unit.demand for unit in units]),
            np.array([unit.asked for unit in units], dtype=np.float64),
            np.array([self.step_work(unit) for unit in units]),
            np.array([unit.limit for unit in units]),
            np.array([len(unit.jobs) == 1 for unit in units]),
        )

    def seconds(self, bases: Ints, demand: Array, gpus: Array) -> Array:
        """Seconds of one step of n groups on so many GPUs each, at most as many as there are."""
        seconds = np.empty(len(gpus))
        for index in np.unique(bases):
            rows = np.flatnonzero(bases == index)
            name = self.bases[index]
            if self.known is not None and len(rows) <= MAX_LOOKED_UP:
                seconds[rows] = self.known.seconds(self, name, demand[rows], gpus[rows])
            else:
                seconds[rows] = self.ask(name, demand[rows], gpus[rows])
        return seconds

    def ask(self, base: str, demand: Array, gpus: Array) -> Array:
        """The estimator."""
        tiers = self._tiers[gpus.astype(np.int64)].tolist()
        return self.state.estimator.seconds(base, demand, gpus, tiers)

    def best(self, many: CandidateBatch, choices: Array) -> tuple[Array, Array, Array]:
        """The best number of GPUs of each of n groups: worth [n], GPUs [n], seconds [n].

        choices   [m, n] GPUs to try; 0 is none. Worth is -inf where no choice is allowed
        """
        worth, gpus, seconds = self.table(many, choices)
        # Ties go to fewer GPUs: choices ascend.
        chosen = np.argmax(worth, axis=0), np.arange(choices.shape[1])
        return worth[chosen], gpus[chosen], seconds[chosen]

    def table(self, many: CandidateBatch, choices: Array) -> tuple[Array, Array, Array]:
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
            worth = np.where(fits, many.step_work / seconds - self.price * gpus, -np.inf)
        return worth, gpus, seconds


def tier_for(cluster: Cluster, count: int) -> Tier:
    """Tier of so many GPUs, wherever they are placed.

    A group spans racks only where it is wider than every rack is now, lost nodes not counted.
    """
    tier = cluster.min_tier(count)
    if tier == "rack" and cluster.lost and count > widest_rack(cluster):
        return "cluster"
    return tier


def widest_rack(cluster: Cluster) -> int:
    """GPUs of the rack that has most, lost nodes not counted."""
    if not cluster.lost:
        return min(cluster.gpus, cluster.gpus_per_node * cluster.nodes_per_rack)
    racks = Counter(cluster.node(gpu) // cluster.nodes_per_rack for gpu in cluster.present())
    return max(racks.values(), default=0)


@lru_cache(maxsize=8)
def _tiers_of(cluster: Cluster) -> NDArray[np.object_]:
    tiers = [tier_for(cluster, count) for count in range(cluster.capacity() + 1)]
    return np.array(tiers, dtype=object)


def powers(asked: Array) -> Array:
    """GPUs to try for each of n groups, ascending: powers of two below, then what it asked for."""
    most = int(asked.max()) if len(asked) else 1
    steps = [float(1 << power) for power in range(most.bit_length())]
    rows = [np.where(step < asked, step, 0.0) for step in steps]
    return np.stack([*rows, asked])


def seconds_of(
    state: SchedulerState, base: str, demand: Array, gpus: int, tier: Tier | None = None
) -> float:
    """Seconds of one step of one group of demand [15] on so many GPUs; infinite where nothing fits.

    tier    how far apart they stand; by default as near as so many can
    """
    tiers = [tier or tier_for(state.cluster, gpus)]
    seconds = state.estimator.seconds(base, demand[None], np.array([float(gpus)]), tiers)
    return float(seconds[0])


@dataclass(slots=True)
class PolicyMemory:
    """Memory that a policy keeps from round to round.

    waiting   jobs that were to run together, and have not begun
    """

    running: dict[tuple[tuple[str, ...], tuple[int, ...]], CandidateGroup] = field(
        default_factory=dict
    )
    waiting: list[CandidateGroup] = field(default_factory=list)


@dataclass(slots=True)
class SearchRound:
    """The units of one round.

    units    in order of the first arrival among their jobs
    broke    jobs that were taken out of a group that slowed them down too much
    """

    units: list[CandidateGroup]
    fresh: list[bool]
    broke: list[str]


class CandidateCollector:
    """Makes the units of a round.

    A policy that is asked again and again keeps the units of its last answer. What nobody touched
    since is taken over with its sums; only what changed is fresh, and looked at.
    """

    def __init__(self, state: SchedulerState, memory: PolicyMemory, *, lending: bool) -> None:
        self.state = state
        self.memory = memory
        self.lending = lending
        self.units: list[CandidateGroup] = []
        self.fresh: list[bool] = []
        self.broke: list[str] = []
        self._held: set[str] = set()

    def round(self, dwell: float) -> SearchRound:
        """All units; a new group is left alone for `dwell` seconds."""
        present = frozenset(self.state.cluster.lost)
        for group in self.state.groups:
            nodes = {self.state.cluster.node(gpu) for gpu in group.place}
            if group.place and not nodes & present:
                self._take_running(group, dwell)
        jobs = self.state.jobs
        for unit in self.memory.waiting:
            if all(name in jobs and name not in self._held for name in unit.jobs):
                self._refresh(unit)
                if len(unit.jobs) == 1 or unit.seconds <= unit.limit * (1 + ROUNDING):
                    self._add(unit, fresh=False)
        for name, job in jobs.items():
            if name not in self._held:
                self._add(self.alone(job), fresh=True)
        ranked = sorted(zip(self.units, self.fresh, strict=True), key=self._first)
        return SearchRound([unit for unit, _ in ranked], [fresh for _, fresh in ranked], self.broke)

    def _first(self, entry: tuple[CandidateGroup, bool]) -> tuple[float, str]:
        return min(arrival(self.state.jobs[name]) for name in entry[0].jobs)

    def _add(self, unit: CandidateGroup, *, fresh: bool) -> None:
        self._held.update(unit.jobs)
        self.units.append(unit)
        self.fresh.append(fresh)

    def _take_running(self, group: Group, dwell: float) -> None:
        """A group that runs, without the jobs that ended or that it slows down too much."""
        jobs = [self.state.jobs[name] for name in group.jobs if name in self.state.jobs]
        if not jobs:
            return
        known = self.memory.running.get((group.jobs, group.place))
        if known is not None and len(jobs) == len(group.jobs):
            self._refresh(known)
            if len(jobs) == 1 or known.seconds <= known.limit * (1 + ROUNDING):
                known.settled = True
                known.current_groups = (group,)
                known.held = self.state.now - group.formed < dwell
                self._add(known, fresh=False)
                return
        out = broken(jobs, group.seconds, self.state.now, lending=self.lending)
        stay = [job for job in jobs if job not in out]
        self.broke += [job.name for job in out]
        if not stay:
            stay = [out[0]]
        whole = len(stay) == len(group.jobs)
        unit = self.unit(stay, group.gpus, group.seconds)
        unit.current_groups, unit.settled = (group,), whole
        unit.held = whole and self.state.now - group.formed < dwell
        # A group that only lost a job that ended goes on; new jobs will look at it.
        self._add(unit, fresh=not whole)

    def _refresh(self, unit: CandidateGroup) -> None:
        jobs = [self.state.jobs[name] for name in unit.jobs]
        unit.left = min(job.steps_left for job in jobs)
        if any(job.request.deadline is not None for job in jobs):
            unit.limit = self.limit(*unit.jobs)

    def limit(self, *names: str) -> float:
        """The longest step that these jobs all bear, in seconds."""
        jobs, now = (self.state.jobs[name] for name in names), self.state.now
        return min(limit_seconds(job, now, lending=self.lending) for job in jobs)

    def alone(self, job: ActiveJob) -> CandidateGroup:
        """A job alone, on the GPUs that it asked for."""
        return self.unit([job], job.request.gpus, job.solo_seconds)

    def unit(self, jobs: list[ActiveJob], gpus: int, seconds: float) -> CandidateGroup:
        """Group of some jobs."""
        names = tuple(job.name for job in jobs)
        return CandidateGroup(
            names,
            jobs[0].request.base,
            np.sum([job.request.demand for job in jobs], axis=0, dtype=np.float64),
            sum(job.request.gpus for job in jobs),
            sum(job.solo_seconds for job in jobs),
            sum(job.request.gpus * job.solo_seconds for job in jobs),
            self.limit(*names),
            min(job.steps_left for job in jobs),
            gpus,
            seconds,
        )


def sized(
    valuation: GroupValuation,
    collector: CandidateCollector,
    search_round: SearchRound,
    *,
    pooled: bool = False,
) -> None:
    """Give what is new, and what has lost a job, as many GPUs as are best.

    A group that has lost a job may not keep the GPUs that it asked for; where the others break a
    bound on what is left to them, jobs are taken out, the one that bears least first.

    pooled   all that a group's jobs asked for, not fewer
    """
    release_spare_gpus(valuation, search_round)
    for index in range(len(search_round.units)):
        unit = search_round.units[index]
        while unit.current_groups and not unit.settled and not _size(valuation, [unit], pooled):
            tightest = min(unit.jobs, key=lambda name: (collector.limit(name), name))
            unit = _without(collector, unit, tightest)
            search_round.units[index] = unit
            search_round.units.append(collector.alone(collector.state.jobs[tightest]))
            search_round.fresh.append(True)
            search_round.broke.append(tightest)
    new = [
        unit
        for unit, fresh in zip(search_round.units, search_round.fresh, strict=True)
        if fresh and not unit.current_groups and valuation.crowded and not pooled
    ]
    if new:
        _size(valuation, new, pooled)


def release_spare_gpus(valuation: GroupValuation, search_round: SearchRound) -> None:
    """Give back GPUs that only ended jobs had asked for, where not all groups find free GPUs."""
    if sum(unit.gpus for unit in search_round.units) <= valuation.capacity:
        return
    for index, unit in enumerate(search_round.units):
        if unit.gpus > unit.asked:
            unit.settled = unit.held = False
            search_round.fresh[index] = True


def _without(collector: CandidateCollector, unit: CandidateGroup, name: str) -> CandidateGroup:
    stay = [collector.state.jobs[other] for other in unit.jobs if other != name]
    rest = collector.unit(stay, unit.gpus, unit.seconds)
    rest.current_groups = unit.current_groups
    return rest


def _size(valuation: GroupValuation, units: Sequence[CandidateGroup], pooled: bool) -> bool:
    """The best number of GPUs for each; False where there is none for one of them."""
    many = valuation.many(units)
    choices = many.asked[None] if pooled else powers(many.asked)
    worth, gpus, seconds = valuation.best(many, choices)
    for unit, value, count, step in zip(units, worth, gpus, seconds, strict=True):
        if np.isfinite(value):
            unit.gpus, unit.seconds = int(count), float(step)
    return bool(np.isfinite(worth).all()) or all(len(unit.jobs) == 1 for unit in units)


def resized(valuation: GroupValuation, units: Sequence[CandidateGroup]) -> list[CandidateGroup]:
    """Units on the GPUs that are best for them, where the change pays for itself."""
    movable = [unit for unit in units if not unit.held]
    if not movable:
        return list(units)
    many = valuation.many(movable)
    worth, gpus, seconds = valuation.best(many, powers(many.asked))
    better: dict[int, CandidateGroup] = {}
    for unit, value, count, step in zip(movable, worth, gpus, seconds, strict=True):
        lasting = max(min(valuation.window, unit.left * unit.seconds), 1e-9)
        gain = value - valuation.worth(unit) - valuation.reforming_cost(unit) / lasting
        if np.isfinite(value) and gain > 1e-9 and count != unit.gpus:
            better[id(unit)] = replace(unit, gpus=int(count), seconds=float(step), settled=False)
    return [better.get(id(unit), unit) for unit in units]


def released(
    valuation: GroupValuation, units: Sequence[CandidateGroup], knee: float
) -> list[CandidateGroup]:
    """Units that are not running yet without the GPUs that bring them next to nothing.

    knee   a step may grow by no more than this part of itself
    """
    new = [unit for unit in units if not unit.settled]
    if not new or valuation.crowded:
        return list(units)
    many = valuation.many(new)
    worth, gpus, seconds = valuation.table(many, powers(many.asked))
    smaller: dict[int, CandidateGroup] = {}
    for index, unit in enumerate(new):
        fits = np.isfinite(worth[:, index]) & (seconds[:, index] <= unit.seconds * (1 + knee))
        least = int(np.argmax(fits))
        if fits[least] and gpus[least, index] < unit.gpus:
            count, step = int(gpus[least, index]), float(seconds[least, index])
            smaller[id(unit)] = replace(unit, gpus=count, seconds=step)
    return [smaller.get(id(unit), unit) for unit in units]


def residuals(
    estimator: Estimator, bases: Sequence[str], demands: Array, gpus: Array, seconds: Array
) -> Array:
    """Idle GPUs' worth of roofline of each of n groups; none of one that does not fit.

    The key that groups are sorted by is one number: GPUs' worth of roofline that a group leaves
    idle, 1 - busy times its GPUs. Times the tokens that a GPU at the knee of its roofline takes in
    a second it is a headroom in tokens; that factor is one for all groups of a base, so sorting
    leaves it out. Memory is no key: a group that does not fit takes infinitely long.

    demands   [n, 15] rows of `Demand`
    gpus      [n] GPUs of each
    seconds   [n] of one step

    source   tLoRA, section 3.4, r_j; field notes: token headroom to the roofline's knee
    """
    left = np.zeros(len(bases))
    names = np.array(bases)
    for base in dict.fromkeys(bases):
        rows = names == base
        busy = estimator.busy(base, demands[rows], gpus[rows], seconds[rows])
        left[rows] = (1.0 - np.asarray(busy)) * gpus[rows]
    return np.where(np.isfinite(seconds), left, 0.0)
