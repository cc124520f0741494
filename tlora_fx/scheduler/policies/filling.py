"""Place groups that were chosen from scratch: what runs already stays, others fill up in order."""

from __future__ import annotations

from collections.abc import Sequence

from tlora_fx.cost.demand import Demand
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.placement import Placer
from tlora_fx.scheduler.search.objective import seconds_of
from tlora_fx.scheduler.state import Decision, Reason, State


def fill(
    state: State,
    groups: Sequence[tuple[str, ...]],
    *,
    reasons: tuple[Reason, ...] = (),
    overtake: bool = True,
) -> Decision:
    """Give groups their GPUs, all that their jobs asked for together.

    groups     the most pressed first
    overtake   a group that fits may go before one that does not
    """
    placer = Placer(state.cluster)
    running = {frozenset(group.jobs): group for group in state.groups}
    placed: dict[tuple[str, ...], Group] = {}
    for jobs in groups:
        group = running.get(frozenset(jobs))
        if group is not None and placer.has(group.place) and group.gpus == _asked(state, jobs):
            placer.take(group.place)
            placed[jobs] = group
    blocked = False
    for jobs in groups:
        if jobs in placed or (blocked and not overtake):
            continue
        gpus = _asked(state, jobs)
        old = [gpu for group in state.groups if set(group.jobs) & set(jobs) for gpu in group.place]
        found = placer.find(gpus, keep=old)
        if found is None:
            blocked = True
            continue
        placer.take(found)
        placed[jobs] = Group(jobs, gpus, found, _seconds(state, jobs, gpus), state.now)
    waiting = tuple(name for jobs in groups if jobs not in placed for name in jobs)
    return Decision(tuple(placed[jobs] for jobs in groups if jobs in placed), waiting, reasons)


def _asked(state: State, jobs: tuple[str, ...]) -> int:
    return sum(state.jobs[name].request.gpus for name in jobs)


def _seconds(state: State, jobs: tuple[str, ...], gpus: int) -> float:
    first = state.jobs[jobs[0]]
    if len(jobs) == 1:
        return first.solo_seconds
    total = Demand.total(state.jobs[name].request.demand for name in jobs)
    return seconds_of(state, first.request.base, total.row(), gpus)
