"""State that a policy sees, and its decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar, Protocol

from pydantic import AliasChoices, ConfigDict, Field, PlainSerializer, TypeAdapter

from tlora_fx.cost.estimator import Estimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.errors import DecisionWrong, TloraError, failed_at


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that share one base and one set of GPUs.

    place     which ones; empty until it is placed
    seconds   predicted, of one step of all its jobs
    formed    when these jobs came together on these GPUs, in seconds; what dwelling counts from
    """

    jobs: tuple[str, ...]
    gpus: int
    place: tuple[int, ...] = ()
    seconds: float = 0.0
    formed: float = 0.0


MAX_SLOWDOWN = 1.5


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as it was submitted; it never changes.

    base           jobs of one base, dtype and adapter arithmetic may share a group
    demand         one optimizer step
    gpus           GPUs that it asked for, and would have alone
    submitted      seconds
    max_slowdown   in a group of two or more it is at most this much slower than alone
    deadline       seconds; None: none
    longest        tokens of its longest sample

    max_slowdown_opt_in   the slowdown that it consents to, where others gain by it; at least
                          max_slowdown
    """

    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, ser_json_inf_nan="constants"
    )

    name: str
    base: str
    demand: Annotated[Demand, PlainSerializer(Demand._asdict)]
    gpus: int
    steps: int
    submitted: float = 0.0
    max_slowdown: float = MAX_SLOWDOWN
    deadline: float | None = None
    max_slowdown_opt_in: Annotated[
        float, Field(validation_alias=AliasChoices("max_slowdown_opt_in", "lends"))
    ] = 0.0
    longest: int = 0


#: Reads and writes a request, in whatever file it stands.
REQUEST = TypeAdapter(JobRequest)


@dataclass(slots=True)
class ActiveJob:
    """A job that is not done.

    solo_seconds   seconds of one step alone on the GPUs it asked for
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
class FailureRecord:
    """Number of failures of a job's groups; `killed` of those alone were by a signal."""

    shared: int = 0
    alone: int = 0
    killed: int = 0
    steps: float = 0.0
    suspect: bool = True


FAILURES = TypeAdapter(FailureRecord)


@dataclass(frozen=True, slots=True)
class ChangeCosts:
    """Costs of jobs that join and leave a running group, in seconds without progress.

    join     cost to all jobs of a group that some join
    leave    cost to all jobs of a group that some leave, which are committed then
    move     additional cost to a job that goes from one running group to another
    end      from a job's last step until it is written and told; others train on meanwhile, but a
             group that has no others keeps its GPUs
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    join: float = 0.5
    leave: float = 0.5
    move: float = 1.0
    end: float = 0.0

    def of(self, came: int, went: int) -> float:
        """Cost for a group, where so many come and go at once."""
        return max(self.join * (came > 0), self.leave * (went > 0))


@dataclass(slots=True)
class SchedulerState:
    """State of the scheduler at one moment.

    now             seconds
    jobs            active jobs that may run, by name, in order of submission
    horizon         seconds until the next decision
    switch_seconds  what forming a group costs it, in seconds without progress
    changes         costs of joins and leaves; None: a group changes by being formed anew
    """

    now: float
    cluster: Cluster
    estimator: Estimator
    jobs: Mapping[str, ActiveJob]
    groups: tuple[Group, ...] = ()
    horizon: float = 60.0
    switch_seconds: float = 20.0
    changes: ChangeCosts | None = None

    @property
    def change_seconds(self) -> float:
        """Seconds without progress that joins and leaves cost a group."""
        if self.changes is None:
            return self.switch_seconds
        return min(self.switch_seconds, max(self.changes.join, self.changes.leave))


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason for something a policy did, for `schedule explain`.

    verdict    such as "merged", "kept apart", "waits", "released 2 GPUs"
    gain       gain of the objective; None where none was computed
    """

    job: str
    verdict: str
    others: tuple[str, ...] = ()
    gain: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of what shall run until the next one.

    waiting    active jobs in none, in the order in which they will be taken
    reasons    recorded only where `Policy.decide` was asked to
    """

    groups: tuple[Group, ...]
    waiting: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = field(default=())


class Policy(Protocol):
    """Decides which jobs run, together with whom, on which GPUs."""

    name: str

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision; `explain` records reasons, which costs time."""


#: Two predictions that differ by less than this part are one.
ROUNDING = 1e-9


def slowdown(job: ActiveJob, seconds: float) -> float:
    """Delta: a step's seconds over those of the job alone on the GPUs that it asked for."""
    return seconds / job.solo_seconds


def limit_seconds(job: ActiveJob, now: float, *, lending: bool = False) -> float:
    """The longest step that a job bears in a group of two or more, in seconds.

    It is the job's slowdown bound. A deadline that the job alone would keep tightens it; one that
    is lost anyhow does not.

    lending   up to the slowdown that it consented to lend, instead of its bound
    """
    request = job.request
    bound = (
        max(request.max_slowdown, request.max_slowdown_opt_in) if lending else request.max_slowdown
    )
    limit = bound * job.solo_seconds
    if request.deadline is None or job.steps_left <= 0:
        return limit
    slack = (request.deadline - now) / job.steps_left
    return min(limit, slack) if slack >= job.solo_seconds else limit


def broken(
    jobs: Iterable[ActiveJob], seconds: float, now: float, *, lending: bool = True
) -> list[ActiveJob]:
    """The jobs that a group of two or more slows down too much; `lending` as of `limit_seconds`."""
    members = list(jobs)
    if len(members) < 2:
        return []
    bound = seconds * (1 - ROUNDING)
    return [job for job in members if bound > limit_seconds(job, now, lending=lending)]


NEAR = 0.8


class Urgency(IntEnum):
    """Urgency of a job, by how near it is to its bound.

    The paper uses one name for two quantities. Here a slowdown (`bounds`) admits a job to a group,
    and lateness orders jobs: rho = (elapsed + remaining) / (total alone), queueing included.
    Urgency is rho over the bound, in three classes, so that sorting by urgency allows a
    second key.
    """

    OK = 0
    NEAR = 1
    VIOLATING = 2


def urgency(job: ActiveJob, now: float, seconds: float | None = None) -> Urgency:
    """The class of a job's lateness over its bound, at a step of `seconds`; None: as alone."""
    pace = job.solo_seconds if seconds is None else seconds
    part = job.lateness(now, pace) / job.request.max_slowdown
    if part < NEAR:
        return Urgency.OK
    return Urgency.NEAR if part < 1 else Urgency.VIOLATING


def arrival(job: ActiveJob) -> tuple[float, str]:
    """A key by which jobs stand in order of submission, ties by name."""
    return job.request.submitted, job.request.name


def pressed_first(job: ActiveJob, now: float) -> tuple[bool, float, float, str]:
    """A key by which creditors come first, then the latest jobs, ties by submission and name.

    A short job grows late sooner than a long one, and no job stays behind for ever.
    """
    return job.credit <= 0, -job.lateness(now, job.solo_seconds), *arrival(job)


# What must hold of a policy's decision before it is carried out.


def decision_of(policy: Policy, state: SchedulerState, *, explain: bool = False) -> Decision:
    """Decision of a policy; raises DecisionWrong where it cannot be run, or the policy fails.

    explain   with its reasons
    """
    try:
        decision = policy.decide(state, explain=True) if explain else policy.decide(state)
    except TloraError:
        raise
    except Exception as error:
        raise DecisionWrong(
            f"policy '{policy.name}' raised {type(error).__name__}",
            at=failed_at(error),
            found=error,
            help="this is a mistake of the policy",
        ) from error
    if not isinstance(decision, Decision):
        raise DecisionWrong(
            f"policy '{policy.name}' made no decision",
            expected="a tlora_fx.scheduler.state.Decision",
            found=repr(decision)[:100],
            help="this is a mistake of the policy",
        )
    check(policy.name, decision, state)
    return decision


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
