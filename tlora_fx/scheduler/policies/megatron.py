"""Every job alone, on the GPUs that it asked for, with the best layout on them.

source   the baseline "Megatron" of tLoRA, section 4.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.scheduler.policies.baselines import Standing, names_of
from tlora_fx.scheduler.state import ActiveJob, Decision, Reason, State


@dataclass(slots=True)
class Megatron:
    """First come, first served; nothing shares and nothing moves.

    backfill   jobs that fit may overtake one that does not; a job may then wait for ever behind
               smaller ones
    """

    name: ClassVar[str] = "megatron"
    fused: ClassVar[bool] = True

    backfill: bool = False

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision."""
        standing = Standing.of(state)
        left: list[ActiveJob] = []
        for job in standing.waiting:
            blocked = bool(left) and not self.backfill
            if blocked or standing.seat([job], job.request.gpus) is None:
                left.append(job)
        reasons = _reasons(standing, left) if explain else ()
        return Decision(standing.groups(), names_of(left), reasons)


def _reasons(standing: Standing, left: list[ActiveJob]) -> tuple[Reason, ...]:
    alone = [Reason(job.name, "alone") for seat in standing.seats for job in seat.jobs]
    detail = f"{standing.placer.free} GPUs are free"
    return (*alone, *(Reason(job.name, "waits", detail=detail) for job in left))
