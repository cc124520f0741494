"""Simulate a pipeline's round, from the time of each stage and micro-batch.

Each process does its work in the order of its schedule; a piece of work starts when the process is
free and what it needs has arrived. Orders are those that torch's schedules run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from tlora_fx.cost.load import Array
from tlora_fx.cost.plan import Schedule
from tlora_fx.errors import ScheduleRefused

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One piece of work.

    kind   F forward, B backward
    """

    stage: int
    kind: Kind
    micro_batch: int


Order = list[list[Action]]
Seconds = float | Array


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each stage for each micro-batch, as `times[stage][micro_batch]`.

    Of one round, or of many under one schedule at once.

    backward   zeros where a stage has none
    transfer   from one process to another, hidden value or gradient
    """

    forward: Sequence[Sequence[Seconds] | Array]
    backward: Sequence[Sequence[Seconds] | Array]
    transfer: Seconds = 0.0

    def of(self, action: Action) -> Seconds:
        """Seconds of a piece of work."""
        stage, kind, micro_batch = action
        seconds = self.forward if kind == "F" else self.backward
        return seconds[stage][micro_batch]


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of simulating one round.

    makespan_seconds   from the first forward to the last backward
    busy_seconds       how long each process works
    ends               when each piece of work ends
    """

    makespan_seconds: Seconds
    busy_seconds: tuple[Seconds, ...]
    ends: Mapping[Action, Seconds] = field(repr=False)

    @property
    def bubble(self) -> Seconds:
        """The part of all processes' time in which they wait."""
        whole = self.makespan_seconds * len(self.busy_seconds)
        return 1 - sum(self.busy_seconds) / whole if np.all(whole) else 0.0


def simulate(order: Order, times: Times, stages: int) -> Simulated:
    """Simulate a round in which every process does its work in order.

    order     each process's work
    stages    how many there are in all
    returns   what a round takes where sending delays nobody but the receiver
    """
    owner = {action: process for process, own in enumerate(order) for action in own}
    ends: dict[Action, Seconds] = {}
    free: list[Seconds] = [0.0] * len(order)
    queues = [list(reversed(own)) for own in order]
    moved = True
    while moved:
        moved = False
        for process, queue in enumerate(queues):
            while queue and all(need in ends for need in _needs(queue[-1], stages, owner)):
                action = queue.pop()
                ready = [
                    ends[need] + (times.transfer if owner[need] != process else 0.0)
                    for need in _needs(action, stages, owner)
                ]
                begin = reduce(np.maximum, ready, free[process])
                free[process] = ends[action] = begin + times.of(action)
                moved = True
    assert not any(queues), "the schedule waits for itself"
    busy = tuple(sum(times.of(action) for action in own) for own in order)
    return Simulated(reduce(np.maximum, free), busy, ends)


def schedule_order(schedule: Schedule, stages: int, processes: int, micro_batches: int) -> Order:
    """Each process's work under a schedule; raises ScheduleRefused."""
    require_schedule(schedule, stages, processes, micro_batches)
    if schedule == "gpipe":
        every = range(micro_batches)
        return [
            [*(Action(stage, "F", m) for m in every), *(Action(stage, "B", m) for m in every)]
            for stage in range(stages)
        ]
    if schedule == "1f1b":
        return [_one_forward_one_backward(s, stages, micro_batches) for s in range(stages)]
    return _interleaved(stages, processes, micro_batches)


def require_schedule(schedule: Schedule, stages: int, processes: int, micro_batches: int) -> None:
    """Refuse what torch's schedule does not run; raises ScheduleRefused."""
    told: dict[str, Any] = {
        "schedule": schedule, "stages": stages, "processes": processes,
        "micro-batches": micro_batches,
    }  # fmt: skip
    if stages % processes or (schedule != "interleaved" and stages != processes):
        raise ScheduleRefused(
            "a schedule does not run so many stages", **told,
            help="one stage a process; a multiple of the processes for interleaved",
        )  # fmt: skip
    if schedule == "1f1b" and micro_batches < stages:
        raise ScheduleRefused(
            "1F1B needs at least as many micro-batches as stages", **told,
            help=f"plan at least {stages} micro-batches, or take gpipe",
        )  # fmt: skip
    rounds = max(1, micro_batches // processes)
    if schedule == "interleaved" and micro_batches % rounds:
        raise ScheduleRefused(
            "interleaved needs micro-batches in equal rounds", **told,
            help=f"plan a multiple of {processes} micro-batches",
        )  # fmt: skip


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    warm = min(micro_batches, stages - stage)
    actions = [Action(stage, "F", m) for m in range(warm)]
    for m in range(micro_batches):
        actions.append(Action(stage, "B", m))
        if warm + m < micro_batches:
            actions.append(Action(stage, "F", warm + m))
    return actions


def _interleaved(stages: int, processes: int, micro_batches: int) -> Order:
    """The order that torch's schedule has made for all processes."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    own: list[Any] = [
        SimpleNamespace(
            stage_index=index, num_stages=stages, group_size=processes, group_rank=0, submod=None
        )
        for index in range(0, stages, processes)
    ]
    made: Any = ScheduleInterleaved1F1B(own, micro_batches, scale_grads=False)
    return [
        [
            Action(one.stage_index, one.computation_type.value, one.microbatch_index)
            for one in made.pipeline_order[process]
            if one is not None
        ]
        for process in range(processes)
    ]


def _needs(action: Action, stages: int, known: Mapping[Action, int]) -> list[Action]:
    """What must be done before a piece of work, by any process."""
    stage, kind, micro_batch = action
    if kind == "F":
        return [Action(stage - 1, "F", micro_batch)] if stage else []
    forward, above = Action(stage, "F", micro_batch), Action(stage + 1, "B", micro_batch)
    return [forward, above] if stage + 1 < stages and above in known else [forward]
