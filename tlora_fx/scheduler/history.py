"""Records of a run's ledger, and what they tell of its past.

Reading disturbs nobody; the run may go on meanwhile.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Json, TypeAdapter

from tlora_fx.config.halving import HalvingSpec
from tlora_fx.errors import LedgerError
from tlora_fx.host.formats import require_known
from tlora_fx.runtime.reports.results_table import spec_of
from tlora_fx.runtime.run_folder import JOB, LEDGER
from tlora_fx.scheduler.state import Decision, Group, JobRequest

#: In the first format, `epochs` has no column `held`. The second has no tables `members` and
#: `decided`, the third no table `rungs`.
FORMAT = 4

Status = Literal["queued", "running", "done", "failed", "refused", "cancelled"]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, as far as it is certain.

    status          `running` where the process that wrote it may have died since
    epoch, path     the formation whose commit that was, and where its state lies
    credit          GPU-seconds given (positive) or taken
    first_started   seconds; None: not yet
    ended           seconds; None: not yet
    """

    request: Json[JobRequest]
    spec: Json[Mapping[str, Any]]
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

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.status in ("queued", "running")


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A formation of a group.

    started    when its first step began; None: never, or not known
    ended      None: it runs, or nobody saw its end
    how        it ended: "drained", "killed", "failed: ..."
    """

    epoch: int
    jobs: Json[tuple[str, ...]]
    place: Json[tuple[int, ...]]
    layout: str
    seconds: float
    launched: float
    started: float | None
    ended: float | None
    how: str


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Record of a decision at a moment, in seconds; without reasons."""

    time: float
    groups: Json[tuple[Group, ...]]
    waiting: Json[tuple[str, ...]]

    @property
    def decision(self) -> Decision:
        """Decision of the policy."""
        return Decision(self.groups, self.waiting)

    @property
    def jobs(self) -> list[str]:
        """Jobs that were active then."""
        return [name for group in self.groups for name in group.jobs] + list(self.waiting)


@dataclass(frozen=True, slots=True)
class RungRecord:
    """A job that has come to a rung of its halving, and is not compared there yet.

    is_active   it has not ended by itself
    """

    job: str
    step: int
    loss: float
    halving: Json[HalvingSpec]
    is_active: bool


Record = TypeVar("Record", JobRecord, EpochRecord, DecisionRecord, RungRecord)
#: Of each kind of records: what reads a list of them, their tables, and what orders them.
_KINDS: dict[Any, tuple[TypeAdapter[Any], str, str]] = {
    JobRecord: (TypeAdapter(list[JobRecord]), "jobs", "place"),
    EpochRecord: (TypeAdapter(list[EpochRecord]), "epochs", "epoch"),
    DecisionRecord: (TypeAdapter(list[DecisionRecord]), "decisions", "number"),
    RungRecord: (TypeAdapter(list[RungRecord]), "rungs JOIN jobs ON name = job", "place"),
}
#: Fields that are no columns of the same name, and what they are.
_COLUMNS = {
    "place": "gpus",
    "halving": "json_extract(spec, '$.halving')",
    "is_active": "status != 'done'",
}
#: Rows of the ledger that tell a run's past, by table.
Rows = dict[str, list[list[Any]]]


def _rows(
    base: sqlite3.Connection, kind: Any, where: str = "true", *values: object
) -> sqlite3.Cursor:
    _, tables, order = _KINDS[kind]
    columns = ", ".join(_COLUMNS.get(field.name, field.name) for field in fields(kind))
    query = f"SELECT {columns} FROM {tables} WHERE {where} ORDER BY {order}"  # noqa: S608  (our own)
    return base.execute(query, values)


def _records(kind: type[Record], rows: Iterable[Sequence[Any]]) -> list[Record]:
    names = [field.name for field in fields(kind)]
    content = [dict(zip(names, row, strict=True)) for row in rows]
    read: list[Record] = _KINDS[kind][0].validate_python(content)
    return read


def read_records(
    base: sqlite3.Connection, kind: type[Record], where: str = "true", *values: object
) -> list[Record]:
    """Records of a kind, in their order; inside `reading`, whatever is wrong is a LedgerError."""
    return _records(kind, _rows(base, kind, where, *values))


@dataclass(frozen=True, slots=True)
class History:
    """History in a ledger.

    decisions   the newest, and for each job the last one that it had a part in, in order of time
    """

    jobs: Mapping[str, JobRecord]
    epochs: tuple[EpochRecord, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()

    @classmethod
    def of_run(cls, folder: Path) -> History | None:
        """History of a run's folder; None where it has no ledger. Raises LedgerError."""
        with open_ledger(folder) as base:
            return None if base is None else cls.of_rows(_all_rows(base))

    @classmethod
    def of_job(cls, folder: Path, job: str) -> History | None:
        """A run's record of one job, and of the jobs that were decided upon with it.

        None where the run has no ledger. Raises LedgerError.
        """
        with open_ledger(folder) as base:
            if base is None:
                return None
            where = (
                "number = (SELECT max(number) FROM decisions) "
                "OR number = (SELECT decision FROM decided WHERE job = ?)"
            )
            decisions = read_records(base, DecisionRecord, where, job)
            names = json.dumps([job, *(name for each in decisions for name in each.jobs)])
            where = "name IN (SELECT value FROM json_each(?))"
            jobs = read_records(base, JobRecord, where, names)
            where = "epoch IN (SELECT epoch FROM members WHERE job = ?)"
            epochs = read_records(base, EpochRecord, where, job)
        return cls({each.name: each for each in jobs}, tuple(epochs), tuple(decisions))

    @classmethod
    def of_rows(cls, rows: Rows) -> History:
        """History from rows of the ledger's tables; raises KeyError, ValueError for other rows."""
        jobs = _records(JobRecord, rows["jobs"])
        epochs = tuple(_records(EpochRecord, rows["epochs"]))
        decisions = tuple(_last(_records(DecisionRecord, rows["decisions"])))
        return cls({job.name: job for job in jobs}, epochs, decisions)

    def last(self, job: str) -> DecisionRecord | None:
        """The last decision about a job."""
        return next((record for record in reversed(self.decisions) if job in record.jobs), None)

    def at(self, time: float) -> Decision | None:
        """Decision of a moment; None where there is none."""
        return next((record.decision for record in self.decisions if record.time == time), None)

    def formations(self, job: str) -> list[EpochRecord]:
        """The groups that a job was in."""
        return [epoch for epoch in self.epochs if job in epoch.jobs]


def specs_of_run(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Each job as its file describes it, by name, as far as the run's folder tells.

    The ledger of `run` has all jobs. Of `train`, a job's folder tells once the job has begun.
    """
    history = History.of_run(folder)
    specs = {} if history is None else {name: job.spec for name, job in history.jobs.items()}
    for path in folder.glob(f"*/{JOB}"):
        spec = spec_of(path.parent)
        if spec is not None:
            specs.setdefault(path.parent.name, spec)
    return specs


def rows_of_run(folder: Path) -> Rows | None:
    """The rows of a run's ledger that tell its past, as JSON can hold them; None: it has none.

    What came with a job is for whoever runs it, and is not carried along.

    raises   LedgerError
    """
    with open_ledger(folder) as base:
        if base is None:
            return None
        rows = _all_rows(base)
        kept = {record.time for record in _last(_records(DecisionRecord, rows["decisions"]))}
    return {
        "jobs": [[request, "{}", *rest] for request, _, *rest in rows["jobs"]],
        "epochs": rows["epochs"],
        "decisions": [row for row in rows["decisions"] if row[0] in kept],
    }


def _all_rows(base: sqlite3.Connection) -> Rows:
    kinds = (JobRecord, EpochRecord, DecisionRecord)
    return {_KINDS[kind][1]: list(map(list, _rows(base, kind))) for kind in kinds}


def _last(decisions: Sequence[DecisionRecord]) -> list[DecisionRecord]:
    """The newest decision, and the last one about each job."""
    last = {name: record for record in decisions for name in record.jobs}
    wanted = {id(record) for record in (*last.values(), *decisions[-1:])}
    return [record for record in decisions if id(record) in wanted]


@contextmanager
def open_ledger(folder: Path) -> Iterator[sqlite3.Connection | None]:
    """A run's ledger as it is at one moment; None where it has none. Raises LedgerError."""
    path = folder / LEDGER
    if not path.is_file():
        yield None
        return
    address = f"{path.absolute().as_uri()}?mode=ro"
    with reading(path), closing(sqlite3.connect(address, uri=True)) as base:
        require_known_format(base, path)
        base.execute("BEGIN")
        yield base


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Inside, what is wrong with a ledger's content is a LedgerError."""
    try:
        yield
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(
            "the run's ledger cannot be read",
            file=path,
            reason=f"{type(error).__name__}: {error}",
            help="name the folder that `tlora-fx run` was given by -o; a damaged ledger comes "
            "back from a backup alone",
        ) from error


def require_known_format(
    base: sqlite3.Connection, path: Path | str, *, name: str = "format", known: int = FORMAT
) -> int:
    """Refuse a ledger of a newer format before anything is read or written; an empty one is none.

    name      of the fact that has the format
    known     the newest format that is read
    returns   the format; 0 where the ledger does not say
    raises    NewerFormat; sqlite3.Error where it is no ledger
    """
    if not base.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
        return 0
    query = "SELECT name, value FROM facts WHERE name IN (?, 'version')"
    facts = dict(base.execute(query, (name,)).fetchall())
    try:
        format = int(facts.get(name, 0))
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"the fact '{name}' is no number") from error
    version = str(facts.get("version", ""))
    require_known("the run's ledger", path, format, known=known, version=version)
    return format
