"""The default policy: merge what gains, and disturb what runs only where it pays.

Groups of the last round are the start of the next. What is new or changed is merged with whatever
gains most; from time to time all groups are compared, and where all is new, the best of several
groupings is taken. A group that runs is re-formed only if the gain, for as long as it lasts,
exceeds the time that forming it costs. Where jobs could use more GPUs than there are, GPUs have a
price (`gains`), and groups share fewer of them, so that jobs that wait can start.

source   field notes, "A better policy than the paper's"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import first_of
from tlora_fx.scheduler.search.merging import KEYS, Merger, UnitPacker, segmented
from tlora_fx.scheduler.search.objective import (
    OBJECTIVES,
    CandidateCollector,
    CandidateGroup,
    GroupValuation,
    Objective,
    PolicyMemory,
    SearchRound,
    StepTimeCache,
    released,
    resized,
    sized,
)
from tlora_fx.scheduler.search.placement import Placement, arrange
from tlora_fx.scheduler.state import Decision, Group, Reason, SchedulerState, broken

HOSTS = 12
#: What the calls of one search take, in evaluations.
CALLS = 5000
#: Jobs that a reason names.
MAX_NAMED = 3


@dataclass(slots=True)
class SearchResult:
    """Result of a search.

    safe      groups to fall back to where these find no places
    merger    knows the merges that were made, and the best that were not; None: nothing was new
    """

    units: list[CandidateGroup]
    safe: list[CandidateGroup]
    merger: Merger | None = None


def search_cost(units: int, breadth: int) -> float:
    """About how many groups a full search evaluates, its calls' own time counted as such."""
    return float(CALLS + units * min(units, breadth))


def search(
    valuation: GroupValuation,
    collector: CandidateCollector,
    search_round: SearchRound,
    *,
    breadth: int,
    thorough: int,
    full: bool,
) -> SearchResult:
    """The groups of a round; `full` looks at all of them, not only at what is new or changed.

    breadth, thorough   as of `Tlora`
    """
    if not full and not any(search_round.fresh):
        return SearchResult(search_round.units, search_round.units)
    merger = Merger(valuation, search_round.units, breadth)
    merged = merger.run(np.array([full or fresh for fresh in search_round.fresh]))
    result = SearchResult(merged, merged, merger)
    if not full or len(collector.state.jobs) > breadth:
        return result
    starts = [merged]
    if len(search_round.units) <= thorough and not any(unit.settled for unit in search_round.units):
        starts += others(valuation, search_round.units)
    best = -np.inf
    for start in starts:
        units = resized(valuation, start)
        worth = net_worth(valuation, units, search_round.units)
        if worth > best + 1e-9:
            best, result.units = worth, units
    return result


def others(
    valuation: GroupValuation, units: Sequence[CandidateGroup]
) -> list[list[CandidateGroup]]:
    """Groupings that were found in other ways."""
    packs = [UnitPacker(valuation, units, HOSTS, shared=shared).run() for shared in (True, False)]
    return [*packs, *(segmented(valuation, units, key, len(units)) for key in KEYS)]


def net_worth(
    valuation: GroupValuation, units: Sequence[CandidateGroup], before: Sequence[CandidateGroup]
) -> float:
    """Worth of units, less the cost of re-forming those of `before` that are gone."""
    kept = {id(unit) for unit in units}
    return sum(valuation.worth(unit) for unit in units) - sum(
        valuation.change_cost(unit) / valuation.window for unit in before if id(unit) not in kept
    )


def reasons_of(
    state: SchedulerState,
    search_round: SearchRound,
    result: SearchResult,
    placed: Placement,
    dwell: float,
) -> tuple[Reason, ...]:
    """Reasons for every job that something was decided about, one or more each.

    dwell   seconds for which a new group is left alone
    """
    new = [unit for unit in search_round.units if unit.held]
    reasons = []
    for unit in new:
        seconds = unit.current_groups[0].formed + dwell - state.now
        detail = f"its group is new: for {seconds:.0f} s yet"
        reasons += [Reason(name, "left alone", detail=detail) for name in unit.jobs]
    for merge in result.merger.merges if result.merger else ():
        for members, others in ((merge.jobs, merge.others), (merge.others, merge.jobs)):
            reasons += [Reason(name, "merged", others, merge.gain) for name in members]
    for refusal in result.merger.refused() if result.merger else ():
        detail = "the best merge that was left, after the cost of re-forming what runs"
        for name in refusal.jobs:
            reasons.append(Reason(name, "kept apart", refusal.others, refusal.gain, detail))
    reasons += [
        Reason(name, "taken out", detail="its group would slow it down past its bound")
        for name in search_round.broke
    ]
    cluster = state.cluster
    for unit in placed.running:
        less = unit.asked - unit.gpus
        verdict = f"released {cluster.counted(less)}"
        detail = f"{unit.gpus} of the {cluster.counted(unit.asked)} that its jobs asked for"
        for name in unit.jobs if less else ():
            others = tuple(other for other in unit.jobs if other != name)
            reasons.append(Reason(name, verdict, others, detail=detail))
    reasons += _waiting(placed, new, cluster)
    order = {name: index for index, name in enumerate(state.jobs)}
    return tuple(sorted(reasons, key=lambda reason: order[reason.job]))


def _waiting(
    placed: Placement, new: Sequence[CandidateGroup], cluster: Cluster
) -> Iterator[Reason]:
    """Why jobs wait, and with whom; nobody may join what is new."""
    aside = len(placed.reserved)
    for unit in placed.waiting:
        detail = f"needs {unit.gpus} free {cluster.unit}{'s' * (unit.gpus > 1)} of one place"
        if aside:
            detail += f"; {aside} nodes are set aside for the first that waits"
        if barred := [name for other in new if other.base == unit.base for name in other.jobs]:
            detail += f"; too new to be joined: {first_of(barred, MAX_NAMED)}"
        for name in unit.jobs:
            others = tuple(other for other in unit.jobs if other != name)
            yield Reason(name, "waits", others, detail=detail)


@dataclass(slots=True)
class LastAnswer:
    """Last answer of a policy, and the state that it answered."""

    _jobs: tuple[str, ...] = ()
    _groups: tuple[Group, ...] = ()
    _cluster: Cluster | None = None
    _last: Decision | None = None

    def answer(self, state: SchedulerState) -> Decision | None:
        """The last decision if it holds; None where anything has changed."""
        if self._last is None or state.cluster != self._cluster:
            return None
        same = tuple(state.jobs) == self._jobs and _keys(state.groups) == _keys(self._groups)
        if not same:
            return None
        for group in state.groups:
            if broken([state.jobs[name] for name in group.jobs], group.seconds, state.now):
                return None
        return self._last

    def keep(self, state: SchedulerState, decision: Decision) -> None:
        """Remember a decision and its state."""
        self._jobs, self._groups = tuple(state.jobs), decision.groups
        self._cluster, self._last = state.cluster, decision


def _keys(groups: tuple[Group, ...]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return sorted((group.jobs, group.place) for group in groups)


@dataclass(slots=True)
class Tlora:
    """Gain-based merging from what runs.

    objective       "weighted" speed-up, or "throughput" in samples a second
    payback         horizons within which a change must pay for itself
    dwell_seconds   a new group is left alone for so long, unless a bound is broken; where joins
                    cost less than forming a group, for as much less
    knee            a group gives back GPUs where its step grows by no more than this part
    reserve         set nodes aside for a pressed job that does not fit
    lending         slow jobs down past their bound where they consented to lend
    breadth         groups that are all compared; of more, each with a quarter as many
    thorough        jobs up to which several beginnings are tried where all is new
    search          evaluations that each horizon saves up for the next search of all groups
    share           jobs share groups
    release         groups may hold fewer GPUs than their jobs asked for
    backfill        what waits may start before what is more pressed, where that does not fit
    """

    name: ClassVar[str] = "tlora"
    fused: ClassVar[bool] = True

    objective: Objective = "weighted"
    payback: float = 1.0
    dwell_seconds: float = 60.0
    knee: float = 0.005
    reserve: bool = True
    lending: bool = True
    breadth: int = 256
    thorough: int = 24
    search: float = 250.0
    share: bool = True
    release: bool = True
    backfill: bool = True

    _memory: PolicyMemory = field(default_factory=PolicyMemory, init=False, repr=False)
    _last_answer: LastAnswer = field(default_factory=LastAnswer, init=False, repr=False)
    _known: StepTimeCache = field(default_factory=StepTimeCache, init=False, repr=False)
    _used: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _saved: float = field(default=0.0, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: one of {', '.join(OBJECTIVES)}")
        if self.payback <= 0 or self.dwell_seconds < 0 or self.knee < 0 or self.breadth < 2:
            raise ValueError("payback > 0, dwell_seconds >= 0, knee >= 0, breadth >= 2")

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        if not state.jobs:
            self._memory = PolicyMemory()
            return Decision(())
        passed = max(0.0, state.now - self._last) / max(state.horizon, 1e-9)
        self._saved, self._last = self._saved + self.search * passed, state.now
        due = self._saved >= search_cost(len(state.groups) + 1, self.breadth)
        if not due and not explain and (last := self._last_answer.answer(state)) is not None:
            return last
        collector = CandidateCollector(state, self._memory, lending=self.lending)
        dwell = self._dwell(state)
        search_round = collector.round(dwell)
        if not due and not explain and all(unit.settled for unit in search_round.units):
            return self._keep(state, search_round)
        valuation = self._valuation(state, collector, search_round)
        sized(valuation, collector, search_round, pooled=not self.release)
        full = due or all(search_round.fresh)
        if full:
            self._saved = 0.0
        if self.share:
            result = search(
                valuation, collector, search_round,
                breadth=self.breadth, thorough=self.thorough, full=full,
            )  # fmt: skip
        else:
            result = SearchResult(search_round.units, search_round.units)
        placed = self._place(state, collector, search_round, result, valuation)
        answer = self._answer(state, placed)
        if explain:
            reasons = reasons_of(state, search_round, result, placed, dwell)
            answer = Decision(answer.groups, answer.waiting, reasons)
        self._last_answer.keep(state, answer)
        return answer

    def _dwell(self, state: SchedulerState) -> float:
        if not state.switch_seconds:
            return self.dwell_seconds
        return self.dwell_seconds * state.change_seconds / state.switch_seconds

    def _keep(self, state: SchedulerState, search_round: SearchRound) -> Decision:
        groups = tuple(unit.current_groups[0] for unit in search_round.units)
        pairs = zip(groups, search_round.units, strict=True)
        self._memory = PolicyMemory({_key(group): unit for group, unit in pairs})
        answer = Decision(groups)
        self._last_answer.keep(state, answer)
        return answer

    def _valuation(
        self, state: SchedulerState, collector: CandidateCollector, search_round: SearchRound
    ) -> GroupValuation:
        window = self.payback * state.horizon
        valuation = GroupValuation(state, self.objective, window=window, known=self._known)
        self._use(state, collector, valuation)
        used = sum(self._used[name] for name in state.jobs)
        valuation.crowded = self.release and used > state.cluster.capacity()
        if valuation.crowded:
            running = [
                unit for unit in search_round.units if unit.current_groups
            ] or search_round.units
            work = sum(valuation.step_work(unit) / unit.seconds for unit in running)
            valuation.price = work / sum(unit.gpus for unit in running)
        return valuation

    def _use(
        self, state: SchedulerState, collector: CandidateCollector, valuation: GroupValuation
    ) -> None:
        """How many of the GPUs that it asked for each job would use, alone."""
        known = self._used
        self._used = {name: known[name] for name in state.jobs if name in known}
        new = [collector.alone(job) for name, job in state.jobs.items() if name not in known]
        for unit, knee in zip(new, released(valuation, new, self.knee), strict=True):
            self._used[unit.jobs[0]] = knee.gpus

    def _place(
        self,
        state: SchedulerState,
        collector: CandidateCollector,
        search_round: SearchRound,
        result: SearchResult,
        valuation: GroupValuation,
    ) -> Placement:
        """Places for all that find one; what runs must not lose its own by a search."""
        ran = {name for unit in search_round.units if unit.current_groups for name in unit.jobs}

        def place(units: Sequence[CandidateGroup]) -> Placement:
            if self.release:
                units = released(valuation, units, self.knee)
            alone = valuation if self.release and self.backfill else None
            return arrange(
                state,
                collector,
                units,
                reserve=self.reserve,
                valuation=alone,
                backfill=self.backfill,
            )

        placed = place(result.units)
        if result.units is not result.safe:
            runs = {name for unit in placed.running for name in unit.jobs}
            if not ran <= runs:
                placed = place(result.safe)
        return placed

    def _answer(self, state: SchedulerState, placed: Placement) -> Decision:
        groups = placed.groups(state.now)
        pairs = zip(groups, placed.running, strict=True)
        self._memory = PolicyMemory({_key(group): unit for group, unit in pairs}, placed.waiting)
        return Decision(groups, tuple(name for unit in placed.waiting for name in unit.jobs))


def _key(group: Group) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return group.jobs, group.place
