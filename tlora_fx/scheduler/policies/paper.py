"""Algorithm 1 of the paper, as its text describes it and put right where it is broken as printed.

Groups are formed for all jobs first, then placed, then run together for one horizon. Within a
node, then a rack, then the cluster: sort by urgency, then residual; take the first as seed; find by
a binary cut how long a suffix of the others (the idlest) it should merge with; put the merged
group back; a seed that merges with none is lifted to the next tier. A merge must gain on weighted
speed-up, and none may break a bound. At most 2 K log2 K groups are evaluated in a round.

What was grouped in the last round stays together, running or not; only what is new is a seed.

source   tLoRA, section 3.4; field notes, "Reading Algorithm 1"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log2
from typing import ClassVar

import numpy as np

from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.policies.tlora import LastAnswer
from tlora_fx.scheduler.search.merging import MIN_GAIN
from tlora_fx.scheduler.search.objective import (
    OBJECTIVES,
    CandidateCollector,
    CandidateGroup,
    GroupValuation,
    Objective,
    PolicyMemory,
    residuals,
    sized,
)
from tlora_fx.scheduler.search.placement import Placer, arrange
from tlora_fx.scheduler.state import ROUNDING, Decision, Reason, SchedulerState, arrival, urgency

MAX_KNOWN = 200_000


class Cutter:
    """The binary cut of Algorithm 1: how long a suffix of a queue a seed should merge with.

    budget   groups that may be evaluated in a round
    known    seconds of groups by the keys of their jobs; kept from round to round
    """

    def __init__(self, valuation: GroupValuation, budget: int, known: dict[int, float]) -> None:
        self.valuation = valuation
        self.budget = budget
        self.evaluations = 0
        self.reasons: list[Reason] = []
        self._known = known
        self._keys = {name: hash(job.request) for name, job in valuation.state.jobs.items()}
        if len(known) > MAX_KNOWN:
            known.clear()

    def cut(self, seed: CandidateGroup, queue: Sequence[CandidateGroup]) -> int:
        """Number of last units of one base's queue that the seed should merge with; 0 is none."""
        suffixes = _Suffixes(self, seed, queue)
        low, high = 0, len(queue)
        while low < high:
            middle = (low + high) // 2
            if suffixes.gain(middle + 1) > suffixes.gain(middle) + MIN_GAIN:
                low = middle + 1
            else:
                high = middle
        gain = suffixes.gain(low)
        self._tell(seed, queue, low, gain)
        return low if gain > MIN_GAIN else 0

    def merged(self, seed: CandidateGroup, others: Sequence[CandidateGroup]) -> CandidateGroup:
        """One unit of several, on all GPUs that their jobs asked for."""
        group = seed
        for other in others:
            group = group.with_(other, group.asked + other.asked, 0.0)
        group.gpus = group.asked
        group.seconds = self.seconds(self.key(group), group)
        return group

    def key(self, unit: CandidateGroup) -> int:
        """A number that stands for a set of jobs."""
        key = 0
        for name in unit.jobs:
            key ^= self._keys[name]
        return key

    def seconds(self, key: int, unit: CandidateGroup) -> float:
        """Seconds of a group's step on all its jobs' GPUs; infinite once the budget is spent."""
        if key in self._known:
            return self._known[key]
        if self.evaluations >= self.budget or unit.asked > self.valuation.capacity:
            return inf
        self.evaluations += 1
        index = np.array([self.valuation.bases.index(unit.base)])
        gpus = np.array([float(unit.asked)])
        seconds = float(self.valuation.seconds(index, unit.demand[None], gpus)[0])
        self._known[key] = seconds
        return seconds

    def _tell(
        self, seed: CandidateGroup, queue: Sequence[CandidateGroup], taken: int, gain: float
    ) -> None:
        others = tuple(name for unit in queue[len(queue) - taken :] for name in unit.jobs)
        verdict = "merged" if taken and gain > MIN_GAIN else "kept apart"
        if verdict == "kept apart":
            others = tuple(name for unit in queue for name in unit.jobs)
        kept = gain if taken and isfinite(gain) else None
        self.reasons += [Reason(name, verdict, others, kept) for name in seed.jobs]


class _Suffixes:
    """The gains of merging one seed with suffixes of one queue."""

    def __init__(
        self, cutter: Cutter, seed: CandidateGroup, queue: Sequence[CandidateGroup]
    ) -> None:
        self._cutter = cutter
        self._queue = queue
        self._total = [seed]
        self._keys = [cutter.key(seed)]
        self._parts = [cutter.valuation.worth(seed)]
        self._gains: dict[int, float] = {0: 0.0}

    def gain(self, count: int) -> float:
        """Gain of merging with the last `count`; -inf where a bound or memory forbids it."""
        if count not in self._gains:
            self._gains[count] = self._compute(count)
        return self._gains[count]

    def _compute(self, count: int) -> float:
        cutter, valuation = self._cutter, self._cutter.valuation
        while len(self._total) <= count:
            other = self._queue[len(self._queue) - len(self._total)]
            last = self._total[-1]
            self._total.append(last.with_(other, last.asked + other.asked, 0.0))
            self._keys.append(self._keys[-1] ^ cutter.key(other))
            self._parts.append(self._parts[-1] + valuation.worth(other))
        unit = self._total[count]
        seconds = cutter.seconds(self._keys[count], unit)
        if not isfinite(seconds) or seconds > unit.limit * (1 + ROUNDING):
            return -inf
        return valuation.step_work(unit) / seconds - self._parts[count]


@dataclass(slots=True)
class TloraPaper:
    """Hierarchical incremental grouping.

    objective   "weighted" speed-up, or "throughput" in samples a second
    warm        groups of the last round stay together; else all jobs are grouped anew each time
    """

    name: ClassVar[str] = "tlora-paper"
    fused: ClassVar[bool] = True

    objective: Objective = "weighted"
    warm: bool = True
    evaluations: int = field(default=0, init=False)
    _last_answer: LastAnswer = field(default_factory=LastAnswer, init=False, repr=False)
    _memory: PolicyMemory = field(default_factory=PolicyMemory, init=False, repr=False)
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: one of {', '.join(OBJECTIVES)}")

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        if not state.jobs:
            self._memory = PolicyMemory()
            return Decision(())
        if not explain and (last := self._last_answer.answer(state)) is not None:
            return last
        memory = self._memory if self.warm else PolicyMemory()
        collector = CandidateCollector(state, memory, lending=False)
        search_round = collector.round(0.0)
        valuation = GroupValuation(state, self.objective)
        sized(valuation, collector, search_round, pooled=True)
        units, fresh = search_round.units, search_round.fresh
        if not self.warm:
            units = [collector.alone(job) for job in state.jobs.values()]
            fresh = [True] * len(units)
        old = frozenset(id(unit) for unit, new in zip(units, fresh, strict=True) if not new)
        cutter = Cutter(valuation, budget(len(state.jobs)), self._known)
        places = _places(state, units)
        for unit_of in _tiers(state.cluster):
            units = _tier(state, cutter, units, places, unit_of, old)
        self.evaluations = cutter.evaluations
        if not self.warm:
            for unit, group in itertools.product(units, state.groups):
                if set(group.jobs) == set(unit.jobs) and group.gpus == unit.gpus:
                    # The same jobs run already: the group stays where it is.
                    unit.current_groups, unit.settled = (group,), True
        placed = arrange(state, collector, units, reserve=True)
        waiting = tuple(name for unit in placed.waiting for name in unit.jobs)
        reasons = tuple(cutter.reasons) if explain else ()
        reasons += tuple(Reason(name, "waits") for name in waiting) if explain else ()
        groups = placed.groups(state.now)
        running = zip(groups, placed.running, strict=True)
        kept = {(group.jobs, group.place): unit for group, unit in running}
        self._memory = PolicyMemory(kept, placed.waiting)
        answer = Decision(groups, waiting, reasons)
        self._last_answer.keep(state, answer)
        return answer


def _tier(
    state: SchedulerState,
    cutter: Cutter,
    units: list[CandidateGroup],
    places: dict[str, frozenset[int]],
    unit_of: Callable[[int], int],
    old: frozenset[int],
) -> list[CandidateGroup]:
    """Group within each node, rack or the cluster; what spans several passes through."""
    queues: dict[tuple[int, str], list[CandidateGroup]] = {}
    done: list[CandidateGroup] = []
    for unit in units:
        inside = {unit_of(node) for name in unit.jobs for node in places[name]}
        if len(inside) == 1:
            queues.setdefault((inside.pop(), unit.base), []).append(unit)
        else:
            done.append(unit)
    for _, queue in sorted(queues.items()):
        if len(queue) == 1 or all(id(unit) in old for unit in queue):
            done += queue
        else:
            done += _incremental(state, cutter, queue, old)
    return done


def _incremental(
    state: SchedulerState, cutter: Cutter, queue: list[CandidateGroup], old: frozenset[int]
) -> list[CandidateGroup]:
    """Pack and put back until no seed merges."""
    done: list[CandidateGroup] = []
    keys = _keys(state, queue)
    while queue:
        queue.sort(key=lambda unit: keys[id(unit)])
        seed = next((unit for unit in queue if id(unit) not in old), None)
        if seed is None:
            return done + queue
        queue.remove(seed)
        taken = cutter.cut(seed, queue)
        if not taken:
            done.append(seed)
            continue
        merged = cutter.merged(seed, queue[len(queue) - taken :])
        queue = [*queue[: len(queue) - taken], merged]
        keys |= _keys(state, [merged])
    return done


def budget(jobs: int) -> int:
    """Groups that one round may evaluate: 2 K log2 K."""
    return int(2 * jobs * log2(jobs)) if jobs > 1 else 0


def _keys(
    state: SchedulerState, units: list[CandidateGroup]
) -> dict[int, tuple[int, float, float, str]]:
    """What units are sorted by: urgency descending, residual ascending, then arrival."""
    left = residuals(
        state.estimator,
        [unit.base for unit in units],
        np.stack([unit.demand for unit in units]),
        np.array([float(unit.gpus) for unit in units]),
        np.array([unit.seconds for unit in units]),
    )
    keys = {}
    for unit, free in zip(units, left, strict=True):
        jobs = [state.jobs[name] for name in unit.jobs]
        pressed = max(urgency(job, state.now, unit.seconds) for job in jobs)
        keys[id(unit)] = (-int(pressed), float(free), *min(arrival(job) for job in jobs))
    return keys


def _tiers(cluster: Cluster) -> tuple[Callable[[int], int], ...]:
    """Node, rack and cluster of a node. Within one GPU there is nothing to pool."""
    return (lambda node: node, lambda node: node // cluster.nodes_per_rack, lambda node: 0)


def _places(state: SchedulerState, units: list[CandidateGroup]) -> dict[str, frozenset[int]]:
    """The nodes where each job stands, or would if there were GPUs for all alone."""
    cluster = state.cluster
    more = sum(-(-job.request.gpus // cluster.gpus_per_node) for job in state.jobs.values())
    size = (cluster.nodes + more) * cluster.gpus_per_node
    enlarged = Cluster(size, cluster.gpus_per_node, cluster.nodes_per_rack, lost=cluster.lost)
    placer = Placer(enlarged)
    running = {name: group.place for group in state.groups for name in group.jobs}
    for group in state.groups:
        if placer.has(group.place):
            placer.take(group.place)
    nodes = {}
    for unit in units:
        for name in unit.jobs:
            gpu_ids = running.get(name)
            if gpu_ids is None:
                gpu_ids = placer.find(state.jobs[name].request.gpus) or ()
                placer.take(gpu_ids)
            nodes[name] = frozenset(cluster.node(gpu) for gpu in gpu_ids)
    return nodes
