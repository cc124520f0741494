"""A loop over a simulated cluster, on a clock that a test turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.scheduler.looping import Plain
from tests.simulator.faults import Faults, FaultyExecutor
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.formations import Callback, StepTimes
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ChangeCosts, Decision, Group, Policy, SchedulerState
from tlora_fx.scheduler.store import Ledger
from tlora_fx.simulator.replay import Clock


@dataclass
class Rig:
    """A loop on a clock that a test turns."""

    loop: Loop
    executor: FaultyExecutor
    clock: Clock

    def go(self, time: float) -> None:
        """To a time, stopping wherever something is due."""
        while True:
            due = self.loop.next_due(self.clock.now)
            step = min(time, self.executor.next_time(), time if due is None else due)
            self.clock.go_to(step)
            self.loop.advance(step)
            if step >= time:
                return


def rig(
    policy: Policy | str = "megatron",
    *,
    gpus: int = 8,
    estimator: Plain | None = None,
    ledger: Ledger | None = None,
    faults: Faults | None = None,
    callback: Callback | None = None,
    switch_seconds: float = 0.0,
    changes: ChangeCosts | None = None,
    **options: object,
) -> Rig:
    """A loop over a simulated cluster."""
    chosen = find_policy(policy) if isinstance(policy, str) else policy
    times, clock = StepTimes(estimator or Plain()), Clock()
    executor = FaultyExecutor(
        Cluster(gpus),
        times,
        clock,
        switch_seconds=switch_seconds,
        changes=changes,
        faults=faults,
    )
    loop = Loop(
        chosen,
        times.estimator,
        executor,
        ledger,
        options=LoopOptions(switch_seconds=switch_seconds, changes=changes, **options),  # type: ignore[arg-type]
        callback=callback,
        times=times,
    )
    return Rig(loop, executor, clock)


@dataclass
class Scripted:
    """Decides as a test says; by default nothing runs."""

    say: Callable[[SchedulerState], Sequence[Group]] = lambda state: state.groups
    seen: list[SchedulerState] = field(default_factory=list)
    name: str = "scripted"

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        self.seen.append(state)
        return Decision(tuple(self.say(state)))


class Counting(Callback):
    """Counts launches, and notes when jobs end."""

    def __init__(self) -> None:
        self.launches, self.ends = 0, []

    def launched(self, time, run):
        self.launches += 1

    def left(self, time, run, job, reason):
        self.ends.append(time)


def together(
    *names: str, gpus: int = 2, seconds: float = 1.5
) -> Callable[[SchedulerState], Sequence[Group]]:
    """All of these jobs that are there, in one group."""

    def say(state: SchedulerState) -> Sequence[Group]:
        jobs = tuple(name for name in names if name in state.jobs)
        return (Group(jobs, gpus, tuple(range(gpus)), seconds),) if jobs else ()

    return say
