"""Baseline policies. What runs stays: groups without jobs that ended and nodes that are lost.

The policies that never regroup start from here and only fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar, Literal

from tlora_fx.cost.load import Demand
from tlora_fx.scheduler.policies.tlora import Tlora
from tlora_fx.scheduler.search.objective import seconds_of
from tlora_fx.scheduler.search.placement import Placer
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, Reason, SchedulerState, arrival


@dataclass(slots=True)
class Slot:
    """A group in the making; `group` runs there now, if nothing has changed since."""

    jobs: list[ActiveJob]
    place: tuple[int, ...]
    group: Group | None = None

    @property
    def base(self) -> str:
        """The base of its jobs."""
        return self.jobs[0].request.base

    def demand(self, *more: ActiveJob) -> Demand:
        """Demand of its jobs, and of some more."""
        return Demand.total(job.request.demand for job in (*self.jobs, *more))


@dataclass(slots=True)
class Allocation:
    """The groups that stand, the GPUs that are free, and the jobs that wait, first come first."""

    state: SchedulerState
    placer: Placer
    slots: list[Slot]
    waiting: list[ActiveJob]

    @classmethod
    def of(cls, state: SchedulerState) -> Allocation:
        """Allocation at a moment."""
        placer, slots = Placer(state.cluster), []
        held: set[str] = set()
        for group in state.groups:
            jobs = [state.jobs[name] for name in group.jobs if name in state.jobs]
            if not jobs or not group.place or not placer.has(group.place):
                continue
            placer.take(group.place)
            whole = len(jobs) == len(group.jobs)
            slots.append(Slot(jobs, group.place, group if whole else None))
            held.update(job.name for job in jobs)
        waiting = [job for name, job in state.jobs.items() if name not in held]
        return cls(state, placer, slots, sorted(waiting, key=arrival))

    def seconds(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of a group's step on so many GPUs; infinite where nothing fits."""
        return seconds_of(self.state, base, demand.row(), gpus)

    def resize(self, slot: Slot, gpus: int) -> bool:
        """Give a group so many GPUs, near those that it has; False leaves it as it is."""
        self.placer.give(slot.place)
        place = self.placer.find(gpus, keep=slot.place)
        if place is None:
            self.placer.take(slot.place)
            return False
        self.placer.take(place)
        if place != slot.place:
            slot.place, slot.group = place, None
        return True

    def open(self, jobs: Sequence[ActiveJob], gpus: int) -> Slot | None:
        """A new group; None where too few GPUs are free."""
        place = self.placer.find(gpus)
        if place is None:
            return None
        self.placer.take(place)
        self.slots.append(Slot(list(jobs), place))
        return self.slots[-1]

    def groups(self) -> tuple[Group, ...]:
        """Groups as a decision has them."""
        return tuple(slot.group or self._group(slot) for slot in self.slots)

    def _group(self, slot: Slot) -> Group:
        gpus = len(slot.place)
        seconds = self.seconds(slot.base, slot.demand(), gpus)
        names = tuple(job.name for job in slot.jobs)
        return Group(names, gpus, slot.place, seconds, self.state.now)


def names_of(jobs: Iterable[ActiveJob]) -> tuple[str, ...]:
    """The names of jobs, in their order."""
    return tuple(job.name for job in jobs)


@dataclass(slots=True)
class Megatron:
    """First come, first served; nothing shares and nothing moves.

    backfill   jobs that fit may overtake one that does not; a job may then wait for ever behind
               smaller ones

    source   the baseline "Megatron" of tLoRA, section 4.1
    """

    name: ClassVar[str] = "megatron"
    fused: ClassVar[bool] = True

    backfill: bool = False

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        allocation = Allocation.of(state)
        left: list[ActiveJob] = []
        for job in allocation.waiting:
            blocked = bool(left) and not self.backfill
            if blocked or allocation.open([job], job.request.gpus) is None:
                left.append(job)
        reasons = []
        if explain:
            detail = f"{allocation.placer.free} {state.cluster.unit}s are free"
            reasons = [Reason(job.name, "alone") for slot in allocation.slots for job in slot.jobs]
            reasons += [Reason(job.name, "waits", detail=detail) for job in left]
        return Decision(allocation.groups(), names_of(left), tuple(reasons))


Share = Literal["pooled", "widest"]


@dataclass(slots=True)
class MloraFifo:
    """Fill groups to a count, first come first served.

    A job joins the oldest group of its base with a free slot, or begins one. Neither slowdown nor
    deadlines are looked at. Nothing that runs is taken apart.

    gpus    GPUs of a group: "pooled", all that its jobs asked for, or "widest", its widest job's

    source   the baseline "mLoRA" of tLoRA, section 4.1; field notes: FIFO fill, cap 4
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

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        allocation = Allocation.of(state)
        for slot in allocation.slots if allocation.waiting else ():
            # What only jobs that have ended had asked for goes to those that wait.
            allocation.resize(slot, min(len(slot.place), self._gpus(slot.jobs)))
        left: list[ActiveJob] = []
        reasons: list[Reason] = []
        for job in allocation.waiting:
            joined = None if left else self._take(allocation, job)
            if joined is None:
                left.append(job)
                reasons.append(Reason(job.name, "waits", detail="no group can take it"))
            else:
                others = tuple(name for name in names_of(joined.jobs) if name != job.name)
                reasons.append(Reason(job.name, "joined" if others else "alone", others))
        kept = tuple(reasons) if explain else ()
        return Decision(allocation.groups(), names_of(left), kept)

    def _take(self, allocation: Allocation, job: ActiveJob) -> Slot | None:
        """The group that a job goes to; None where none can take it."""
        for slot in allocation.slots:
            if slot.base == job.request.base and len(slot.jobs) < self.cap:
                gpus = self._gpus([*slot.jobs, job])
                seconds = allocation.seconds(slot.base, slot.demand(job), gpus)
                if isfinite(seconds) and allocation.resize(slot, gpus):
                    slot.jobs.append(job)
                    slot.group = None
                    return slot
        return allocation.open([job], job.request.gpus)

    def _gpus(self, jobs: list[ActiveJob]) -> int:
        wanted = [job.request.gpus for job in jobs]
        return sum(wanted) if self.gpus == "pooled" else max(wanted)


@dataclass(slots=True)
class MloraMemory(MloraFifo):
    """Fill groups until nothing more fits into memory.

    source   tLoRA, section 4.1: "grouping jobs as long as memory capacity permits"
    """

    name: ClassVar[str] = "mlora-memory"

    cap: float = inf


@dataclass(slots=True)
class NoKernelFuser(Tlora):
    """The default policy, told of unfused kernels.

    The policy is the same; an estimator made with `fused=False` belongs to it.

    source   "tLoRA w/o Kernel Fuser" of tLoRA, section 4.1
    """

    name: ClassVar[str] = "no-kernel-fuser"
    fused: ClassVar[bool] = False


@dataclass(slots=True)
class NoGraphs(Tlora):
    """The default policy, told that no row runs as a CUDA graph; kernels are fused."""

    name: ClassVar[str] = "no-graphs"
    graphs: ClassVar[bool] = False


@dataclass(slots=True)
class NoScheduler(MloraFifo):
    """mLoRA's groups, run by fused kernels.

    source   "tLoRA w/o Scheduler" of tLoRA, section 4.1
    """

    name: ClassVar[str] = "no-scheduler"
    fused: ClassVar[bool] = True
