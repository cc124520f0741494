"""The rows of the ledger, as they are read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from tlora_fx.cost.demand import Demand
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import Decision

Status = Literal["queued", "running", "done", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, as far as it is certain.

    request         as it was submitted
    spec            what came with it
    status          `running` where the process that wrote it may have died since
    reason          why it failed or was refused
    steps           that are committed
    epoch, path     the formation whose commit that was, and where its state lies
    credit          GPU-seconds given (positive) or taken
    first_started   seconds; None: not yet
    ended           seconds; None: not yet
    """

    COLUMNS: ClassVar[str] = (
        "request, spec, status, reason, steps, epoch, path, credit, first_started, ended"
    )

    request: JobRequest
    spec: Mapping[str, Any]
    status: Status
    reason: str
    steps: float
    epoch: int | None
    path: str
    credit: float
    first_started: float | None
    ended: float | None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.request.name

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """From a row with these columns."""
        request, spec, *others = row
        return cls(request_of_json(request), json.loads(spec), *others)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A formation of a group.

    jobs       in their order
    place      its GPUs
    layout     how it was spread over them, as text
    seconds    predicted, of one step
    launched   seconds
    started    when its first step began; None: never, or not known
    ended      None: it runs, or nobody saw its end
    how        it ended: "drained", "killed", "failed: ..."
    """

    COLUMNS: ClassVar[str] = "epoch, jobs, gpus, layout, seconds, launched, started, ended, how"

    epoch: int
    jobs: tuple[str, ...]
    place: tuple[int, ...]
    layout: str
    seconds: float
    launched: float
    started: float | None
    ended: float | None
    how: str

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """From a row with these columns."""
        epoch, jobs, place, *others = row
        return cls(epoch, tuple(json.loads(jobs)), tuple(json.loads(place)), *others)


def decision_of_json(groups: str, waiting: str) -> Decision:
    """The decision that two texts are of, without its reasons."""
    made = [
        Group(**{**group, "jobs": tuple(group["jobs"]), "place": tuple(group["place"])})
        for group in json.loads(groups)
    ]
    return Decision(tuple(made), tuple(json.loads(waiting)))


def request_json(request: JobRequest) -> str:
    """A request as text."""
    return json.dumps({**asdict(request), "demand": request.demand._asdict()})


def request_of_json(text: str) -> JobRequest:
    """The request that a text is of."""
    fields = json.loads(text)
    return JobRequest(**{**fields, "demand": Demand(**fields["demand"])})
