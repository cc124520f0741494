"""Why the default policy answered as it did."""

from __future__ import annotations

from collections.abc import Iterator

from tlora_fx.scheduler.gains_units import Round, by_jobs
from tlora_fx.scheduler.policies.tlora_search import Found
from tlora_fx.scheduler.search.placement import Placed
from tlora_fx.scheduler.state import Reason, State


def reasons_of(state: State, found: Round, result: Found, placed: Placed) -> tuple[Reason, ...]:
    """One or more for every job that something was decided about."""
    reasons = []
    for merge in result.merger.merges if result.merger else ():
        for own, others in ((merge.jobs, merge.others), (merge.others, merge.jobs)):
            reasons += [Reason(name, "merged", others, merge.gain) for name in own]
    for move in result.moves:
        others = move.others or ()
        verdict = "moved" if others else "split off"
        detail = f"in exchange for {move.swapped}" if move.swapped else ""
        reasons.append(Reason(move.job, verdict, others, move.gain, detail))
    for refusal in result.merger.refused() if result.merger else ():
        detail = "the best merge that was left, after the cost of re-forming what runs"
        for name in refusal.jobs:
            reasons.append(Reason(name, "kept apart", refusal.others, refusal.gain, detail))
    reasons += [
        Reason(name, "taken out", detail="its group would slow it down past its bound")
        for name in found.broke
    ]
    for name, unit in by_jobs(placed.running).items():
        less = unit.asked - unit.gpus
        if less:
            others = tuple(other for other in unit.jobs if other != name)
            detail = f"{unit.gpus} of the {unit.asked} GPUs that its jobs asked for"
            reasons.append(Reason(name, f"released {less} GPUs", others, detail=detail))
    reasons += _waiting(placed)
    order = {name: index for index, name in enumerate(state.jobs)}
    return tuple(sorted(reasons, key=lambda reason: order[reason.job]))


def _waiting(placed: Placed) -> Iterator[Reason]:
    """Why jobs wait, and with whom."""
    aside = len(placed.reserved)
    for unit in placed.waiting:
        detail = f"needs {unit.gpus} free GPU{'s' * (unit.gpus > 1)} of one place"
        if aside:
            detail += f"; {aside} nodes are set aside for the first that waits"
        for name in unit.jobs:
            others = tuple(other for other in unit.jobs if other != name)
            yield Reason(name, "waits", others, detail=detail)
