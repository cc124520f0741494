"""What a policy sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tlora_fx.cost.cluster import Cluster
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.request import JobRequest


@dataclass(slots=True)
class ActiveJob:
    """A job that is not done.

    solo_seconds   of one step alone on the GPUs it asked for
    steps_done     may be a fraction between commits, in simulation
    credit         GPU-seconds that it has given (positive) or taken, beyond its own
    """

    request: JobRequest
    solo_seconds: float
    steps_done: float = 0.0
    credit: float = 0.0

    @property
    def name(self) -> str:
        """The job's name."""
        return self.request.name

    @property
    def steps_left(self) -> float:
        """Steps until it is done."""
        return max(0.0, self.request.steps - self.steps_done)

    def lateness(self, now: float, seconds: float) -> float:
        """(Elapsed + remaining at `seconds` a step) over the time of all its steps alone: rho.

        source   field notes: rho_j = (elapsed + remaining * T_now) / (total * T_solo_j)
        """
        elapsed = max(0.0, now - self.request.submitted)
        total = self.request.steps * self.solo_seconds
        return (elapsed + self.steps_left * seconds) / total if total > 0 else float("inf")


@dataclass(slots=True)
class State:
    """One moment.

    now             seconds
    jobs            active jobs that may run, by name, in order of submission
    groups          what runs now
    horizon         seconds until the next decision
    switch_seconds  what forming a group costs it, in seconds without progress
    """

    now: float
    cluster: Cluster
    estimator: Estimator
    jobs: Mapping[str, ActiveJob]
    groups: tuple[Group, ...] = ()
    horizon: float = 60.0
    switch_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a policy did something, for `schedule explain`.

    verdict    such as "merged", "kept apart", "waits", "released 2 GPUs"
    others     the jobs that it was compared with
    gain       of the objective; None where it never came to that
    detail     with its numbers, for people
    """

    job: str
    verdict: str
    others: tuple[str, ...] = ()
    gain: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall run until the next one.

    groups     placed; every job is in at most one
    waiting    active jobs in none, in the order in which they will be taken
    reasons    recorded only where `Policy.decide` was asked to
    """

    groups: tuple[Group, ...]
    waiting: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = field(default=())


class Policy(Protocol):
    """Decides which jobs run, together with whom, on which GPUs."""

    name: str

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision.

        explain   record reasons; costs time
        """
