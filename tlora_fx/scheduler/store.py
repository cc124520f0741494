"""Ledger of a run, in SQLite: jobs, commits, groups and decisions.

Each transition is one transaction, and the disk holds it before the call returns (WAL,
synchronous=FULL). Killed at any point and opened again, the ledger tells what was submitted, what
is done, and from which committed state each other job goes on.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Json, TypeAdapter

from tlora_fx.config.halving import HalvingSpec
from tlora_fx.cost.estimator import Layout
from tlora_fx.errors import LedgerError
from tlora_fx.host.formats import require_known
from tlora_fx.host.version import __version__
from tlora_fx.runtime.run_folder import LEDGER
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    ExecutorEvent,
    Failed,
    Finished,
    GroupStarted,
)
from tlora_fx.scheduler.relocation import relocate
from tlora_fx.scheduler.state import (
    REQUEST,
    Decision,
    Group,
    JobRequest,
)

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


_GROUPS = TypeAdapter(tuple[Group, ...])
Record = TypeVar("Record", JobRecord, EpochRecord, DecisionRecord, RungRecord)
_RECORDS: dict[Any, TypeAdapter[Any]] = {
    JobRecord: TypeAdapter(list[JobRecord]),
    EpochRecord: TypeAdapter(list[EpochRecord]),
    DecisionRecord: TypeAdapter(list[DecisionRecord]),
    RungRecord: TypeAdapter(list[RungRecord]),
}
#: The columns of each record, in the order of its fields.
_COLUMNS = {
    "jobs": "request, spec, status, reason, steps, epoch, path, credit, first_started, ended",
    "epochs": "epoch, jobs, gpus, layout, seconds, launched, started, ended, how",
    "decisions": "time, groups, waiting",
}
_ORDER = {"jobs": "place", "epochs": "epoch", "decisions": "number"}


def _select(table: str, where: str = "") -> str:
    """A query for records of a table, in their order."""
    condition = f" WHERE {where}" if where else ""
    columns, order = _COLUMNS[table], _ORDER[table]
    return f"SELECT {columns} FROM {table}{condition} ORDER BY {order}"  # noqa: S608  (our own)


def records(kind: type[Record], rows: Iterable[Sequence[Any]]) -> list[Record]:
    """Rows of the ledger as records; raises ValueError where they are none."""
    names = [field.name for field in fields(kind)]
    content = [dict(zip(names, row, strict=True)) for row in rows]
    read: list[Record] = _RECORDS[kind].validate_python(content)
    return read


#: In the first format, `epochs` has no column `held`. The second has no tables `members` and
#: `decided`, the third no table `rungs`.
FORMAT = 4
MEMBERS_FORMAT = 3

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    place INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, request TEXT NOT NULL,
    spec TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    steps REAL NOT NULL DEFAULT 0, epoch INTEGER, path TEXT NOT NULL DEFAULT '',
    credit REAL NOT NULL DEFAULT 0, first_started REAL, ended REAL);
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, jobs TEXT NOT NULL, gpus TEXT NOT NULL, layout TEXT NOT NULL,
    seconds REAL NOT NULL, launched REAL NOT NULL, started REAL, ended REAL,
    how TEXT NOT NULL DEFAULT '', held REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, groups TEXT NOT NULL, waiting TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, sha256 TEXT NOT NULL, told TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS origins (name TEXT PRIMARY KEY, path TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
    job TEXT NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (job, epoch)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decided (job TEXT PRIMARY KEY, decision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rungs (
    job TEXT NOT NULL, step INTEGER NOT NULL, loss REAL NOT NULL, kept INTEGER,
    PRIMARY KEY (job, step)) WITHOUT ROWID;
"""

#: Of a ledger that was written without them: the groups that each job was in, and the last decision
#: that it had a part in.
_ADD_PAST = """
INSERT OR IGNORE INTO members SELECT value, epoch FROM epochs, json_each(epochs.jobs);
INSERT OR REPLACE INTO decided SELECT job, max(number) FROM (
    SELECT job.value AS job, number FROM decisions, json_each(decisions.groups) AS one,
        json_each(one.value, '$.jobs') AS job
    UNION ALL SELECT value, number FROM decisions, json_each(decisions.waiting)
) GROUP BY job;
"""

#: What is read again and again is found without a look at jobs and groups that have ended.
_INDEXES = """
CREATE INDEX IF NOT EXISTS jobs_active ON jobs (place) WHERE status IN ('queued', 'running');
CREATE INDEX IF NOT EXISTS jobs_refused ON jobs (place) WHERE status = 'refused';
CREATE INDEX IF NOT EXISTS jobs_by_any_case ON jobs (name COLLATE NOCASE);
CREATE INDEX IF NOT EXISTS epochs_open ON epochs (epoch) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS decisions_by_time ON decisions (time);
CREATE INDEX IF NOT EXISTS rungs_undecided ON rungs (job) WHERE kept IS NULL;
"""
_ACTIVE = "status IN ('queued', 'running')"

#: Older ledgers do not say how long a group held its GPUs. A group that ended is charged from its
#: launch to its end. The end of a killed one was written at the next start, so that it is charged
#: to the last decision or start that was written before. A clock that was set back charges nothing.
_ADD_HELD = """
ALTER TABLE epochs ADD COLUMN held REAL NOT NULL DEFAULT 0;
UPDATE epochs SET held = max(0, ended - launched) WHERE ended IS NOT NULL AND how != ?;
UPDATE epochs SET held = max(0, coalesce(started, launched) - launched, coalesce((
    SELECT max(time) FROM decisions WHERE time < coalesce(epochs.ended, time + 1)
), launched) - launched) WHERE ended IS NULL OR how = ?;
"""
#: How an epoch ended whose processes another one took over: this, and its number.
GOES_ON = "goes on as "
#: Why a job waits that has come to a rung.
PARKED = "waits for the other jobs of its halving, to be compared with them"
#: How an epoch ended whose process was killed.
KILLED = "the run was killed"


class Ledger:
    """The ledger of one run; one process writes it.

    path     its file, or ":memory:"
    clock    seconds of a monotonic clock, by which groups are charged for their GPUs
    raises   LedgerError where it cannot be opened; NewerFormat where a newer version wrote it
    """

    def __init__(
        self, path: Path | str = ":memory:", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = str(path)
        self._clock = clock
        # When each group of this process that holds its GPUs was last known to, by epoch.
        self._last_alive: dict[int, float] = {}
        # Epochs that are to take over another's GPUs, by that one.
        self._successors: dict[int, int] = {}
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None)
            require_known_format(self._base, self.path)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(_TABLES + _INDEXES)
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be opened",
                file=self.path,
                reason=error,
                help="choose another folder with -o, or mend the disk",
            ) from error
        with self._transition() as base:
            _add_held(base)
            if require_known_format(base, self.path) < MEMBERS_FORMAT:
                for statement in _ADD_PAST.strip().removesuffix(";").split(";"):
                    base.execute(statement)
            write_fact(base, "format", str(FORMAT))
            write_fact(base, "version", __version__)
            if self.path != ":memory:":
                relocate(base, Path(self.path).parent)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def fact(self, name: str, otherwise: str) -> str:
        """A fact of the run; where it is not there yet, `otherwise` becomes it."""
        with self._transition() as base:
            base.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            [value] = base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    def submit(
        self, request: JobRequest, spec: Mapping[str, Any] | None = None, file: str = ""
    ) -> None:
        """A job is queued, with what its runner must know; nothing happens where it is known.

        A job that was cancelled, or refused before it began, is queued again.

        file   the job file that it comes from, if from one
        """
        self._enter(request, spec, "queued", "", file)

    def refuse(
        self,
        request: JobRequest,
        reason: str,
        spec: Mapping[str, Any] | None = None,
        file: str = "",
    ) -> None:
        """A job will not run as it is; nothing happens where it is known, and done or failed.

        file   as of `submit`
        """
        self._enter(request, spec, "refused", reason, file)
        with self._transition() as base:
            base.execute(
                "UPDATE jobs SET status = 'refused', reason = ? WHERE name = ? "
                "AND status IN ('queued', 'running')",
                (reason, request.name),
            )

    def _enter(
        self,
        request: JobRequest,
        spec: Mapping[str, Any] | None,
        status: str,
        reason: str,
        file: str = "",
    ) -> None:
        text = REQUEST.dump_json(request).decode()
        query = (
            "INSERT OR IGNORE INTO jobs (name, request, spec, status, reason) VALUES (?,?,?,?,?)"
        )
        name = request.name
        with self._transition() as base:
            base.execute(
                "DELETE FROM jobs WHERE name = ? AND (status = 'cancelled' OR "
                "status = 'refused' AND first_started IS NULL)",
                (name,),
            )
            base.execute(
                "DELETE FROM rungs WHERE job = ? "
                "AND NOT EXISTS (SELECT 1 FROM jobs WHERE name = job)",
                (name,),
            )
            base.execute(query, (name, text, json.dumps(spec or {}), status, reason))
            if file:
                base.execute("INSERT OR REPLACE INTO origins VALUES (?, ?)", (name, file))

    def decide(
        self, time: float, decision: Decision, credit: Mapping[str, float] | None = None
    ) -> None:
        """Record a decision, and the credit of jobs from then on."""
        groups = _GROUPS.dump_json(decision.groups).decode()
        with self._transition() as base:
            number = base.execute(
                "INSERT INTO decisions (time, groups, waiting) VALUES (?, ?, ?)",
                (time, groups, json.dumps(decision.waiting)),
            ).lastrowid
            jobs = [name for group in decision.groups for name in group.jobs] + [*decision.waiting]
            base.executemany(
                "INSERT OR REPLACE INTO decided VALUES (?, ?)", [(name, number) for name in jobs]
            )
            base.executemany(
                "UPDATE jobs SET credit = ? WHERE name = ?",
                [(amount, name) for name, amount in (credit or {}).items()],
            )

    def launch(
        self,
        group: Group,
        epoch: int,
        layout: Layout | None,
        time: float,
        *,
        origin: int | None = None,
    ) -> None:
        """A group is launched: written down before it is, so that no epoch is used twice.

        origin   epoch that holds the GPUs until this one takes over; None: this one holds them now
        """
        row = (epoch, json.dumps(group.jobs), json.dumps(group.place), str(layout or ""))
        with self._transition() as base:
            base.execute(
                "INSERT OR IGNORE INTO epochs (epoch, jobs, gpus, layout, seconds, launched) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, group.seconds, time),
            )
            base.executemany(
                "INSERT OR IGNORE INTO members VALUES (?, ?)",
                [(name, epoch) for name in group.jobs],
            )
            base.executemany(
                "UPDATE jobs SET status = 'running', first_started = coalesce(first_started, ?) "
                "WHERE name = ? AND status IN ('queued', 'running')",
                [(time, name) for name in group.jobs],
            )
        if origin is None:
            self._last_alive[epoch] = self._clock()
        else:
            self._successors[origin] = epoch

    def heartbeat(self) -> None:
        """Charge each running group for the time since its last sign of life.

        Signs of life are its launch, heartbeats and its end. What follows the last of them before
        a process dies is not charged.
        """
        if not self._last_alive:
            return
        now = self._clock()
        with self._transition() as base:
            for epoch in self._last_alive:
                self._charge(base, epoch, now)
        self._last_alive = dict.fromkeys(self._last_alive, now)

    def skip_time(self) -> None:
        """Charge no group for the time since its last sign of life."""
        self._last_alive = dict.fromkeys(self._last_alive, self._clock())

    def _charge(self, base: sqlite3.Connection, epoch: int, now: float) -> None:
        since = self._last_alive.get(epoch)
        if since is not None:
            base.execute("UPDATE epochs SET held = held + ? WHERE epoch = ?", (now - since, epoch))

    def _end(self, base: sqlite3.Connection, epoch: int, how: str, time: float, now: float) -> None:
        self._charge(base, epoch, now)
        _end(base, epoch, how, time)

    def _hand_over(self, epoch: int, now: float) -> None:
        """A group holds its GPUs no longer: those that were to take over hold them from now on."""
        was_alive = self._last_alive.pop(epoch, None) is not None
        successor = self._successors.pop(epoch, None)
        if was_alive and successor is not None:
            self._last_alive[successor] = now

    def record(self, event: ExecutorEvent) -> None:
        """Write down an event of an executor; progress that is not committed leaves no trace."""
        now = self._clock()
        with self._transition() as base:
            match event:
                case GroupStarted():
                    base.execute(
                        "UPDATE epochs SET started = ? WHERE epoch = ? AND started IS NULL",
                        (event.time, event.epoch),
                    )
                case Committed():
                    _commit(base, event.epoch, event.steps, event.path)
                    base.executemany(
                        "INSERT OR IGNORE INTO rungs VALUES (?, ?, ?, NULL)",
                        [(job, event.steps[job], loss) for job, loss in event.rungs.items()],
                    )
                    base.executemany(
                        "UPDATE jobs SET reason = ? WHERE name = ? AND EXISTS "
                        "(SELECT 1 FROM rungs WHERE job = name AND kept IS NULL)",
                        [(PARKED, job) for job in event.rungs],
                    )
                case Finished():
                    _commit(base, event.epoch, {event.job: event.steps}, "")
                    _settle(base, event.job, "done", "", event.time)
                case Failed(job=None):
                    _commit(base, event.epoch, event.steps, "")
                    self._end(base, event.epoch, f"failed: {event.reason}", event.time, now)
                case Failed(job=str()):
                    _settle(base, str(event.job), "failed", event.reason, event.time)
                case Drained():
                    _commit(base, event.epoch, event.steps, "")
                    how = "drained" if event.successor is None else f"{GOES_ON}{event.successor}"
                    self._end(base, event.epoch, how, event.time, now)
        if isinstance(event, Drained) or (isinstance(event, Failed) and event.job is None):
            self._hand_over(event.epoch, now)

    def end(self, epoch: int, how: str, time: float) -> None:
        """A group ended otherwise than by draining or failing, such as by being killed."""
        now = self._clock()
        with self._transition() as base:
            self._end(base, epoch, how, time, now)
        self._hand_over(epoch, now)

    def give_up(self, job: str, reason: str, time: float) -> None:
        """A job will not be run again."""
        with self._transition() as base:
            _settle(base, job, "failed", reason, time)

    def undecided_rungs(self) -> list[RungRecord]:
        """Jobs that are to be compared, in the order of `jobs`; raises LedgerError."""
        query = (
            "SELECT job, step, loss, json_extract(spec, '$.halving'), status != 'done' "
            "FROM rungs JOIN jobs ON name = job "
            "WHERE kept IS NULL AND status IN ('queued', 'running', 'done') ORDER BY place"
        )
        with _reading(self.path):
            return records(RungRecord, self._base.execute(query))

    def has_rung(self, job: str, step: int) -> bool:
        """Whether a job has come to a rung, decided or not; raises LedgerError."""
        query = "SELECT 1 FROM rungs WHERE job = ? AND step = ?"
        with _reading(self.path):
            return self._base.execute(query, (job, step)).fetchone() is not None

    def decide_rung(
        self, step: int, kept: Collection[str], ended: Mapping[str, str], time: float
    ) -> None:
        """Write down which jobs go on from a rung, and for which reasons the others end there."""
        with self._transition() as base:
            base.executemany(
                "UPDATE rungs SET kept = ? WHERE job = ? AND step = ?",
                [(name in kept, name, step) for name in (*kept, *ended)],
            )
            base.executemany(
                "UPDATE jobs SET reason = '' WHERE name = ? AND reason = ?",
                [(name, PARKED) for name in kept],
            )
            for name, reason in ended.items():
                _settle(base, name, "done", reason, time)

    def retry(self) -> None:
        """Jobs that were refused although they had begun are queued: they may go on now."""
        with self._transition() as base:
            base.execute(
                "UPDATE jobs SET status = 'queued', reason = '' "
                "WHERE status = 'refused' AND first_started IS NOT NULL"
            )

    def cancel(self, job: str, reason: str, time: float, *, begun: bool = False) -> bool:
        """A job that is queued is taken back; whether it was.

        begun   also one that was in a group before
        """
        with self._transition() as base:
            done = base.execute(
                "UPDATE jobs SET status = 'cancelled', reason = ?, ended = ? WHERE name = ? "
                "AND status = 'queued' AND (? OR first_started IS NULL)",
                (reason, time, job, begun),
            )
            return done.rowcount > 0

    def jobs(self) -> list[JobRecord]:
        """All jobs, in the order in which they were submitted; raises LedgerError."""
        with _reading(self.path):
            return records(JobRecord, self._base.execute(_select("jobs")))

    def active_jobs(self) -> list[JobRecord]:
        """Jobs that have not ended, in the order of `jobs`; raises LedgerError."""
        with _reading(self.path):
            return records(JobRecord, self._base.execute(_select("jobs", _ACTIVE)))

    def refused_jobs(self) -> list[JobRecord]:
        """Jobs that were refused, in the order of `jobs`; raises LedgerError."""
        with _reading(self.path):
            return records(JobRecord, self._base.execute(_select("jobs", "status = 'refused'")))

    def job_count(self) -> int:
        """Number of jobs; raises LedgerError."""
        with _reading(self.path):
            [count] = self._base.execute("SELECT count(*) FROM jobs").fetchone()
            return int(count)

    def spec(self, job: str, *, besides: Collection[str] = ()) -> Mapping[str, Any] | None:
        """What a job's runner must know; None where there is no such job. Raises LedgerError.

        besides   statuses of jobs that count as not there
        """
        with _reading(self.path):
            row = self._base.execute(
                "SELECT spec, status FROM jobs WHERE name = ?", (job,)
            ).fetchone()
            if row is None or row[1] in besides:
                return None
            spec: Mapping[str, Any] = json.loads(row[0])
            return spec

    def open_epochs(self) -> list[EpochRecord]:
        """Formations whose end nobody saw, in their order; raises LedgerError."""
        with _reading(self.path):
            return records(EpochRecord, self._base.execute(_select("epochs", "ended IS NULL")))

    def epochs(self) -> list[EpochRecord]:
        """All formations of groups, in their order; raises LedgerError."""
        with _reading(self.path):
            return records(EpochRecord, self._base.execute(_select("epochs")))

    def next_epoch(self) -> int:
        """A number that no formation has had; raises LedgerError."""
        with _reading(self.path):
            [last] = self._base.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()
            return int(last) + 1

    def decisions(self) -> list[DecisionRecord]:
        """Records of decisions, without reasons; raises LedgerError."""
        with _reading(self.path):
            return records(DecisionRecord, self._base.execute(_select("decisions")))

    def note_file(self, path: str, sha256: str, told: str) -> None:
        """Remember what was said of a job file."""
        with self._transition() as base:
            base.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (path, sha256, told))

    def file(self, path: str) -> tuple[str, str]:
        """SHA-256 of a job file as it was read, and what was said of it; "" where it was not."""
        with _reading(self.path):
            row = self._base.execute(
                "SELECT sha256, told FROM files WHERE path = ?", (path,)
            ).fetchone()
            return ("", "") if row is None else (row[0], row[1])

    def files(self) -> dict[str, tuple[str, str]]:
        """SHA-256 of each job file as it was read, and what was said of it, by path."""
        with _reading(self.path):
            rows = self._base.execute("SELECT path, sha256, told FROM files")
            return {path: (sha256, told) for path, sha256, told in rows}

    def forget_file(self, path: str) -> None:
        """A job file is gone: one of this name that comes later is read, whatever it holds."""
        with self._transition() as base:
            base.execute("DELETE FROM files WHERE path = ?", (path,))

    def move(self, job: str, path: str) -> None:
        """A job's file has another name now."""
        with self._transition() as base:
            base.execute("INSERT OR REPLACE INTO origins VALUES (?, ?)", (job, path))

    def origins(self) -> dict[str, str]:
        """File that each job comes from, by job."""
        return dict(self._base.execute("SELECT name, path FROM origins").fetchall())

    @contextmanager
    def _transition(self) -> Iterator[sqlite3.Connection]:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                # SQLite itself has ended a transaction that met a full disk.
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be written",
                file=self.path,
                reason=error,
                help="free space or mend the disk, then start the run again with the same -o",
            ) from error


def _add_held(base: sqlite3.Connection) -> None:
    """Add the seconds that groups held their GPUs to a ledger that was written without them."""
    if "held" in {name for _, name, *_ in base.execute("PRAGMA table_info(epochs)")}:
        return
    killed = f"failed: {KILLED}"
    for statement in _ADD_HELD.strip().removesuffix(";").split(";"):
        base.execute(statement, (killed,) * statement.count("?"))


def _commit(base: sqlite3.Connection, epoch: int, steps: Mapping[str, float], path: str) -> None:
    """Commits only go forward: what came late of an older epoch changes nothing."""
    for name, done in steps.items():
        base.execute(
            "UPDATE jobs SET steps = ?, epoch = ?, path = CASE WHEN ? = '' THEN path ELSE ? END "
            "WHERE name = ? AND steps <= ? AND coalesce(epoch, 0) <= ?",
            (done, epoch, path, path, name, done, epoch),
        )


def _settle(base: sqlite3.Connection, job: str, status: str, reason: str, time: float) -> None:
    base.execute(
        "UPDATE jobs SET status = ?, reason = ?, ended = ? WHERE name = ? "
        "AND status IN ('queued', 'running')",
        (status, reason, time, job),
    )


def _end(base: sqlite3.Connection, epoch: int, how: str, time: float) -> None:
    base.execute(
        "UPDATE epochs SET ended = ?, how = ? WHERE epoch = ? AND ended IS NULL", (time, how, epoch)
    )
    [jobs] = base.execute("SELECT jobs FROM epochs WHERE epoch = ?", (epoch,)).fetchone() or ("[]",)
    # Jobs that go on as part of another formation are in that one too.
    others = base.execute("SELECT jobs FROM epochs WHERE ended IS NULL").fetchall()
    there = {name for [names] in others for name in json.loads(names)}
    base.executemany(
        "UPDATE jobs SET status = 'queued' WHERE name = ? AND status = 'running'",
        [(name,) for name in json.loads(jobs) if name not in there],
    )


Rows = dict[str, list[list[Any]]]


@dataclass(frozen=True, slots=True)
class History:
    """History in a ledger.

    Reading disturbs nobody; the run may go on meanwhile.

    decisions   the newest, and for each job the last one that it had a part in, in order of time
    """

    jobs: Mapping[str, JobRecord]
    epochs: tuple[EpochRecord, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()

    @classmethod
    def of_run(cls, folder: Path) -> History | None:
        """History of a run's folder; None where it has no ledger. Raises LedgerError."""
        path = folder / LEDGER
        if not path.is_file():
            return None
        rows = _read(path)
        with _reading(path):
            return cls.of_rows(rows)

    @classmethod
    def of_job(cls, folder: Path, job: str) -> History | None:
        """What a run's ledger tells of one job, and of the jobs that were decided upon with it.

        None where the run has no ledger. Raises LedgerError.
        """
        path = folder / LEDGER
        if not path.is_file():
            return None
        with _opened(path) as base:
            where = (
                "number = (SELECT max(number) FROM decisions) "
                "OR number = (SELECT decision FROM decided WHERE job = ?)"
            )
            decisions = records(DecisionRecord, base.execute(_select("decisions", where), (job,)))
            names = json.dumps([job, *(name for each in decisions for name in each.jobs)])
            where = "name IN (SELECT value FROM json_each(?))"
            jobs = records(JobRecord, base.execute(_select("jobs", where), (names,)))
            where = "epoch IN (SELECT epoch FROM members WHERE job = ?)"
            epochs = records(EpochRecord, base.execute(_select("epochs", where), (job,)))
        return cls({each.name: each for each in jobs}, tuple(epochs), tuple(decisions))

    @classmethod
    def of_rows(cls, rows: Rows) -> History:
        """History from rows of the ledger's tables; raises KeyError, ValueError for other rows."""
        jobs = records(JobRecord, rows["jobs"])
        epochs = tuple(records(EpochRecord, rows["epochs"]))
        decisions = tuple(_last(records(DecisionRecord, rows["decisions"])))
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


def rows_of_run(folder: Path) -> Rows | None:
    """The rows of a run's ledger that tell its past, as JSON can hold them; None: it has none.

    What came with a job is for whoever runs it, and is not carried along.

    raises   LedgerError
    """
    path = folder / LEDGER
    if not path.is_file():
        return None
    rows = _read(path)
    with _reading(path):
        kept = {record.time for record in _last(records(DecisionRecord, rows["decisions"]))}
    return {
        "jobs": [[request, "{}", *rest] for request, _, *rest in rows["jobs"]],
        "epochs": rows["epochs"],
        "decisions": [row for row in rows["decisions"] if row[0] in kept],
    }


def _last(decisions: Sequence[DecisionRecord]) -> list[DecisionRecord]:
    """The newest decision, and the last one about each job."""
    last = {name: record for record in decisions for name in record.jobs}
    wanted = {id(record) for record in (*last.values(), *decisions[-1:])}
    return [record for record in decisions if id(record) in wanted]


def _read(path: Path) -> Rows:
    with _opened(path) as base:
        return {name: list(map(list, base.execute(_select(name)))) for name in _COLUMNS}


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A ledger as it is at one moment; nobody is disturbed. Raises LedgerError."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    with _reading(path), closing(sqlite3.connect(address, uri=True)) as base:
        require_known_format(base, path)
        base.execute("BEGIN")
        yield base


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
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


def write_fact(base: sqlite3.Connection, name: str, value: str) -> None:
    """Write down a fact of the run, where it is not written so already."""
    base.execute(
        "INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value "
        "WHERE value != excluded.value",
        (name, value),
    )
