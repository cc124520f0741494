"""The exact policy, for few jobs: the best grouping where there is room for all.

It answers the uncontended problem and then fills the cluster; it knows no cost of switching.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.scheduler.oracle import best_grouping
from tlora_fx.scheduler.policies.filling import fill
from tlora_fx.scheduler.search.objective import OBJECTIVES, Objective
from tlora_fx.scheduler.state import Decision, Reason, State
from tlora_fx.scheduler.urgency import pressed_first


@dataclass(slots=True)
class Oracle:
    """Every subset of the jobs, the best partition.

    objective   "weighted" speed-up, or "throughput" in samples a second
    """

    name: ClassVar[str] = "oracle"
    fused: ClassVar[bool] = True

    objective: Objective = "weighted"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: one of {', '.join(OBJECTIVES)}")

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision.

        raises   TooManyForOracle
        """
        found = best_grouping(state, self.objective)
        jobs, now = state.jobs, state.now
        groups = sorted(
            found.groups, key=lambda group: min(pressed_first(jobs[name], now) for name in group)
        )
        detail = f"of all groupings the best is worth {found.worth:.4g}"
        reasons = tuple(
            Reason(name, "grouped", tuple(other for other in group if other != name), None, detail)
            for group in groups
            for name in group
        )
        return fill(state, groups, reasons=reasons if explain else ())
