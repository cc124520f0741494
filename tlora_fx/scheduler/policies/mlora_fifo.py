"""mLoRA's batching: jobs join in the order of their arrival, up to a count.

A job joins the oldest group of its base that has room, or begins one. Neither slowdown nor
deadlines are looked at. Nothing that runs is taken apart.

source   the baseline "mLoRA" of tLoRA, section 4.1; field notes: FIFO fill, cap 4
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal

from tlora_fx.scheduler.policies.baselines import Seat, Standing, names_of
from tlora_fx.scheduler.state import ActiveJob, Decision, Reason, State

Share = Literal["pooled", "widest"]


@dataclass(slots=True)
class MloraFifo:
    """Fill groups to a count, first come first served.

    cap     jobs in a group
    gpus    of a group: "pooled", all that its jobs asked for, or "widest", those of its widest job
    """

    name: ClassVar[str] = "mlora-fifo"
    fused: ClassVar[bool] = False

    cap: float = 4
    gpus: Share = "pooled"

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError("cap: at least 1")
        if self.gpus not in {"pooled", "widest"}:
            raise ValueError("gpus: 'pooled' or 'widest'")

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision."""
        standing = Standing.of(state)
        for seat in standing.seats if standing.waiting else ():
            # What only jobs that have ended had asked for goes to those that wait.
            standing.resize(seat, min(len(seat.place), self._gpus(seat.jobs)))
        left: list[ActiveJob] = []
        reasons: list[Reason] = []
        for job in standing.waiting:
            found = None if left else self._take(standing, job)
            if found is None:
                left.append(job)
                reasons.append(Reason(job.name, "waits", detail="no group has room for it"))
            else:
                others = tuple(name for name in names_of(found.jobs) if name != job.name)
                reasons.append(Reason(job.name, "joined" if others else "alone", others))
        kept = tuple(reasons) if explain else ()
        return Decision(standing.groups(), names_of(left), kept)

    def _take(self, standing: Standing, job: ActiveJob) -> Seat | None:
        """Where a job goes; None where there is no room."""
        for seat in standing.seats:
            if seat.base == job.request.base and len(seat.jobs) < self.cap:
                gpus = self._gpus([*seat.jobs, job])
                seconds = standing.seconds(seat.base, seat.demand(job), gpus)
                if isfinite(seconds) and standing.resize(seat, gpus):
                    seat.jobs.append(job)
                    seat.group = None
                    return seat
        return standing.seat([job], job.request.gpus)

    def _gpus(self, jobs: list[ActiveJob]) -> int:
        wanted = [job.request.gpus for job in jobs]
        return sum(wanted) if self.gpus == "pooled" else max(wanted)
