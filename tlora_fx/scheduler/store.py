"""Ledger of a run, in SQLite: jobs, commits, groups and decisions.

Each transition is one transaction, and the disk holds it before the call returns (WAL,
synchronous=FULL). Killed at any point and opened again, the ledger tells what was submitted, what
is done, and from which committed state each other job goes on.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tlora_fx.cost.estimator import Layout
from tlora_fx.errors import LedgerError
from tlora_fx.host.durable import transaction
from tlora_fx.host.version import __version__
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    ExecutorEvent,
    Failed,
    Finished,
    GroupStarted,
)
from tlora_fx.scheduler.history import (
    FORMAT,
    DecisionRecord,
    EpochRecord,
    JobRecord,
    Record,
    RungRecord,
    read_records,
    reading,
    require_known_format,
)
from tlora_fx.scheduler.state import (
    FAILURES,
    REQUEST,
    Decision,
    FailureRecord,
    Group,
    JobRequest,
)

_GROUPS = TypeAdapter(tuple[Group, ...])
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
CREATE TABLE IF NOT EXISTS failures (job TEXT PRIMARY KEY, record TEXT NOT NULL);
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
#: What the reason begins with of a job that an earlier process left, and that cannot go on now.
LEFT_WAITING = "waits for the next start: "
#: How the reason of a job begins that goes on once its base and its data can be read again.
WAITS_FOR_FILES = "waits for its files: "
#: For which a writer waits while another process writes, such as a service's, on a slow disk.
LOCKED_SECONDS = 30.0
#: How an epoch ended whose process was killed.
KILLED = "the run was killed"
#: What a run keeps beside the folders of its jobs, which therefore cannot have these names.
RESERVED = frozenset(
    {
        "admission",
        "groups",
        "state.json",
        "workers.log",
        "ledger.sqlite",
        "ledger.sqlite-wal",
        "ledger.sqlite-shm",
    }
)


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
            self._base = sqlite3.connect(self.path, isolation_level=None, timeout=LOCKED_SECONDS)
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
                _relocate(base, Path(self.path).parent)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def fact(self, name: str, otherwise: str) -> str:
        """A fact of the run; where it is not there yet, `otherwise` becomes it."""
        with self._transition() as base:
            base.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            [value] = base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    def set_fact(self, name: str, value: str) -> None:
        """Write down a fact of the run, whatever it was before."""
        with self._transition() as base:
            write_fact(base, name, value)

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
        self._write(
            "UPDATE jobs SET status = 'refused', reason = ? WHERE name = ? "
            "AND status IN ('queued', 'running')",
            reason,
            request.name,
        )

    def withdraw(
        self, request: JobRequest, reason: str, spec: Mapping[str, Any], time: float
    ) -> None:
        """A job is taken back that was not submitted yet; nothing happens where it was."""
        self._enter(request, spec, "cancelled", reason)
        self._write(
            "UPDATE jobs SET ended = ? WHERE name = ? AND status = 'cancelled'", time, request.name
        )

    def _enter(
        self,
        request: JobRequest,
        spec: Mapping[str, Any] | None,
        status: str,
        reason: str,
        file: str = "",
    ) -> None:
        name, text = request.name, REQUEST.dump_json(request).decode()
        with self._transition() as base:
            base.execute(
                "DELETE FROM jobs WHERE name = ? AND (status = 'cancelled' OR "
                "status = 'refused' AND first_started IS NULL)",
                (name,),
            )
            for table in ("rungs", "failures"):
                base.execute(
                    f"DELETE FROM {table} WHERE job = ? "  # noqa: S608  (names of ours)
                    "AND NOT EXISTS (SELECT 1 FROM jobs WHERE name = job)",
                    (name,),
                )
            base.execute(
                "INSERT OR IGNORE INTO jobs (name, request, spec, status, reason) "
                "VALUES (?, ?, ?, ?, ?)",
                (name, text, json.dumps(spec or {}), status, reason),
            )
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
                "UPDATE jobs SET status = 'running', first_started = coalesce(first_started, ?), "
                "reason = CASE WHEN substr(reason, 1, ?) = ? THEN '' ELSE reason END "
                "WHERE name = ? AND status IN ('queued', 'running')",
                [(time, len(WAITS_FOR_FILES), WAITS_FOR_FILES, name) for name in group.jobs],
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
                    # With the end itself: a run that is killed now waits for them when it goes on.
                    _await_files(base, event.absent)
                case Failed(job=str()):
                    _settle(base, str(event.job), "failed", event.reason, event.time)
                case Drained():
                    _commit(base, event.epoch, event.steps, "")
                    if event.successor is not None and event.absent:
                        _leave_out(base, event.successor, event.absent)
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

    def set_credit(self, credit: Mapping[str, float]) -> None:
        """Record the credit of jobs that no decision may see for a while."""
        with self._transition() as base:
            base.executemany(
                "UPDATE jobs SET credit = ? WHERE name = ?",
                [(amount, name) for name, amount in credit.items()],
            )

    def note_failures(self, records: Mapping[str, object]) -> None:
        """Remember how often groups of jobs failed, as JSON; None: forget it."""
        with self._transition() as base:
            for job, record in records.items():
                if record is None:
                    base.execute("DELETE FROM failures WHERE job = ?", (job,))
                else:
                    row = (job, json.dumps(record))
                    base.execute("INSERT OR REPLACE INTO failures VALUES (?, ?)", row)

    def failures(self, job: str) -> FailureRecord | None:
        """Record that `note_failures` made of a job; None: none. Raises LedgerError."""
        for (text,) in self._rows("SELECT record FROM failures WHERE job = ?", job):
            with reading(self.path):
                return FAILURES.validate_json(text)
        return None

    def leave(self, job: str, reason: str, until: str = LEFT_WAITING) -> None:
        """A job that is in no group cannot go on now, until `take_up`.

        until    how the reason begins: what the job waits for
        """
        with self._transition() as base:
            _leave(base, job, reason, until)

    def take_up(self, job: str | None = None) -> None:
        """Jobs that could not go on may do so now: one, or with a new process all.

        With a new process, those that wait for their files still do.
        """
        for until in (LEFT_WAITING,) if job is None else (LEFT_WAITING, WAITS_FOR_FILES):
            self._write(
                "UPDATE jobs SET reason = '' WHERE status = 'queued' "
                "AND substr(reason, 1, ?) = ? AND name = coalesce(?, name)",
                len(until),
                until,
                job,
            )

    def undecided_rungs(self) -> list[RungRecord]:
        """Jobs that are to be compared, in the order of `jobs`; raises LedgerError."""
        where = "kept IS NULL AND status IN ('queued', 'running', 'done')"
        return self._records(RungRecord, where)

    def has_rung(self, job: str, step: int) -> bool:
        """Whether a job has come to a rung, decided or not; raises LedgerError."""
        return bool(self._rows("SELECT 1 FROM rungs WHERE job = ? AND step = ?", job, step))

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
        self._write(
            "UPDATE jobs SET status = 'queued', reason = '' "
            "WHERE status = 'refused' AND first_started IS NOT NULL"
        )

    def cancel(self, job: str, reason: str, time: float, *, begun: bool = False) -> bool:
        """A job that is queued is taken back; whether it was.

        begun   also one that was in a group before
        """
        changed = self._write(
            "UPDATE jobs SET status = 'cancelled', reason = ?, ended = ? WHERE name = ? "
            "AND status = 'queued' AND (? OR first_started IS NULL)",
            reason,
            time,
            job,
            begun,
        )
        return changed > 0

    def jobs(self) -> list[JobRecord]:
        """All jobs, in the order in which they were submitted; raises LedgerError."""
        return self._records(JobRecord)

    def active_jobs(self) -> list[JobRecord]:
        """Jobs that have not ended, in the order of `jobs`; raises LedgerError."""
        return self._records(JobRecord, "status IN ('queued', 'running')")

    def refused_jobs(self) -> list[JobRecord]:
        """Jobs that were refused, in the order of `jobs`; raises LedgerError."""
        return self._records(JobRecord, "status = 'refused'")

    def job_count(self) -> int:
        """Number of jobs; raises LedgerError."""
        [(count,)] = self._rows("SELECT count(*) FROM jobs")
        return int(count)

    def spec(self, job: str, *, besides: Collection[str] = ()) -> Mapping[str, Any] | None:
        """Specification of a job for its runner; None where there is none. Raises LedgerError.

        besides   statuses of jobs that count as not there
        """
        for text, status in self._rows("SELECT spec, status FROM jobs WHERE name = ?", job):
            if status not in besides:
                with reading(self.path):
                    spec: Mapping[str, Any] = json.loads(text)
                    return spec
        return None

    def open_epochs(self) -> list[EpochRecord]:
        """Formations whose end nobody saw, in their order; raises LedgerError."""
        return self._records(EpochRecord, "ended IS NULL")

    def epochs(self) -> list[EpochRecord]:
        """All formations of groups, in their order; raises LedgerError."""
        return self._records(EpochRecord)

    def next_epoch(self) -> int:
        """A number that no formation has had; raises LedgerError."""
        [(last,)] = self._rows("SELECT coalesce(max(epoch), 0) FROM epochs")
        return int(last) + 1

    def newest_time(self) -> float:
        """Newest time of a decision, a group or the end of a job; 0 where there is none.

        raises   LedgerError
        """
        query = (
            "SELECT max(time) FROM (SELECT time FROM decisions UNION ALL SELECT "
            "max(launched, coalesce(started, 0), coalesce(ended, 0)) FROM epochs "
            "UNION ALL SELECT ended FROM jobs)"
        )
        [(newest,)] = self._rows(query)
        return float(newest or 0.0)

    def decisions(self) -> list[DecisionRecord]:
        """Records of decisions, without reasons; raises LedgerError."""
        return self._records(DecisionRecord)

    def note_file(self, path: str, sha256: str, told: str) -> None:
        """Remember what was said of a job file."""
        self._write("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", path, sha256, told)

    def file(self, path: str) -> tuple[str, str]:
        """SHA-256 of a job file as it was read, and what was said of it; "" where it was not."""
        rows = self._rows("SELECT sha256, told FROM files WHERE path = ?", path)
        return next(iter(rows), ("", ""))

    def forget_file(self, path: str) -> None:
        """A job file is gone: one of this name that comes later is read, whatever it holds."""
        self._write("DELETE FROM files WHERE path = ?", path)

    def move(self, job: str, path: str) -> None:
        """A job's file has another name now."""
        self._write("INSERT OR REPLACE INTO origins VALUES (?, ?)", job, path)

    def origins(self) -> dict[str, str]:
        """File that each job comes from, by job."""
        return dict(self._rows("SELECT name, path FROM origins"))

    def _records(self, kind: type[Record], where: str = "true", *values: object) -> list[Record]:
        with reading(self.path):
            return read_records(self._base, kind, where, *values)

    def _rows(self, query: str, *values: object) -> list[Any]:
        with reading(self.path):
            return self._base.execute(query, values).fetchall()

    def _write(self, query: str, *values: object) -> int:
        """A transition of one statement; the number of rows that it changed."""
        with self._transition() as base:
            return base.execute(query, values).rowcount

    @contextmanager
    def _transition(self) -> Iterator[sqlite3.Connection]:
        try:
            with transaction(self._base):
                yield self._base
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


def _leave(base: sqlite3.Connection, job: str, reason: str, until: str) -> None:
    base.execute(
        "UPDATE jobs SET reason = ? WHERE name = ? AND status = 'queued' "
        "AND (reason = '' OR substr(reason, 1, ?) = ?)",
        (f"{until}{reason}", job, len(until), until),
    )


def _await_files(base: sqlite3.Connection, absent: Mapping[str, str]) -> None:
    """Jobs wait until their files can be read, each with the reason why they cannot."""
    for job, reason in absent.items():
        _leave(base, job, reason, WAITS_FOR_FILES)


def _leave_out(base: sqlite3.Connection, epoch: int, absent: Mapping[str, str]) -> None:
    """Jobs never joined the formation for which they were launched: they wait for their files."""
    [(text,)] = base.execute("SELECT jobs FROM epochs WHERE epoch = ?", (epoch,)).fetchall()
    rest = [name for name in json.loads(text) if name not in absent]
    base.execute("UPDATE epochs SET jobs = ? WHERE epoch = ?", (json.dumps(rest), epoch))
    for name in absent:
        base.execute("DELETE FROM members WHERE job = ? AND epoch = ?", (name, epoch))
        base.execute(
            "UPDATE jobs SET status = 'queued', first_started = CASE WHEN steps > 0 OR EXISTS "
            "(SELECT 1 FROM members WHERE job = name) THEN first_started END "
            "WHERE name = ? AND status = 'running'",
            (name,),
        )
    _await_files(base, absent)


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


def write_fact(base: sqlite3.Connection, name: str, value: str) -> None:
    """Write down a fact of the run, where it is not written so already."""
    base.execute(
        "INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value "
        "WHERE value != excluded.value",
        (name, value),
    )


# Paths in the ledger follow a run's folder that was moved, or restored from a backup.

#: Below a run's folder: its groups, whose checkpoints are in groups/NUMBER/train, and the
#: submissions to its service.
_GROUPS_FOLDER, _INBOX = "groups", "service/inbox"
#: Columns that hold a path, and those that hold JSON with paths anywhere in it.
_PATHS = (("files", "path"), ("origins", "path"))
_JSON = (("jobs", "spec"), ("submissions", "document"))


def _relocate(base: sqlite3.Connection, folder: Path) -> None:
    """Let paths below the run's folder begin with the folder where the ledger lies now.

    base     of the ledger, in a transaction; its fact `folder` says where it lay. A ledger of an
             older version has none: the files of its submissions tell the folder
    folder   where the ledger lies
    raises   sqlite3.Error
    """
    new = str(folder.absolute())
    query = "SELECT value FROM facts WHERE name = 'folder' AND typeof(value) = 'text'"
    row = base.execute(query).fetchone()
    old = row[0] if row else _folder_of_submissions(base)
    if row is None or old != new:
        base.execute("INSERT OR REPLACE INTO facts VALUES ('folder', ?)", (new,))
    if old is None or old == new:
        return
    there = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
    for table, column in _PATHS:
        _replace_start(base, table, column, old, new)
    for table, column in _JSON:
        if table in there:
            _replace_in_json(base, table, column, old, new)
    if "submissions" in there:
        _count_as_read(base, new)
    _relocate_commits(base, folder.absolute() / _GROUPS_FOLDER)


def _folder_of_submissions(base: sqlite3.Connection) -> str | None:
    """Folder of a service's run by the paths of files that it read; None where it read none."""
    query = "SELECT path FROM files WHERE typeof(path) = 'text' AND path LIKE ?"
    row = base.execute(query, (f"%/{_INBOX}/%",)).fetchone()
    return None if row is None else row[0].rpartition(f"/{_INBOX}/")[0]


def _replace_start(base: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    base.execute(
        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608  (names of ours)
        f"WHERE substr({column}, 1, ?) = ?",
        (new, len(old) + 1, len(old) + 1, f"{old}/"),
    )


def _replace_in_json(base: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    # A string of JSON begins with a quotation mark, and may have its other characters escaped.
    for ascii_only in (True, False):
        before, after = (
            json.dumps(path, ensure_ascii=ascii_only)[:-1] + "/" for path in (old, new)
        )
        base.execute(
            f"UPDATE {table} SET {column} = replace({column}, ?, ?) "  # noqa: S608  (names of ours)
            f"WHERE instr({column}, ?)",
            (before, after, before),
        )


def _count_as_read(base: sqlite3.Connection, folder: str) -> None:
    """Submissions that were read stay so, although their files have other content now."""
    query = "SELECT number, document FROM submissions WHERE typeof(document) = 'text'"
    rows = base.execute(query).fetchall()
    base.executemany(
        "UPDATE files SET sha256 = ? WHERE path = ?",
        [
            (hashlib.sha256(text.encode()).hexdigest(), f"{folder}/{_INBOX}/{number:06d}.yaml")
            for number, text in rows
        ],
    )


def _relocate_commits(base: sqlite3.Connection, groups: Path) -> None:
    """Let jobs go on from checkpoints below this folder of groups.

    A commit's path may be relative to where the command was started: its end alone counts.
    """
    query = "SELECT name, path FROM jobs WHERE path != '' AND typeof(path) = 'text'"
    rows = base.execute(query).fetchall()
    base.executemany(
        "UPDATE jobs SET path = ? WHERE name = ?",
        [
            (str(groups.joinpath(*parts[-2:])), name)
            for name, path in rows
            if (parts := Path(path).parts)[-3:-2] == (_GROUPS_FOLDER,)
        ],
    )
