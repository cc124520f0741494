"""Ledger of a service: its tables, its users, and who did what.

It lies in the run's ledger. Each call that changes something is one transaction, with a row that
says who asked for it, and the disk holds it before the caller is answered.
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
from typing import Any

from tlora_fx.errors import LedgerError, QuotaReached, ServiceRefused
from tlora_fx.host.clock import SteadyClock
from tlora_fx.host.durable import transaction
from tlora_fx.runtime.run_folder import LEDGER, unwritable
from tlora_fx.scheduler.history import require_known_format
from tlora_fx.scheduler.store import LOCKED_SECONDS, Ledger, write_fact

#: Below a run's folder, all that is the service's own; no job can be called so.
FOLDER = "service"
#: Who asks where there are no users; the only one whose jobs keep their names.
LOCAL = "local"
#: Of the service's tables. A ledger without this fact has none of them, or those of a version
#: before formats: what lacks is added. The first format has no tables of totals, used GPU-seconds,
#: summaries and removed jobs, and not the columns of `_NEW_COLUMNS`.
FORMAT = 2
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
CREATE TABLE IF NOT EXISTS numbers (submission INTEGER NOT NULL, job INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS totals (
    user TEXT NOT NULL, state TEXT NOT NULL, jobs INTEGER NOT NULL, PRIMARY KEY (user, state));
CREATE TABLE IF NOT EXISTS used (user TEXT PRIMARY KEY, gpu_seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS summaries (
    name TEXT PRIMARY KEY COLLATE NOCASE, metrics TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS removed (
    number INTEGER PRIMARY KEY, job INTEGER NOT NULL, submission INTEGER NOT NULL,
    name TEXT NOT NULL COLLATE NOCASE, user TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, steps REAL NOT NULL, submitted REAL NOT NULL, ended REAL NOT NULL,
    time REAL NOT NULL, replaced INTEGER NOT NULL);
INSERT INTO numbers SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM numbers);
"""
#: Columns that older tables do not have. `final`: the state of a job that was settled; NULL: it may
#: still train. `over`: time of day at which it ended. `counted`: whether `used` has a group's time.
_NEW_COLUMNS = (
    ("owned", "final", "TEXT"),
    ("owned", "over", "REAL"),
    ("epochs", "counted", "INTEGER NOT NULL DEFAULT 0"),
)
_INDEXES = """
CREATE INDEX IF NOT EXISTS owned_open ON owned (user) WHERE final IS NULL;
CREATE INDEX IF NOT EXISTS owned_of_user ON owned (user);
CREATE INDEX IF NOT EXISTS owned_final ON owned (final);
CREATE INDEX IF NOT EXISTS owned_final_of_user ON owned (user, final);
CREATE INDEX IF NOT EXISTS owned_over ON owned (over) WHERE final IS NOT NULL;
CREATE INDEX IF NOT EXISTS owned_submission ON owned (submission);
CREATE INDEX IF NOT EXISTS epochs_uncounted ON epochs (epoch) WHERE counted = 0;
CREATE INDEX IF NOT EXISTS submissions_kept ON submissions (number) WHERE folder != '';
CREATE INDEX IF NOT EXISTS removed_name ON removed (name);
CREATE INDEX IF NOT EXISTS removed_of_submission ON removed (submission);
CREATE INDEX IF NOT EXISTS removed_replaced ON removed (ended) WHERE replaced = 1;
CREATE INDEX IF NOT EXISTS epochs_how ON epochs (how);
"""
_USER = "name, admin, jobs, gpu_hours, priority"


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

    def require_hours(self, used: float) -> None:
        """Refuse more where so many GPU-hours were all; raises QuotaReached."""
        if self.gpu_hours is not None and used >= self.gpu_hours:
            raise QuotaReached(
                "no GPU-hours are left", expected=f"{self.gpu_hours:g}", found=f"{used:.2f} used"
            )


class ServiceLedger:
    """The service's part of a run's ledger; any thread may call it.

    folder   of the run
    now      seconds since the epoch, by the clock of all processes of a service
    raises   RunFolderError where its folders cannot be made; LedgerError; NewerFormat where a newer
             version wrote it
    """

    def __init__(self, folder: Path, now: SteadyClock | None = None) -> None:
        self.now = now or SteadyClock.begin()
        self.folder = folder / FOLDER
        self.inbox = self.folder / "inbox"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("inbox", "uploads", "submitted", "replaced", "trash"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from error
        self._path = folder / LEDGER
        Ledger(self._path).close()
        self._local = threading.local()
        with self._reading() as base:
            require_known_format(base, self._path, name=_FORMAT, known=FORMAT)
            base.executescript(_TABLES)
        with self._transition() as base:
            for table, column, kind in _NEW_COLUMNS:
                _add_column(base, table, column, kind)
            write_fact(base, _FORMAT, str(FORMAT))
        with self._reading() as base:
            base.executescript(_INDEXES)
        self.rows("INSERT OR IGNORE INTO facts VALUES ('started', ?)", repr(self.now()))

    @property
    def started(self) -> float:
        """Time of day at second 0 of the run's clock; a scheduler that begins may set it back."""
        [(started,)] = self.rows("SELECT value FROM facts WHERE name = 'started'")
        return float(started)

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
        tokens = "(SELECT count(*) FROM tokens WHERE tokens.user = users.name)"
        rows = self.rows(f"SELECT {_USER}, {tokens} FROM users ORDER BY name")  # noqa: S608  (ours)
        return {_user(*row): count for *row, count in rows}

    def user_of(self, token: str) -> User | None:
        """User who owns a token; None: nobody's."""
        rows = self.rows(
            f"SELECT {_USER} FROM users "  # noqa: S608  (ours)
            "WHERE name = (SELECT user FROM tokens WHERE sha256 = ?)",
            hash_of(token),
        )
        return next((_user(*row) for row in rows), None)

    def require_tokens(self) -> None:
        """Require a token for every request to this run, from now on and after each restart."""
        with self._transition(operator(), "require-tokens", "") as base:
            base.execute("INSERT INTO access SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM access)")

    def tokens_required(self) -> bool:
        """Whether every request needs a token.

        True once a user was added or `require_tokens` was called. Users are never removed, so that
        revoking tokens, even the last one, cannot open a run to everybody.
        """
        [(required,)] = self.rows(
            "SELECT EXISTS (SELECT 1 FROM users) OR EXISTS (SELECT 1 FROM access)"
        )
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

    def tell(self, time_of_day: float, kind: str, jobs: Sequence[str], text: str) -> None:
        """Write down an event, in words that name no job."""
        with self._transition() as base:
            row = (time_of_day, kind, json.dumps(list(jobs)), text)
            base.execute("INSERT INTO events (time, kind, jobs, text) VALUES (?, ?, ?, ?)", row)

    def events(self, after: int, most: int) -> list[tuple[int, float, str, list[str], str]]:
        """The newest events behind a number, in order: number, time of day, kind, jobs, text."""
        rows = self.rows(
            "SELECT number, time, kind, jobs, text FROM events WHERE number > ? "
            "ORDER BY number DESC LIMIT ?",
            after,
            most,
        )
        return [(n, at, kind, json.loads(jobs), text) for n, at, kind, jobs, text in rows[::-1]]

    def actions(self) -> list[tuple[Any, ...]]:
        """Every call that changed something: time of day, user, verb, what."""
        return self.rows("SELECT time, user, verb, what FROM actions ORDER BY number")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of the ledger by any other query, or of what a statement returns."""
        with self._reading() as base:
            return base.execute(query, values).fetchall()

    def version(self) -> tuple[int, int, int]:
        """Version of the ledger, which changes with it, as seen by the thread that asks."""
        base = self._base
        [version] = base.execute("PRAGMA data_version").fetchone()
        return id(base), version, base.total_changes

    @property
    def _base(self) -> sqlite3.Connection:
        base: sqlite3.Connection | None = getattr(self._local, "base", None)
        if base is None:
            base = sqlite3.connect(self._path, isolation_level=None, timeout=LOCKED_SECONDS)
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
    def _snapshot(self) -> Iterator[None]:
        """Inside, all that is read is of one moment."""
        with self._reading() as base:
            base.execute("BEGIN")
            try:
                yield
            finally:
                base.execute("COMMIT")

    @contextmanager
    def _transition(
        self, user: str = "", verb: str = "", what: str = ""
    ) -> Iterator[sqlite3.Connection]:
        """A transaction; with a verb, who asked for it is written down too."""
        with self._reading() as base, transaction(base):
            before = base.total_changes
            yield base
            if verb and base.total_changes != before:
                act(base, user, verb, what)


def act(base: sqlite3.Connection, user: str, verb: str, what: str) -> None:
    """Write down who has changed something."""
    base.execute(
        "INSERT INTO actions (time, user, verb, what) VALUES (?, ?, ?, ?)",
        (time.time(), user, verb, what),
    )


def _user(name: str, admin: int, *limits: Any) -> User:
    """A row of the columns `_USER`."""
    return User(name, bool(admin), *limits)


def operator() -> str:
    """Who runs this process, as `actions` names them: `os:ACCOUNT`, which no user can be called."""
    try:
        return f"os:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"os:{os.getuid()}"


def hash_of(token: str) -> str:
    """Hash of a token; it has 256 random bits, so that one round is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _add_column(base: sqlite3.Connection, table: str, column: str, kind: str) -> None:
    """Add a column to a table that was made without it."""
    if column not in {name for _, name, *_ in base.execute(f"PRAGMA table_info({table})")}:
        base.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
