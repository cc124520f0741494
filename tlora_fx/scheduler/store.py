"""What must not be forgotten of a run: jobs, commits, groups and decisions, in SQLite.

Each transition is one transaction, and the disk holds it before the call returns (WAL,
synchronous=FULL). Killed at any point and opened again, the ledger tells what was submitted, what
is done, and from which committed state each other job goes on.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_fx.errors import LedgerError
from tlora_fx.scheduler.estimating import Layout
from tlora_fx.scheduler.executor import Committed, Drained, Event, Failed, Finished, Started
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.ledger_rows import (
    EpochRecord,
    JobRecord,
    decision_of_json,
    request_json,
)
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import Decision

FORMAT = 1

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
    how TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, groups TEXT NOT NULL, waiting TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, sha256 TEXT NOT NULL, told TEXT NOT NULL);
"""


class Ledger:
    """The ledger of one run; one process writes it.

    path     its file, or ":memory:"
    raises   LedgerError where it cannot be opened, or was written by another version
    """

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.path = str(path)
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(_TABLES)
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be opened",
                file=self.path,
                reason=error,
                help="choose another folder with -o, or mend the disk",
            ) from error
        written_by = int(self.fact("format", str(FORMAT)))
        if written_by != FORMAT:
            raise LedgerError(
                "the run's ledger has another format",
                file=self.path,
                expected=FORMAT,
                found=written_by,
                help="go on with the version of tlora-fx that began the run",
            )

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def fact(self, name: str, otherwise: str) -> str:
        """A fact of the run; where it is not there yet, `otherwise` becomes it."""
        with self._transition() as base:
            base.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            [value] = base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    def submit(self, request: JobRequest, spec: Mapping[str, Any] | None = None) -> None:
        """A job is queued; nothing happens where it is known already.

        spec   what else whoever runs it must know, JSON-able
        """
        self._enter(request, spec, "queued", "")

    def refuse(
        self, request: JobRequest, reason: str, spec: Mapping[str, Any] | None = None
    ) -> None:
        """A job will never run; nothing happens where it is known already, and done or failed."""
        self._enter(request, spec, "refused", reason)
        with self._transition() as base:
            base.execute(
                "UPDATE jobs SET status = 'refused', reason = ? WHERE name = ? "
                "AND status IN ('queued', 'running')",
                (reason, request.name),
            )

    def _enter(
        self, request: JobRequest, spec: Mapping[str, Any] | None, status: str, reason: str
    ) -> None:
        row = (request.name, request_json(request), json.dumps(spec or {}), status, reason)
        with self._transition() as base:
            base.execute(
                "INSERT OR IGNORE INTO jobs (name, request, spec, status, reason) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )

    def decide(
        self, time: float, decision: Decision, credit: Mapping[str, float] | None = None
    ) -> None:
        """What was decided, and the credit of jobs from then on."""
        groups = json.dumps([asdict(group) for group in decision.groups])
        with self._transition() as base:
            base.execute(
                "INSERT INTO decisions (time, groups, waiting) VALUES (?, ?, ?)",
                (time, groups, json.dumps(decision.waiting)),
            )
            base.executemany(
                "UPDATE jobs SET credit = ? WHERE name = ?",
                [(amount, name) for name, amount in (credit or {}).items()],
            )

    def launch(self, group: Group, epoch: int, layout: Layout | None, time: float) -> None:
        """A group is launched: written down before it is, so that no epoch is used twice."""
        row = (epoch, json.dumps(group.jobs), json.dumps(group.place), str(layout or ""))
        with self._transition() as base:
            base.execute(
                "INSERT OR IGNORE INTO epochs (epoch, jobs, gpus, layout, seconds, launched) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, group.seconds, time),
            )
            base.executemany(
                "UPDATE jobs SET status = 'running', first_started = coalesce(first_started, ?) "
                "WHERE name = ? AND status IN ('queued', 'running')",
                [(time, name) for name in group.jobs],
            )

    def tell(self, event: Event) -> None:
        """Write down what an executor told; progress that is not committed leaves no trace."""
        with self._transition() as base:
            match event:
                case Started():
                    base.execute(
                        "UPDATE epochs SET started = ? WHERE epoch = ? AND started IS NULL",
                        (event.time, event.epoch),
                    )
                case Committed():
                    _commit(base, event.epoch, event.steps, event.path)
                case Finished():
                    _commit(base, event.epoch, {event.job: event.steps}, "")
                    _settle(base, event.job, "done", "", event.time)
                case Failed(job=None):
                    _commit(base, event.epoch, event.steps, "")
                    _end(base, event.epoch, f"failed: {event.reason}", event.time)
                case Failed(job=str()):
                    _settle(base, str(event.job), "failed", event.reason, event.time)
                case Drained():
                    _commit(base, event.epoch, event.steps, "")
                    _end(base, event.epoch, "drained", event.time)

    def end(self, epoch: int, how: str, time: float) -> None:
        """A group ended otherwise than by draining or failing, such as by being killed."""
        with self._transition() as base:
            _end(base, epoch, how, time)

    def give_up(self, job: str, reason: str, time: float) -> None:
        """A job will not be run again."""
        with self._transition() as base:
            _settle(base, job, "failed", reason, time)

    def jobs(self) -> list[JobRecord]:
        """All jobs, in the order in which they were submitted."""
        rows = self._base.execute(f"SELECT {JobRecord.COLUMNS} FROM jobs ORDER BY place")  # noqa: S608
        return [JobRecord.of(row) for row in rows]

    def epochs(self) -> list[EpochRecord]:
        """All formations of groups, in their order."""
        rows = self._base.execute(f"SELECT {EpochRecord.COLUMNS} FROM epochs ORDER BY epoch")  # noqa: S608
        return [EpochRecord.of(row) for row in rows]

    def next_epoch(self) -> int:
        """A number that no formation has had."""
        [last] = self._base.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()
        return int(last) + 1

    def decisions(self) -> list[tuple[float, Decision]]:
        """What was decided when; without reasons."""
        rows = self._base.execute("SELECT time, groups, waiting FROM decisions ORDER BY number")
        return [(time, decision_of_json(groups, waiting)) for time, groups, waiting in rows]

    def note_file(self, path: str, sha256: str, told: str) -> None:
        """Remember what was said of a job file."""
        with self._transition() as base:
            base.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (path, sha256, told))

    def files(self) -> dict[str, tuple[str, str]]:
        """By path, the SHA-256 of what was read of a job file and what was said of it."""
        rows = self._base.execute("SELECT path, sha256, told FROM files")
        return {path: (sha256, told) for path, sha256, told in rows}

    @contextmanager
    def _transition(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it happens, or nothing."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be written",
                file=self.path,
                reason=error,
                help="free space or mend the disk, then start the run again with the same -o",
            ) from error


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
        "UPDATE epochs SET ended = ?, how = ? WHERE epoch = ? AND ended IS NULL",
        (time, how, epoch),
    )
    [jobs] = base.execute("SELECT jobs FROM epochs WHERE epoch = ?", (epoch,)).fetchone() or ("[]",)
    base.executemany(
        "UPDATE jobs SET status = 'queued' WHERE name = ? AND status = 'running'",
        [(name,) for name in json.loads(jobs)],
    )
