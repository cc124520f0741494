"""The default policy: merge what gains, move what gains, disturb what runs only where it pays.

Groups of the last round are the start of the next. What is new or changed is merged with whatever
gains most; from time to time, and where all is new, jobs are also moved, swapped and split off. A
group that runs is re-formed only if the gain, for as long as it lasts, exceeds the time that
forming it costs. Where jobs could use more GPUs than there are, GPUs have a price (`gains`), and
groups share fewer of them, so that jobs that wait can start.

source   field notes, "A better policy than the paper's"
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tlora_fx.scheduler.gains_sizes import released, sized
from tlora_fx.scheduler.gains_units import Gathering, Memory, Round
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.policies.tlora_reasons import reasons_of
from tlora_fx.scheduler.policies.tlora_search import Depth, Found, search
from tlora_fx.scheduler.policies.unchanged import Unchanged
from tlora_fx.scheduler.search.objective import OBJECTIVES, Known, Objective, Pricer
from tlora_fx.scheduler.search.placement import Placed, arrange
from tlora_fx.scheduler.state import Decision, State


@dataclass(slots=True)
class Tlora:
    """Gain-based merging and local search from what runs.

    objective       "weighted" speed-up, or "throughput" in samples a second
    payback         horizons within which a change must pay for itself
    dwell_seconds   a new group is left alone for so long, unless a bound is broken
    knee            a group gives back GPUs where its step grows by no more than this part
    reserve         set nodes aside for a pressed job that finds no room
    lending         slow jobs down past their bound where they consented to lend
    breadth         groups that are all compared; of more, each with a quarter as many
    thorough        jobs up to which several beginnings are tried where all is new
    moves           jobs moved, swapped or split off in one round at most
    search          evaluations that each horizon saves up for the next search of all groups
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
    moves: int = 48
    search: float = 250.0

    _memory: Memory = field(default_factory=Memory, init=False, repr=False)
    _unchanged: Unchanged = field(default_factory=Unchanged, init=False, repr=False)
    _known: Known = field(default_factory=Known, init=False, repr=False)
    _used: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _saved: float = field(default=0.0, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: one of {', '.join(OBJECTIVES)}")
        if self.payback <= 0 or self.dwell_seconds < 0 or self.knee < 0 or self.breadth < 2:
            raise ValueError("payback > 0, dwell_seconds >= 0, knee >= 0, breadth >= 2")

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision."""
        if not state.jobs:
            self._memory = Memory()
            return Decision(())
        depth = Depth(self.breadth, self.thorough, self.moves)
        passed = max(0.0, state.now - self._last) / max(state.horizon, 1e-9)
        self._saved, self._last = self._saved + self.search * passed, state.now
        due = self._saved >= depth.cost(len(state.jobs), len(state.groups) + 1)
        if not due and not explain and (last := self._unchanged.answer(state)) is not None:
            return last
        gathering = Gathering(state, self._memory, lending=self.lending)
        found = gathering.round(self.dwell_seconds)
        if not due and not explain and all(unit.settled for unit in found.units):
            return self._keep(state, found)
        pricer = self._pricer(state, gathering, found)
        sized(pricer, gathering, found)
        full = due or all(found.fresh)
        if full:
            self._saved = 0.0
        result = search(pricer, gathering, found, depth, full=full)
        placed = self._place(state, gathering, found, result, pricer)
        answer = self._answer(state, placed)
        if explain:
            reasons = reasons_of(state, found, result, placed)
            answer = Decision(answer.groups, answer.waiting, reasons)
        self._unchanged.keep(state, answer)
        return answer

    def _keep(self, state: State, found: Round) -> Decision:
        """Everybody runs and nobody is new."""
        groups = tuple(unit.homes[0] for unit in found.units)
        self._memory = Memory()
        for group, unit in zip(groups, found.units, strict=True):
            self._memory.running[_key(group)] = unit
        answer = Decision(groups)
        self._unchanged.keep(state, answer)
        return answer

    def _pricer(self, state: State, gathering: Gathering, found: Round) -> Pricer:
        """What groups are worth now."""
        window = self.payback * state.horizon
        pricer = Pricer(state, self.objective, window=window, known=self._known)
        self._use(state, gathering, pricer)
        pricer.crowded = sum(self._used[name] for name in state.jobs) > state.cluster.capacity()
        if pricer.crowded:
            running = [unit for unit in found.units if unit.homes] or found.units
            work = sum(pricer.mass(unit) / unit.seconds for unit in running)
            pricer.price = work / sum(unit.gpus for unit in running)
        return pricer

    def _use(self, state: State, gathering: Gathering, pricer: Pricer) -> None:
        """How many of the GPUs that it asked for each job would use, alone."""
        known = self._used
        self._used = {name: known[name] for name in state.jobs if name in known}
        new = [gathering.alone(job) for name, job in state.jobs.items() if name not in known]
        for unit, knee in zip(new, released(pricer, new, self.knee), strict=True):
            self._used[unit.jobs[0]] = knee.gpus

    def _place(
        self, state: State, gathering: Gathering, found: Round, result: Found, pricer: Pricer
    ) -> Placed:
        """Places for all that find one; what runs must not lose its own by a search."""
        ran = {name for unit in found.units if unit.homes for name in unit.jobs}
        units = released(pricer, result.units, self.knee)
        placed = arrange(state, gathering, units, reserve=self.reserve)
        if result.units is not result.safe:
            runs = {name for unit in placed.running for name in unit.jobs}
            if not ran <= runs:
                units = released(pricer, result.safe, self.knee)
                placed = arrange(state, gathering, units, reserve=self.reserve)
        return placed

    def _answer(self, state: State, placed: Placed) -> Decision:
        """The decision, and what to remember of it."""
        self._memory = Memory(waiting=placed.waiting)
        groups = placed.groups(state.now)
        for group, unit in zip(groups, placed.running, strict=True):
            self._memory.running[_key(group)] = unit
        return Decision(groups, tuple(name for unit in placed.waiting for name in unit.jobs))


def _key(group: Group) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return group.jobs, group.place
