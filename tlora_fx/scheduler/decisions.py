"""What must hold of a policy's decision before it is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tlora_fx.errors import DecisionWrong
from tlora_fx.scheduler.state import (
    Decision,
    Group,
    SchedulerState,
)

if TYPE_CHECKING:
    pass


def check(policy: str, decision: Decision, state: SchedulerState) -> None:
    """Refuse a decision that cannot be run; raises DecisionWrong."""
    known = {id(group) for group in state.groups}
    present = set(state.cluster.present())
    taken: dict[int, Group] = {}
    placed: dict[str, Group] = {}
    for group in decision.groups:
        for gpu in group.place:
            if gpu in taken or gpu not in present:
                why = "is not there" if gpu not in present else f"is also of {taken[gpu].jobs}"
                raise _wrong(policy, f"GPU {gpu} {why}", group)
            taken[gpu] = group
        for name in group.jobs:
            if name in placed:
                raise _wrong(policy, f"job '{name}' is also in {placed[name].jobs}", group)
            placed[name] = group
        if id(group) not in known:
            _check_new(policy, group, state)


def _check_new(policy: str, group: Group, state: SchedulerState) -> None:
    if not group.jobs or not group.place or len(group.place) != group.gpus:
        raise _wrong(policy, f"{len(group.jobs)} jobs on {len(group.place)} GPUs", group)
    for name in group.jobs:
        if name not in state.jobs:
            raise _wrong(policy, f"job '{name}' is not active", group)
    bases = {state.jobs[name].request.base for name in group.jobs}
    if len(bases) > 1:
        raise _wrong(policy, f"bases {', '.join(sorted(bases))} in one group", group)


def _wrong(policy: str, found: str, group: Group) -> DecisionWrong:
    return DecisionWrong(
        f"policy '{policy}' decided what cannot be run",
        group=", ".join(group.jobs) or "(no jobs)",
        place=", ".join(map(str, group.place)) or "(no GPUs)",
        gpus=group.gpus,
        found=found,
        help="this is a mistake of the policy; see tlora_fx.scheduler.state.Decision",
    )


def solo_or_reason(solo: float, gpus: int, most: int, others: Mapping[int, bool]) -> str | None:
    """Why a job can never run; None where it can.

    others   by other numbers of GPUs, whether it would fit there
    """
    if gpus < 1:
        return f"it asks for {gpus} GPUs"
    if gpus > most:
        return f"it asks for {gpus} GPUs and the cluster has {most}"
    if solo < float("inf"):
        return None
    enough = min((count for count, fits in others.items() if fits), default=None)
    if enough is None:
        return f"no layout fits into memory, on {gpus} GPUs or on all {most}"
    return f"no layout fits into the memory of {gpus} GPUs; {enough} would do"
