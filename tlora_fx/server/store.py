"""Ledger of a service: users, submissions, wanted states of jobs, and who did what.

It lies in the run's ledger. Each call that changes something is one transaction, with a row that
says who asked for it, and the disk holds it before the caller is answered. What is wanted of a job
("run", "pause", "cancel") is a state and no message: a service that was killed finds it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_fx.config.hyperparameters import with_defaults
from tlora_fx.errors import JobUnknown, LedgerError, QuotaReached, RequestConflict, ServiceRefused
from tlora_fx.runtime.run_folder import LEDGER
from tlora_fx.scheduler.store import GOES_ON, Ledger, require_known_format, write_fact

Wanted = Literal["run", "pause", "cancel"]
#: Below a run's folder, all that is the service's own; no job can be called so.
FOLDER = "service"
#: Who asks where there are no users; the only one whose jobs keep their names.
LOCAL = "local"

#: Of the service's tables. A ledger without this fact has none of them, or those of a version
#: before formats: what lacks is added.
FORMAT = 1
_FORMAT = "service_format"

_TABLES = """
CREATE TABLE IF NOT EXISTS users (
    name TEXT PRIMARY KEY, admin INTEGER NOT NULL, jobs INTEGER, gpu_hours REAL,
    priority INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    sha256 TEXT PRIMARY KEY, user TEXT NOT NULL, made REAL NOT NULL);
CREATE TABLE IF NOT EXISTS submissions (
    number INTEGER PRIMARY KEY, user TEXT NOT NULL, key TEXT NOT NULL, sha256 TEXT NOT NULL,
    time REAL NOT NULL, folder TEXT NOT NULL, document TEXT NOT NULL, UNIQUE (user, key));
CREATE TABLE IF NOT EXISTS owned (
    name TEXT PRIMARY KEY COLLATE NOCASE, user TEXT NOT NULL, submission INTEGER NOT NULL,
    priority INTEGER NOT NULL, wanted TEXT NOT NULL DEFAULT 'run');
CREATE TABLE IF NOT EXISTS actions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, user TEXT NOT NULL, verb TEXT NOT NULL,
    what TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, jobs TEXT NOT NULL,
    text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS access (tokens_required INTEGER NOT NULL);
"""

#: Of each job of the service: what it is, what the ledger says, and what was said of its file.
_JOBS = """
SELECT owned.name, owned.user, owned.submission, owned.priority, owned.wanted, submissions.time,
    jobs.status, jobs.reason, jobs.steps, jobs.request, jobs.first_started, jobs.ended, files.told
FROM owned JOIN submissions ON submissions.number = owned.submission
LEFT JOIN jobs ON jobs.name = owned.name
LEFT JOIN files ON files.path = ? || printf('%06d.yaml', owned.submission)
"""


@dataclass(frozen=True, slots=True)
class User:
    """User of the service, with quotas.

    jobs        active ones at a time; None: any number
    gpu_hours   in all; None: any number
    priority    the highest that a submission of theirs may have
    """

    name: str
    admin: bool = False
    jobs: int | None = None
    gpu_hours: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A job file that was taken.

    document   the file that the scheduler reads, absolute paths and full names in it
    """

    number: int
    jobs: tuple[str, ...]
    document: str
    folder: str
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class OwnedJob:
    """A job of the service, as the ledger has it; times are seconds of the run's clock.

    submitted   time of day
    status      None: its file was not read yet
    told        what was said of its file, "" where it was not read yet
    """

    name: str
    user: str
    submission: int
    priority: int
    wanted: Wanted
    submitted: float
    status: str | None
    reason: str | None
    steps: float | None
    request: str | None
    first_started: float | None
    ended: float | None
    told: str | None

    @property
    def total(self) -> int:
        """Steps that it has in all; 0 where nobody knows yet."""
        return int(json.loads(self.request)["steps"]) if self.request else 0

    @property
    def state(self) -> str:
        """State of the job, as users are told."""
        status = self.status
        if status is None:
            refused = self.told not in (None, "", "taken")
            wanted = {"cancel": "cancelling", "pause": "paused", "run": "received"}[self.wanted]
            return "refused" if refused else wanted
        if status in ("queued", "running"):
            stopping = {"cancel": "cancelling", "pause": "pausing"}.get(self.wanted, status)
            return "paused" if (status, stopping) == ("queued", "pausing") else stopping
        # It was asked to end where it was, and did.
        ended_early = status == "done" and self.wanted == "cancel" and self.steps != self.total
        return "cancelled" if ended_early else status

    @property
    def active(self) -> bool:
        """Whether it may still be trained."""
        return self.state not in ("done", "failed", "refused", "cancelled")


class ServiceStore:
    """The service's part of a run's ledger; any thread may call it.

    folder   of the run
    raises   LedgerError; NewerFormat where a newer version wrote it
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder / FOLDER
        self.inbox = self.folder / "inbox"
        for path in (self.inbox, self.folder / "uploads", self.folder / "submitted"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / LEDGER
        Ledger(self._path).close()
        self._local = threading.local()
        with self._reading() as base:
            require_known_format(base, self._path, name=_FORMAT, known=FORMAT)
            base.executescript(_TABLES)
            write_fact(base, _FORMAT, str(FORMAT))
        self.started = self._started()

    # Users.

    def add_user(self, user: User) -> str:
        """Make a token for a user, new or known, whose limits are these from now on; the token.

        It is shown once: the ledger has its SHA-256.
        """
        token = f"tlora-{secrets.token_urlsafe(32)}"
        with self._transition(operator(), "token", user.name) as base:
            base.execute(
                "INSERT OR REPLACE INTO users VALUES (?, ?, ?, ?, ?)",
                (user.name, user.admin, user.jobs, user.gpu_hours, user.priority),
            )
            row = (hash_of(token), user.name, time.time())
            base.execute("INSERT INTO tokens VALUES (?, ?, ?)", row)
        return token

    def revoke(self, name: str) -> int:
        """Forget all tokens of a user; how many there were. Their jobs go on."""
        with self._transition(operator(), "revoke", name) as base:
            return base.execute("DELETE FROM tokens WHERE user = ?", (name,)).rowcount

    def users(self) -> dict[User, int]:
        """All users, and how many tokens each has."""
        with self._reading() as base:
            rows = base.execute(
                "SELECT name, admin, jobs, gpu_hours, priority, (SELECT count(*) FROM tokens "
                "WHERE tokens.user = users.name) FROM users ORDER BY name"
            ).fetchall()
        return {User(row[0], bool(row[1]), *row[2:5]): row[5] for row in rows}

    def user_of(self, token: str) -> User | None:
        """User who owns a token; None: nobody's."""
        with self._reading() as base:
            row = base.execute(
                "SELECT name, admin, jobs, gpu_hours, priority FROM users "
                "WHERE name = (SELECT user FROM tokens WHERE sha256 = ?)",
                (hash_of(token),),
            ).fetchone()
        return None if row is None else User(row[0], bool(row[1]), *row[2:])

    def require_tokens(self) -> None:
        """Require a token for every request to this run, from now on and after each restart."""
        with self._transition(operator(), "require-tokens", "") as base:
            base.execute("INSERT INTO access SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM access)")

    def tokens_required(self) -> bool:
        """Whether every request needs a token.

        True once a user was added or `require_tokens` was called. Users are never removed, so that
        revoking tokens, even the last one, cannot open a run to everybody.
        """
        with self._reading() as base:
            (required,) = base.execute(
                "SELECT EXISTS (SELECT 1 FROM users) OR EXISTS (SELECT 1 FROM access)"
            ).fetchone()
            return bool(required)

    def refuse_open_network(self, option: str) -> None:
        """Refuse to listen to a network without tokens; raises ServiceRefused.

        option   of the command line that opens the service to one
        """
        if not self.tokens_required():
            raise ServiceRefused(
                "no token is required, so it would obey everybody on the network",
                found=option,
                help="add users with `tlora-fx tokens add NAME -o RUN`, start with "
                "--require-tokens, or listen on 127.0.0.1",
            )

    # Submissions.

    def replayed(self, user: User, key: str, sha256: str) -> Submission | None:
        """The submission that had this key; raises RequestConflict where it was another."""
        with self._reading() as base:
            return self._replayed(base, user, key, sha256)

    def submit(
        self, user: User, key: str, sha256: str, names: Sequence[str], document: str,
        folder: str, priority: int,
    ) -> Submission:  # fmt: skip
        """Take a submission, once for each key.

        names      full names of its jobs
        document   what the scheduler is to read
        raises     RequestConflict, QuotaReached
        """
        with self._transition(user.name, "submit", ", ".join(names)) as base:
            known = self._replayed(base, user, key, sha256)
            if known is not None:
                return known
            self._free_names(base, names)
            self._require_quota(base, user, len(names), priority)
            number = base.execute(
                "INSERT INTO submissions (user, key, sha256, time, folder, document) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (user.name, key, sha256, time.time(), folder, document),
            ).lastrowid
            assert number is not None
            base.executemany(
                "INSERT INTO owned (name, user, submission, priority) VALUES (?, ?, ?, ?)",
                [(name, user.name, number, priority) for name in names],
            )
        return Submission(number, tuple(names), document, folder)

    def submissions(self) -> list[Submission]:
        """Submissions that were accepted."""
        with self._reading() as base:
            rows = base.execute("SELECT number, document, folder FROM submissions").fetchall()
        return [Submission(number, (), document, folder) for number, document, folder in rows]

    def described(self, number: int) -> dict[str, dict[str, Any]]:
        """Jobs of a submission as its document describes them, with defaults, by full name."""
        with self._reading() as base:
            row = base.execute(
                "SELECT document FROM submissions WHERE number = ?", (number,)
            ).fetchone()
        jobs = json.loads(row[0])["jobs"] if row and row[0] else []
        return {job["name"]: with_defaults(job) for job in jobs}

    def file_of(self, number: int) -> Path:
        """File where the scheduler finds a submission."""
        return self.inbox / f"{number:06d}.yaml"

    # Jobs.

    def jobs(self, name: str | None = None) -> list[OwnedJob]:
        """All jobs, or one, in order of submission."""
        where = "WHERE owned.name = ? " if name else ""
        prefix = f"{self.inbox.absolute()}/"
        with self._reading() as base:
            rows = base.execute(
                f"{_JOBS}{where}ORDER BY owned.submission, owned.rowid",
                (prefix, name) if name else (prefix,),
            ).fetchall()
        return [OwnedJob(*row) for row in rows]

    def job(self, user: User, name: str) -> OwnedJob:
        """A job of a user's own, by its full name or without the user's; raises JobUnknown."""
        for full in dict.fromkeys((name, full_name(user.name, name))):
            for job in self.jobs(full):
                if job.name == full and (user.admin or job.user == user.name):
                    return job
        raise JobUnknown(f"there is no job '{name}'", help="`tlora-fx client ls` lists yours")

    def want(self, user: User, name: str, wanted: Wanted) -> OwnedJob:
        """Say what shall become of a job of a user's own; the job as it is then.

        raises   JobUnknown; RequestConflict where it has ended, or that was said before
        """
        job = self.job(user, name)
        verb = "resume" if wanted == "run" else wanted
        with self._transition(user.name, verb, job.name) as base:
            [now] = [found for found in self.jobs(job.name) if found.name == job.name]
            if not now.active or now.wanted == "cancel":
                raise RequestConflict(
                    f"a job that is {now.state} cannot be asked to {verb}", job=now.name
                )
            if now.wanted == wanted:
                raise RequestConflict(f"the job is {now.state}: no {verb} is needed", job=now.name)
            base.execute("UPDATE owned SET wanted = ? WHERE name = ?", (wanted, job.name))
        [changed] = self.jobs(job.name)
        return changed

    def gpu_hours(self, user: str) -> float:
        """GPU-hours of a user's jobs up to the scheduler's last heartbeat.

        A group's GPU-hours are divided evenly among its jobs. Time in which no scheduler was alive
        does not count.
        """
        with self._reading() as base:
            return self._gpu_hours(base, user)

    # What happened.

    def tell(self, time_of_day: float, kind: str, jobs: Sequence[str], text: str) -> None:
        """Write down an event, in words that name no job."""
        with self._transition("", "", "") as base:
            base.execute(
                "INSERT INTO events (time, kind, jobs, text) VALUES (?, ?, ?, ?)",
                (time_of_day, kind, json.dumps(list(jobs)), text),
            )

    def events(self, after: int, most: int) -> list[tuple[int, float, str, list[str], str]]:
        """The newest events behind a number, in order: number, time of day, kind, jobs, text."""
        with self._reading() as base:
            rows = base.execute(
                "SELECT number, time, kind, jobs, text FROM events WHERE number > ? "
                "ORDER BY number DESC LIMIT ?",
                (after, most),
            ).fetchall()
        return [(n, at, kind, json.loads(jobs), text) for n, at, kind, jobs, text in rows[::-1]]

    def actions(self) -> list[tuple[float, str, str, str]]:
        """Every call that changed something: time of day, user, verb, what."""
        with self._reading() as base:
            return base.execute(
                "SELECT time, user, verb, what FROM actions ORDER BY number"
            ).fetchall()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of the ledger by any other query."""
        with self._reading() as base:
            return base.execute(query, values).fetchall()

    def version(self) -> tuple[int, int, int]:
        """Version of the ledger, which changes with it, as seen by the thread that asks."""
        base = self._base
        [version] = base.execute("PRAGMA data_version").fetchone()
        return id(base), version, base.total_changes

    # The rest is for this class.

    def _started(self) -> float:
        with self._reading() as base:
            base.execute("INSERT OR IGNORE INTO facts VALUES ('started', ?)", (repr(time.time()),))
            [value] = base.execute("SELECT value FROM facts WHERE name = 'started'").fetchone()
        return float(value)

    def _replayed(
        self, base: sqlite3.Connection, user: User, key: str, sha256: str
    ) -> Submission | None:
        row = base.execute(
            "SELECT number, sha256, document, folder FROM submissions WHERE user = ? AND key = ?",
            (user.name, key),
        ).fetchone()
        if row is None:
            return None
        number, before, document, folder = row
        if before != sha256:
            raise RequestConflict(
                "another submission had this key", key=key, help="give each submission its own key"
            )
        # A job of it may have been replaced since.
        names = tuple(job["name"] for job in json.loads(document)["jobs"])
        return Submission(number, names, document, folder, replayed=True)

    def _free_names(self, base: sqlite3.Connection, names: Sequence[str]) -> None:
        """Free names of jobs that were refused or cancelled; raises RequestConflict for others.

        What such a job has left in its folder is moved to `service/replaced`.
        """
        for name in names:
            row = base.execute("SELECT name FROM owned WHERE name = ?", (name,)).fetchone()
            before = None if row is None else self.jobs(row[0])[0]
            if before is not None and before.state in ("refused", "cancelled"):
                self._replace(base, before)
                before = None
            known = base.execute("SELECT 1 FROM jobs WHERE name = ? COLLATE NOCASE", (name,))
            if before is not None or known.fetchone() is not None:
                raise RequestConflict(
                    f"there is a job '{name}' already",
                    found=None if before is None else before.state,
                    help="give each job a name of its own; the name of a job that was refused or "
                    "cancelled is free",
                )

    def _replace(self, base: sqlite3.Connection, before: OwnedJob) -> None:
        """Forget a job that was refused or cancelled, once no process knows it any more."""
        if before.first_started is not None:
            group = _group_with(base, before.name)
            if group is not None:
                raise RequestConflict(
                    f"job '{before.name}' is {before.state}, but its group still runs",
                    group=group,
                    help="submit again when that group has ended, or choose another name",
                )
            there = self.folder.parent / before.name
            aside = self.folder / "replaced" / f"{before.submission:06d}.{before.name}"
            if there.is_dir() and not aside.exists():
                aside.parent.mkdir(mode=0o700, exist_ok=True)
                there.rename(aside)
        base.execute("DELETE FROM owned WHERE name = ?", (before.name,))
        base.execute("DELETE FROM jobs WHERE name = ?", (before.name,))
        base.execute("DELETE FROM origins WHERE name = ?", (before.name,))

    def _require_quota(
        self, base: sqlite3.Connection, user: User, jobs: int, priority: int
    ) -> None:
        if priority > user.priority:
            raise QuotaReached(
                "no such priority", expected=f"at most {user.priority}", found=priority
            )
        if user.jobs is not None:
            active = sum(job.active for job in self.jobs() if job.user == user.name)
            if active + jobs > user.jobs:
                raise QuotaReached(
                    "too many jobs at a time",
                    expected=f"at most {user.jobs} that have not ended",
                    found=f"{active} and {jobs} more",
                )
        if user.gpu_hours is not None:
            used = self._gpu_hours(base, user.name)
            if used >= user.gpu_hours:
                raise QuotaReached(
                    "no GPU-hours are left",
                    expected=f"{user.gpu_hours:g}",
                    found=f"{used:.2f} used",
                )

    def _gpu_hours(self, base: sqlite3.Connection, user: str) -> float:
        mine = {name for (name,) in base.execute("SELECT name FROM owned WHERE user = ?", (user,))}
        seconds = 0.0
        for jobs, gpus, held in base.execute("SELECT jobs, gpus, held FROM epochs"):
            names = json.loads(jobs)
            seconds += held * len(json.loads(gpus)) * len(mine.intersection(names)) / len(names)
        return seconds / 3600

    @property
    def _base(self) -> sqlite3.Connection:
        base: sqlite3.Connection | None = getattr(self._local, "base", None)
        if base is None:
            base = sqlite3.connect(self._path, isolation_level=None, timeout=30.0)
            base.execute("PRAGMA synchronous=FULL")
            self._local.base = base
        return base

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._base
        except sqlite3.Error as error:
            raise LedgerError(
                "the service's ledger fails", file=self._path, reason=error
            ) from error

    @contextmanager
    def _transition(self, user: str, verb: str, what: str) -> Iterator[sqlite3.Connection]:
        """A transaction; with a verb, who asked for it is written down too."""
        with self._reading() as base:
            base.execute("BEGIN IMMEDIATE")
            try:
                before = base.total_changes
                yield base
                if verb and base.total_changes != before:
                    base.execute(
                        "INSERT INTO actions (time, user, verb, what) VALUES (?, ?, ?, ?)",
                        (time.time(), user, verb, what),
                    )
            except BaseException:
                base.execute("ROLLBACK")
                raise
            base.execute("COMMIT")


def operator() -> str:
    """Who runs this process, as `actions` names them: `os:ACCOUNT`, which no user can be called."""
    try:
        return f"os:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"os:{os.getuid()}"


def hash_of(token: str) -> str:
    """Hash of a token; it has 256 random bits, so that one round is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def full_name(user: str, job: str) -> str:
    """Name of a user's job in the run."""
    return job if user == LOCAL else f"{user}.{job}"


def _group_with(base: sqlite3.Connection, name: str) -> int | None:
    """Group that runs in a process in which a job was; None: there is none."""
    of_job = base.execute("SELECT epoch FROM epochs WHERE instr(jobs, ?) > 0", (json.dumps(name),))
    last = (_last_with_processes(base, epoch) for (epoch,) in of_job.fetchall())
    return next((epoch for epoch, ended in last if not ended), None)


def _last_with_processes(base: sqlite3.Connection, epoch: int) -> tuple[int, bool]:
    """The last group that took over a group's processes, and whether it has ended."""
    query = "SELECT ended IS NOT NULL, how FROM epochs WHERE epoch = ?"
    while row := base.execute(query, (epoch,)).fetchone():
        ended, how = row
        if not ended or not how.startswith(GOES_ON):
            return epoch, bool(ended)
        epoch = int(how.removeprefix(GOES_ON))
    return epoch, True
