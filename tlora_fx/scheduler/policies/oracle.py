"""The exact policy, for few jobs: the best grouping where there are GPUs for all.

It answers the uncontended problem and then fills the cluster; it knows no cost of switching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.load import Array, Demand
from tlora_fx.errors import TooManyForOracle
from tlora_fx.scheduler.search.objective import OBJECTIVES, Objective, seconds_of, tier_for
from tlora_fx.scheduler.search.placement import Placer
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    Decision,
    Group,
    Reason,
    SchedulerState,
    arrival,
    limit_seconds,
    pressed_first,
)

MAX_JOBS = 16
#: Jobs whose sets are parted in all ways by one call.
_SMALL = 6
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of jobs, by name, and what they are worth together."""

    groups: tuple[tuple[str, ...], ...]
    worth: float


def best_grouping(state: SchedulerState, objective: Objective = "weighted") -> Grouping:
    """The grouping of the largest worth, each group on all its jobs' GPUs.

    It stands for the uncontended problem: each group has all GPUs that its jobs asked for. Jobs of
    different bases never share, so every base is a problem of its own.

    raises   TooManyForOracle
    """
    groups: list[tuple[str, ...]] = []
    worth = 0.0
    by_base: dict[str, list[ActiveJob]] = {}
    for job in sorted(state.jobs.values(), key=arrival):
        by_base.setdefault(job.request.base, []).append(job)
    for jobs in by_base.values():
        if len(jobs) > MAX_JOBS:
            raise TooManyForOracle(
                f"{len(jobs)} jobs of one base are too many for the exact policy",
                expected=f"at most {MAX_JOBS}",
                help="choose the policy 'tlora', or let a replay show it fewer jobs (--runnable)",
            )
        masks, value = _partition(worths(state, jobs, objective), len(jobs))
        worth += value
        groups += [tuple(jobs[i].name for i in range(len(jobs)) if m >> i & 1) for m in masks]
    return Grouping(tuple(groups), worth)


def worths(state: SchedulerState, jobs: Sequence[ActiveJob], objective: Objective) -> Array:
    """Worth [2^n] of every subset of jobs of one base; bit i of its index stands for job i.

    It is -inf where a bound or memory forbids a subset.
    """
    count = 1 << len(jobs)
    bits = (np.arange(count)[:, None] >> np.arange(len(jobs)) & 1).astype(np.float64)
    demand = bits @ np.array([job.request.demand for job in jobs], dtype=np.float64)
    gpus = bits @ np.array([float(job.request.gpus) for job in jobs])
    limits = np.array([limit_seconds(job, state.now) for job in jobs])
    limit = np.where(bits > 0, limits, np.inf).min(axis=1)
    weighted = objective == "weighted"
    mass = bits @ np.array(
        [job.solo_seconds if weighted else job.request.demand.samples for job in jobs]
    )
    tiers = [tier_for(state.cluster, int(number)) for number in gpus[1:]]
    seconds = np.full(count, np.inf)
    seconds[1:] = state.estimator.seconds(jobs[0].request.base, demand[1:], gpus[1:], tiers)
    seconds[gpus > state.cluster.capacity()] = np.inf
    fits = np.isfinite(seconds) & ((seconds <= limit * (1 + ROUNDING)) | (bits.sum(axis=1) == 1))
    worth = np.full(count, -np.inf)
    worth[fits] = mass[fits] / seconds[fits]
    return worth


def _partition(worth: Array, count: int) -> tuple[list[int], float]:
    """The best partition of all jobs into allowed subsets.

    The subset of the lowest job, and the best partition of what is left of the others: a maximum
    over subsets for each mask, which `_convolved` takes for all masks at once.
    """
    best = np.full(1 << count, -np.inf)
    best[0] = 0.0
    for low in reversed(range(count)):
        # Bits above the lowest one, as a number of their own.
        step = 1 << (low + 1)
        containing, others = worth[1 << low :: step], best[::step]
        best[1 << low :: step] = _convolved(containing, others)
    masks, mask = [], (1 << count) - 1
    while mask:
        low = mask & -mask
        parts = _subsets_of(mask ^ low)
        worths = worth[parts | low] + best[mask ^ low ^ parts]
        masks.append(int(parts[np.argmax(worths)]) | low)
        mask ^= masks[-1]
    return masks, float(best[-1])


def _convolved(first: Array, second: Array) -> Array:
    """For each set the largest first[part] + second[rest] over all ways to part it.

    first, second   [2^n] by set
    """
    size = len(first)
    if size <= 1 << _SMALL:
        parts, wholes, starts = _ways(size)
        best: Array = np.maximum.reduceat(first[parts] + second[wholes ^ parts], starts)
        return best
    half = size // 2
    left = _convolved(first[:half], second[:half])
    right = np.maximum(
        _convolved(first[half:], second[:half]), _convolved(first[:half], second[half:])
    )
    return np.concatenate((left, right))


@lru_cache
def _ways(size: int) -> tuple[Indices, Indices, Indices]:
    """Of all sets below a size, each part and its whole, by wholes, and where each whole begins."""
    pairs = [(part, whole) for whole in range(size) for part in _subsets_of(whole).tolist()]
    parts, wholes = np.array(pairs).T
    return parts, wholes, np.searchsorted(wholes, np.arange(size))


def _subsets_of(mask: int) -> Indices:
    """All subsets of a set, the empty one first."""
    subsets = np.zeros(1, np.int64)
    while mask:
        low = mask & -mask
        subsets, mask = np.concatenate((subsets, subsets | low)), mask ^ low
    return subsets


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

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        best = best_grouping(state, self.objective)
        jobs, now = state.jobs, state.now
        groups = sorted(
            best.groups, key=lambda group: min(pressed_first(jobs[name], now) for name in group)
        )
        detail = f"of all groupings the best is worth {best.worth:.4g}"
        reasons = tuple(
            Reason(name, "grouped", tuple(other for other in group if other != name), None, detail)
            for group in groups
            for name in group
        )
        return fill(state, groups, reasons=reasons if explain else ())


def fill(
    state: SchedulerState,
    groups: Sequence[tuple[str, ...]],
    *,
    reasons: tuple[Reason, ...] = (),
) -> Decision:
    """Give groups their GPUs, all that their jobs asked for together.

    groups   the most pressed first; what runs already stays, others fill up in order
    """
    placer = Placer(state.cluster)
    running = {frozenset(group.jobs): group for group in state.groups}
    placed: dict[tuple[str, ...], Group] = {}
    for jobs in groups:
        group = running.get(frozenset(jobs))
        if group is not None and placer.has(group.place) and group.gpus == _asked(state, jobs):
            placer.take(group.place)
            placed[jobs] = group
    for jobs in (jobs for jobs in groups if jobs not in placed):
        gpus = _asked(state, jobs)
        held = [gpu for group in state.groups if set(group.jobs) & set(jobs) for gpu in group.place]
        gpu_ids = placer.find(gpus, keep=held)
        if gpu_ids is not None:
            placer.take(gpu_ids)
            placed[jobs] = Group(jobs, gpus, gpu_ids, _seconds(state, jobs, gpus), state.now)
    waiting = tuple(name for jobs in groups if jobs not in placed for name in jobs)
    return Decision(tuple(placed[jobs] for jobs in groups if jobs in placed), waiting, reasons)


def _asked(state: SchedulerState, jobs: tuple[str, ...]) -> int:
    return sum(state.jobs[name].request.gpus for name in jobs)


def _seconds(state: SchedulerState, jobs: tuple[str, ...], gpus: int) -> float:
    first = state.jobs[jobs[0]]
    if len(jobs) == 1:
        return first.solo_seconds
    total = Demand.total(state.jobs[name].request.demand for name in jobs)
    return seconds_of(state, first.request.base, total.row(), gpus)
