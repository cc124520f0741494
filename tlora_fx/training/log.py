"""The command log: what clients asked of their models, in order, and what they were answered.

It is one SQLite file. The process that answers HTTP appends commands and reads answers; the
trainer reads commands and writes answers. Both may be killed at any moment.

A model's commands have sequence numbers from 0. A command may run when all with smaller numbers
have run. `models.ran` is the last one that did, `models.kept` the last one that the model's
snapshot has; bodies from there on are kept, to run again after a kill. A sampler's commands have
numbers too, by which repeats are recognised, but no order.

Each cycle that computed something is there too, with the pieces that it ran together. A piece's
seconds are its part of the cycle's, by tokens. `usage` adds them up by user. `cuts` says how a
request that was answered had been cut, so that it runs again the same way after an upgrade.
`obsolete` has the folders that no checkpoint names any more, until they are deleted. The fact
`took_over` says after which cycle layers were compiled: what ran before runs again without. The
fact `once_compiled` has the cycles of compiled layers before a trainer that had none.

A commit survives a kill of its process. A power failure may lose the last ones, which clients
then repeat, for nobody knows their futures any more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from tlora_fx.errors import (
    JobUnknown,
    LedgerError,
    RequestConflict,
    RequestGone,
    RequestRefused,
)
from tlora_fx.host.clock import SteadyClock
from tlora_fx.host.durable import transaction
from tlora_fx.training.records import (
    Answer,
    Checkpoint,
    Command,
    Model,
    Outcome,
    Ran,
    Sampler,
)
from tlora_fx.training.waiting import Waiting

#: A session without a sign of life for so long is over.
SESSION_SECONDS = 3600.0
CREATE = ("create_model", "load_model")
LOSS = "create_custom_loss"
#: The fact that says which models and samplers have waited for a place in memory for a while.
WAITING = "waiting"
#: Facts of compiled layers: what became of them, and after which cycle they took over.
LAYERS, TOOK_OVER = "layers", "took_over"
#: The fact of earlier trainers' compiled layers: after which cycle they took over, and their last.
ONCE_COMPILED = "once_compiled"

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, user TEXT NOT NULL, made REAL NOT NULL, seen REAL NOT NULL,
    ended REAL, said TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, user TEXT NOT NULL, made REAL NOT NULL,
    asked REAL NOT NULL, ran INTEGER NOT NULL DEFAULT -1, kept INTEGER NOT NULL DEFAULT -1,
    config TEXT, said TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, user TEXT NOT NULL, made REAL NOT NULL,
    path TEXT, folder TEXT);
CREATE TABLE IF NOT EXISTS commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT, user TEXT NOT NULL, queue TEXT NOT NULL,
    seq INTEGER NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL, body BLOB,
    media TEXT, answer BLOB, failed INTEGER, made REAL NOT NULL, done REAL,
    tokens INTEGER NOT NULL DEFAULT 0, UNIQUE (queue, seq));
CREATE INDEX IF NOT EXISTS commands_open ON commands (queue, seq) WHERE done IS NULL;
CREATE INDEX IF NOT EXISTS commands_waiting ON commands (user, queue, length(body))
    WHERE done IS NULL;
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, user TEXT NOT NULL, kind TEXT NOT NULL,
    folder TEXT NOT NULL, bytes INTEGER NOT NULL, made REAL NOT NULL, expires REAL,
    config TEXT NOT NULL, said TEXT NOT NULL, public INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS checkpoints_model ON checkpoints (model);
CREATE TABLE IF NOT EXISTS obsolete (folder TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cycles (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, began REAL NOT NULL,
    seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS pieces (
    command INTEGER NOT NULL, cycle INTEGER NOT NULL, tokens INTEGER NOT NULL,
    seconds REAL NOT NULL, PRIMARY KEY (command, cycle)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pieces_cycle ON pieces (cycle);
CREATE TABLE IF NOT EXISTS cuts (command INTEGER PRIMARY KEY, counts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    user TEXT NOT NULL, kind TEXT NOT NULL, requests INTEGER NOT NULL, tokens INTEGER NOT NULL,
    seconds REAL NOT NULL, PRIMARY KEY (user, kind)) WITHOUT ROWID;
"""

_OBSOLETE = "INSERT OR IGNORE INTO obsolete SELECT folder FROM checkpoints"


class CommandLog:
    """The log in a folder; any thread may call it.

    now       seconds since the epoch; those who share a log share its clock
    waiting   how many requests may wait, for who appends them
    raises    LedgerError where the file cannot be opened
    """

    def __init__(
        self, folder: Path, now: SteadyClock | None = None, waiting: Waiting | None = None
    ) -> None:
        self.folder, self.now = folder, now or SteadyClock.begin()
        self.waiting = waiting or Waiting()
        self._lock, self._read_lock = threading.Lock(), threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Who reads an answer does not wait for who writes a body.
            self._base, self._reader = (
                sqlite3.connect(
                    folder / "log.sqlite", isolation_level=None, check_same_thread=False, timeout=30
                )
                for _ in range(2)
            )
            self._base.row_factory = self._reader.row_factory = sqlite3.Row
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(_TABLES)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                "the log of training commands cannot be opened",
                file=folder / "log.sqlite",
                reason=error,
                help="choose another folder with -o, or mend the disk",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
        self._base.close()

    @contextmanager
    def held(self, ended: threading.Event) -> Iterator[None]:
        """Inside, nobody else runs commands, or the end has come; a kill of the holder frees it."""
        with (self.folder / "trainer.lock").open("a") as lock:
            while not ended.is_set():
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                ended.wait(0.05)
            yield

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _values_of_sqlite(), transaction(self._base):
            yield self._base

    def _rows(self, sql: str, *values: Any, **named: Any) -> list[sqlite3.Row]:
        """Rows as the last change left them; values are all named or none is."""
        with self._read_lock, _values_of_sqlite():
            return self._reader.execute(sql, named or values).fetchall()

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Write what the trainer says of its base."""
        with self._change() as base:
            rows = [(name, json.dumps(value)) for name, value in facts.items()]
            base.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def facts(self) -> dict[str, Any]:
        """Facts about the base, as the trainer wrote them; none before its first start."""
        rows = self._rows("SELECT name, value FROM facts")
        return {row["name"]: json.loads(row["value"]) for row in rows}

    def last_cycle(self) -> int:
        """The number of the last cycle; 0 before the first."""
        rows = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'cycles'")
        return int(rows[0]["seq"]) if rows else 0

    # Sessions.

    def open_session(self, user: str, said: Mapping[str, Any], key: str = "") -> str:
        """A new session of a user, the same again for the same key; returns its id."""
        session, now = session_id(user, key), self.now()
        with self._change() as base:
            row = (session, user, now, now, None, json.dumps(said, ensure_ascii=False))
            base.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?)", row)
        return session

    def heard(self, user: str, session: str) -> None:
        """Note a sign of life; raises RequestGone where the session is over or another's."""
        with self._change():
            self._hear(user, session)

    def end_session(self, user: str, session: str) -> None:
        """End a session; ending it again changes nothing. Raises JobUnknown."""
        with self._change() as base:
            found = base.execute(
                "UPDATE sessions SET ended = coalesce(ended, ?) WHERE id = ? AND user = ?",
                (self.now(), session, user),
            )
            if not found.rowcount:
                raise _unknown("session", session)

    def sessions(self, user: str) -> list[str]:
        """The ids of a user's sessions, newest first."""
        rows = self._rows("SELECT id FROM sessions WHERE user = ? ORDER BY made DESC", user)
        return [row["id"] for row in rows]

    def session(self, user: str, session: str) -> dict[str, Any]:
        """A session's description by its user, and what it made; raises JobUnknown."""
        rows = self._rows("SELECT said FROM sessions WHERE id = ? AND user = ?", session, user)
        if not rows:
            raise _unknown("session", session)
        tables = ("models", "samplers")
        made = {
            table: [row["id"] for row in self._rows(
                f"SELECT id FROM {table} WHERE session = ? ORDER BY made", session  # noqa: S608
            )]
            for table in tables
        }  # fmt: skip
        return {"said": json.loads(rows[0]["said"]), **made}

    def _hear(self, user: str, session: str) -> None:
        rows = self._rows(
            "SELECT 1 FROM sessions WHERE id = ? AND user = ? AND ended IS NULL AND seen > ?",
            session, user, self.now() - SESSION_SECONDS,
        )  # fmt: skip
        if not rows:
            raise RequestGone(
                "the session is over", found=session, help="begin a new one: ServiceClient()"
            )
        self._base.execute("UPDATE sessions SET seen = ? WHERE id = ?", (self.now(), session))

    # Commands.

    def create(
        self, user: str, session: str, place: int, kind: str, body: bytes,
        said: Mapping[str, Any] | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """The first command of a model, which makes it; its number and the model's id.

        raises   RequestGone where the session is over, RequestConflict and QueueFull as `append`
        """
        model = model_id(session, place)
        assert kind in CREATE
        with self._change() as base:
            self._hear(user, session)
            self._add_model(base, model, session, user, self.now(), said or {})
            return self._append(base, user, model, 0, kind, body), model

    @staticmethod
    def _add_model(
        base: sqlite3.Connection, model: str, session: str, user: str, made: float,
        said: Mapping[str, Any],
    ) -> None:  # fmt: skip
        base.execute(
            "INSERT OR IGNORE INTO models (id, session, user, made, asked, said) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (model, session, user, made, made, json.dumps(said, ensure_ascii=False)),
        )

    def add_loss(self, user: str, session: str, place: int, body: bytes) -> int:
        """The command that checks a loss of a session, as `append`; raises RequestGone too."""
        with self._change() as base:
            self._hear(user, session)
            return self._append(base, user, f"{session}:loss:{place}", 0, LOSS, body)

    def loss(self, name: str, user: str) -> bytes:
        """The body of a loss that was checked; raises JobUnknown."""
        sql = "SELECT body FROM commands WHERE queue = ? AND user = ? AND kind = ? AND failed = 0"
        for row in self._rows(sql, name, user, LOSS):
            return bytes(row["body"])
        raise _unknown("loss", name)

    def append(self, user: str, queue: str, seq: int, kind: str, body: bytes) -> int:
        """A command of a model or sampler; the same again is the same number.

        body     canonical: equal requests have equal bytes
        raises   JobUnknown for another's queue, or one that is not there; RequestGone where its
                 session is over, or the command ran so long ago that it was forgotten;
                 RequestConflict where the number has another body; RequestRefused for a number
                 below 1; QueueFull where too much waits already
        """
        with self._change() as base:
            for table in ("models", "samplers"):
                sql = f"SELECT session FROM {table} WHERE id = ? AND user = ?"  # noqa: S608
                if row := base.execute(sql, (queue, user)).fetchone():
                    break
            else:
                raise _unknown("model or sampler", queue)
            self._hear(user, row["session"])
            if table == "models" and seq < 1:
                raise RequestRefused(
                    "a request has no place in its model's order",
                    expected="seq_id of 1 or more", found=seq,
                )  # fmt: skip
            base.execute("UPDATE models SET asked = ? WHERE id = ?", (self.now(), queue))
            return self._append(base, user, queue, seq, kind, body)

    def _append(
        self, base: sqlite3.Connection, user: str, queue: str, seq: int, kind: str, body: bytes
    ) -> int:
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        known = base.execute(
            "SELECT number, digest FROM commands WHERE queue = ? AND seq = ?", (queue, seq)
        ).fetchone()
        if known is None:
            ran = base.execute("SELECT ran FROM models WHERE id = ?", (queue,)).fetchone()
            if ran is not None and seq <= ran["ran"]:
                raise RequestGone("the request ran long ago", model=queue, seq_id=seq)
            runs_next = ran is not None and seq == ran["ran"] + 1
            self.waiting.require_place(base, user, queue, len(body), runs_next=runs_next)
            number = base.execute(
                "INSERT INTO commands (user, queue, seq, kind, digest, body, made) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (user, queue, seq, kind, digest, body, self.now()),
            ).lastrowid
            assert number is not None
            return number
        if known["digest"] != digest:
            raise RequestConflict(
                "another request has this number",
                model=queue, seq_id=seq, help="each request of a model takes the next seq_id",
            )  # fmt: skip
        return int(known["number"])

    def is_known(self, queue: str, seq: int) -> bool:
        """Whether a command has this number, so that `append` adds none."""
        sql = "SELECT 1 FROM commands WHERE queue = ? AND seq = ?"
        return bool(self._rows(sql, queue, seq))

    def answer(self, user: str, number: int) -> Answer | None:
        """Answer of a command, None while it waits or runs.

        raises   RequestGone for a number that is not there, or another's
        """
        rows = self._rows(
            "SELECT media, answer, failed, done FROM commands WHERE number = ? AND user = ?",
            number, user,
        )  # fmt: skip
        if not rows:
            raise RequestGone("there is no such future", found=number, help="repeat the request")
        [row] = rows
        if row["done"] is None:
            return None
        return Answer(row["media"], row["answer"], bool(row["failed"]))

    def waits_for_place(self, number: int) -> bool:
        """Whether a command waits for others to make room for its model or sampler."""
        rows = self._rows("SELECT queue FROM commands WHERE number = ?", number)
        return bool({row["queue"] for row in rows}.intersection(self.facts().get(WAITING, ())))

    # What the trainer reads and writes.

    def runnable(self) -> dict[str, list[Command]]:
        """By model or sampler, the commands that may run now, in order, up to the first gap."""
        rows = self._rows(
            "SELECT number, commands.user, queue, seq, kind, models.ran FROM commands "
            "LEFT JOIN models ON models.id = queue WHERE done IS NULL ORDER BY queue, seq"
        )
        found: dict[str, list[Command]] = {}
        for queue, own in groupby(rows, key=lambda row: str(row["queue"])):
            commands = list(own)
            if (ran := commands[0]["ran"]) is not None:
                commands = [row for at, row in enumerate(commands, ran + 1) if row["seq"] == at]
            if commands:
                found[queue] = [self._command(row) for row in commands]
        return found

    def body_of(self, command: Command) -> bytes:
        """The body of a command that `runnable` has named."""
        [row] = self._rows("SELECT body FROM commands WHERE number = ?", command.number)
        return bytes(row["body"])

    def done_since(self, model: str, seq: int) -> list[Command]:
        """The commands of a model behind a number that have run, with bodies.

        Those that failed are left out, but for steps: one that fails may drop gradients.
        """
        rows = self._rows(
            "SELECT number, commands.user, queue, seq, kind, body, counts FROM commands "
            "JOIN models ON models.id = queue LEFT JOIN cuts ON command = number "
            "WHERE queue = ? AND seq > ? AND seq <= ran "
            "AND (NOT failed OR kind = 'optim_step') ORDER BY seq",
            model, seq,
        )  # fmt: skip
        return [
            self._command(row, bytes(row["body"]), json.loads(row["counts"] or "[]"))
            for row in rows
        ]

    def cycles_of(self, command: Command) -> list[int]:
        """The cycles in which an answered command's pieces ran.

        Pieces of an attempt that a kill ended do not count.
        """
        rows = self._rows(
            "SELECT cycle FROM pieces WHERE command = ? ORDER BY cycle DESC LIMIT ?",
            command.number, len(command.cuts) or -1,
        )  # fmt: skip
        return sorted(row["cycle"] for row in rows)

    def runs_again(self, after: int, until: int) -> bool:
        """Whether a model that is brought runs again what ran behind a cycle, up to another one."""
        sql = (
            "SELECT 1 FROM pieces JOIN commands ON commands.number = command "
            "JOIN models ON models.id = queue WHERE cycle > ? AND cycle <= ? AND seq > kept LIMIT 1"
        )
        return bool(self._rows(sql, after, until))

    @staticmethod
    def _command(row: sqlite3.Row, body: bytes = b"", cuts: Iterable[int] = ()) -> Command:
        number, user, queue, seq, kind, *_ = row
        return Command(number, user, queue, seq, kind, body, tuple(cuts))

    def finish(self, outcomes: Iterable[Outcome], ran: Ran | None = None) -> None:
        """Write what commands came to; one that has an answer already keeps it.

        ran   what was computed for them, and for others that are not done yet
        """
        now = self.now()
        with self._change() as base:
            if ran is not None and ran.tokens:
                self._note(base, ran)
            for each in outcomes:
                command, answer = each.command, each.answer
                written = base.execute(
                    "UPDATE commands SET media = ?, answer = ?, failed = ?, done = ?, tokens = ? "
                    "WHERE number = ? AND done IS NULL",
                    (
                        answer.media, answer.body, answer.failed, now, each.tokens,
                        command.number,
                    ),
                )  # fmt: skip
                if written.rowcount:
                    self._use(base, command, requests=1, tokens=each.tokens)
                    if each.cuts:
                        cuts = (command.number, json.dumps(each.cuts))
                        base.execute("INSERT INTO cuts VALUES (?, ?)", cuts)
                base.execute(
                    "UPDATE models SET ran = max(ran, ?) WHERE id = ?", (command.seq, command.queue)
                )
                if each.config is not None:
                    config = json.dumps(each.config)
                    base.execute(
                        "UPDATE models SET config = ? WHERE id = ?", (config, command.queue)
                    )
                if each.checkpoint is not None:
                    self._keep(base, each.checkpoint)
                if each.sampler is not None:
                    self._add_sampler(base, each.sampler)

    def _note(self, base: sqlite3.Connection, ran: Ran) -> None:
        cycle = base.execute(
            "INSERT INTO cycles (kind, began, seconds) VALUES (?, ?, ?)",
            (ran.kind, ran.began, ran.seconds),
        ).lastrowid
        for command, seconds in ran.parts().items():
            row = (command.number, cycle, ran.tokens[command], seconds)
            base.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", row)
            self._use(base, command, seconds=seconds)

    @staticmethod
    def _use(
        base: sqlite3.Connection, command: Command, *, requests: int = 0, tokens: int = 0,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        base.execute(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "requests = requests + excluded.requests, tokens = tokens + excluded.tokens, "
            "seconds = seconds + excluded.seconds",
            (command.user, command.kind, requests, tokens, seconds),
        )

    def keep(self, model: str, seq: int) -> None:
        """Note that a snapshot has all up to a number; bodies before it are let go."""
        with self._change() as base:
            base.execute("UPDATE models SET kept = ? WHERE id = ?", (seq, model))
            base.execute(
                "UPDATE commands SET body = NULL WHERE queue = ? AND seq <= ? AND done IS NOT NULL",
                (model, seq),
            )

    def prune(self, before: float) -> None:
        """Forget commands that were answered before a time and that their snapshot has."""
        old = (
            "SELECT number FROM commands LEFT JOIN models ON models.id = queue "
            "WHERE done < ? AND seq <= coalesce(kept, seq) AND kind != 'create_custom_loss'"
        )
        with self._change() as base:
            for table in ("pieces", "cuts"):
                base.execute(f"DELETE FROM {table} WHERE command IN ({old})", (before,))  # noqa: S608
            base.execute(f"DELETE FROM commands WHERE number IN ({old})", (before,))  # noqa: S608
            base.execute(
                "DELETE FROM cycles WHERE began < ? AND number NOT IN (SELECT cycle FROM pieces)",
                (before,),
            )

    def forget_stuck(self) -> None:
        """Forget commands behind a gap that nobody can fill, for their session is over."""
        over = (
            "SELECT number, queue, seq, ran FROM commands JOIN models ON models.id = queue "
            "JOIN sessions ON sessions.id = session "
            "WHERE done IS NULL AND (ended IS NOT NULL OR seen <= ?) ORDER BY queue, seq"
        )
        with self._change() as base:
            rows = base.execute(over, (self.now() - SESSION_SECONDS,)).fetchall()
            for _, own in groupby(rows, key=lambda row: str(row["queue"])):
                waiting = list(own)
                stuck = [
                    (row["number"],)
                    for at, row in enumerate(waiting, waiting[0]["ran"] + 1)
                    if row["seq"] != at
                ]
                base.executemany("DELETE FROM commands WHERE number = ?", stuck)

    # Models, samplers, checkpoints.

    def model(self, name: str, user: str | None = None) -> Model:
        """A model; raises JobUnknown where it is not there, or another user's."""
        for model in self.models(user, name):
            return model
        raise _unknown("model", name)

    def models(self, user: str | None = None, name: str | None = None) -> list[Model]:
        """Models, newest first: all, or a user's, or one."""
        rows = self._rows(
            "SELECT * FROM models WHERE (:user IS NULL OR user = :user) "
            "AND (:name IS NULL OR id = :name) ORDER BY made DESC",
            user=user, name=name,
        )  # fmt: skip
        return [Model(**_fields(row)) for row in rows]

    def add_sampler(self, user: str, session: str, place: int, path: str | None) -> Sampler:
        """A sampler of a checkpoint, or of the base; the same again is the same one.

        raises   RequestGone where the session is over, JobUnknown where there is no such checkpoint
        """
        folder = None if path is None else self.checkpoint(path, user).folder
        sampler = Sampler(sampler_id(session, place), session, user, path, folder)
        with self._change() as base:
            self._hear(user, session)
            self._add_sampler(base, sampler)
        return sampler

    def _add_sampler(self, base: sqlite3.Connection, sampler: Sampler) -> None:
        row = (
            sampler.id, sampler.session, sampler.user, self.now(), sampler.path, sampler.folder,
        )  # fmt: skip
        base.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?)", row)

    def sampler(self, name: str, user: str | None = None) -> Sampler:
        """A sampler; raises JobUnknown."""
        rows = self._rows(
            "SELECT id, session, user, path, folder FROM samplers "
            "WHERE id = :name AND (:user IS NULL OR user = :user)",
            name=name, user=user,
        )  # fmt: skip
        if not rows:
            raise _unknown("sampler", name)
        return Sampler(*rows[0])

    def past_versions(self) -> dict[str, str]:
        """Folders of versions without a name that nobody can sample from any more, by sampler."""
        rows = self._rows(
            "SELECT samplers.id, folder FROM samplers JOIN sessions ON sessions.id = session "
            "WHERE path IS NULL AND folder IS NOT NULL AND (ended IS NOT NULL OR seen <= ?) "
            "AND NOT EXISTS (SELECT 1 FROM commands WHERE queue = samplers.id AND done IS NULL)",
            self.now() - SESSION_SECONDS,
        )  # fmt: skip
        return {row["id"]: row["folder"] for row in rows}

    def forget_sampler(self, name: str) -> None:
        """Forget a sampler."""
        with self._change() as base:
            base.execute("DELETE FROM samplers WHERE id = ?", (name,))

    def _keep(self, base: sqlite3.Connection, checkpoint: Checkpoint) -> None:
        base.execute(
            f"{_OBSOLETE} WHERE path = ? AND folder != ?", (checkpoint.path, checkpoint.folder)
        )
        base.execute("DELETE FROM obsolete WHERE folder = ?", (checkpoint.folder,))
        base.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                checkpoint.path, checkpoint.model, checkpoint.user, checkpoint.kind,
                checkpoint.folder, checkpoint.bytes, checkpoint.made, checkpoint.expires,
                json.dumps(checkpoint.config), json.dumps(checkpoint.said), checkpoint.public,
            ),
        )  # fmt: skip

    def checkpoints(
        self, user: str | None = None, *, model: str | None = None, path: str | None = None
    ) -> list[Checkpoint]:
        """Checkpoints that have not expired, oldest first."""
        rows = self._rows(
            "SELECT * FROM checkpoints WHERE (:user IS NULL OR user = :user) "
            "AND (:model IS NULL OR model = :model) AND (:path IS NULL OR path = :path) "
            "AND (expires IS NULL OR expires > :now) ORDER BY made",
            user=user, model=model, path=path, now=self.now(),
        )  # fmt: skip
        return [Checkpoint(**_fields(row) | {"public": bool(row["public"])}) for row in rows]

    def checkpoint(self, path: str, user: str | None = None) -> Checkpoint:
        """A checkpoint; raises JobUnknown where it is not there, expired, or another's own."""
        for checkpoint in self.checkpoints(path=path):
            if checkpoint.public or user in (None, checkpoint.user):
                return checkpoint
        raise _unknown("checkpoint", path)

    def change(self, checkpoint: Checkpoint, *, expires: float | None, public: bool) -> None:
        """Change how long a checkpoint stays, or who may see it."""
        with self._change() as base:
            sql = "UPDATE checkpoints SET expires = ?, public = ? WHERE path = ?"
            base.execute(sql, (expires, public, checkpoint.path))

    def copy(self, checkpoint: Checkpoint, user: str, session: str) -> None:
        """Note a checkpoint that lies in its folder, and the model of a session that has it.

        One of its path that is noted already stays as it is.

        raises   RequestGone where the session is over, RequestConflict where the model has commands
                 or the folder is gone
        """
        with self._change() as base:
            self._hear(user, session)
            same = "SELECT 1 FROM checkpoints WHERE path = ? AND (expires IS NULL OR expires > ?)"
            if base.execute(same, (checkpoint.path, self.now())).fetchone():
                return
            known = "SELECT 1 FROM commands WHERE queue = ?"
            if base.execute(known, (checkpoint.model,)).fetchone():
                raise RequestConflict("the model trains already", model=checkpoint.model)
            if not (self.folder / checkpoint.folder).is_dir():
                # Of an expired one of its path, which was swept since the copy was made.
                raise RequestConflict("the copy was deleted meanwhile", help="send it again")
            self._add_model(base, checkpoint.model, session, user, checkpoint.made, {})
            self._keep(base, checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint; `sweep` deletes its folder."""
        with self._change() as base:
            base.execute(f"{_OBSOLETE} WHERE path = ?", (checkpoint.path,))
            base.execute("DELETE FROM checkpoints WHERE path = ?", (checkpoint.path,))

    def forget_expired(self) -> None:
        """Forget the checkpoints whose time is over."""
        now = self.now()
        with self._change() as base:
            base.execute(f"{_OBSOLETE} WHERE expires <= ?", (now,))
            base.execute("DELETE FROM checkpoints WHERE expires <= ?", (now,))

    def sweep(self) -> None:
        """Delete the folders that no checkpoint names any more."""
        # Inside of the change, so that nobody names one of them anew meanwhile.
        with self._change() as base:
            for row in base.execute("SELECT folder FROM obsolete").fetchall():
                shutil.rmtree(self.folder / row["folder"], ignore_errors=True)
            base.execute("DELETE FROM obsolete")

    def usage(self) -> list[sqlite3.Row]:
        """By `user` and `kind`: `requests` that were done, computed `tokens`, and `seconds`."""
        return self._rows("SELECT * FROM usage ORDER BY user, kind")

    def times(
        self, user: str | None = None, *, model: str | None = None, session: str | None = None,
        limit: int = 1000,
    ) -> list[sqlite3.Row]:  # fmt: skip
        """When requests came, ran and were answered, newest first; see `training.times`.

        `before` is when the model's request before it was answered, `began` when its first piece
        ran, `computed` and `own` seconds of its cycles and its part of them, `together` the most
        pieces in one of them.
        """
        return self._rows(
            "SELECT c.number, c.user, c.queue, c.seq, c.kind, c.made, c.done, c.failed, c.tokens, "
            "b.done AS before, min(y.began) AS began, sum(y.seconds) AS computed, "
            "sum(p.seconds) AS own, count(p.cycle) AS pieces, "
            "max((SELECT count(*) FROM pieces q WHERE q.cycle = p.cycle)) AS together "
            "FROM (SELECT * FROM commands WHERE (:user IS NULL OR user = :user) "
            "AND (:model IS NULL OR queue = :model) "
            "AND (:session IS NULL OR queue IN (SELECT id FROM models WHERE session = :session "
            "UNION SELECT id FROM samplers WHERE session = :session)) "
            "ORDER BY number DESC LIMIT :limit) c "
            "LEFT JOIN commands b ON b.queue = c.queue AND b.seq = c.seq - 1 "
            "LEFT JOIN pieces p ON p.command = c.number LEFT JOIN cycles y ON y.number = p.cycle "
            "GROUP BY c.number ORDER BY c.number DESC",
            user=user, model=model, session=session, limit=limit,
        )  # fmt: skip

    def cycles(self, user: str, session: str) -> list[sqlite3.Row]:
        """The pieces of a session's requests, with their cycles, in order."""
        return self._rows(
            "SELECT c.queue, c.seq, c.kind, p.cycle, p.tokens, y.began, y.seconds, "
            "(SELECT count(*) FROM pieces q WHERE q.cycle = p.cycle) AS together "
            "FROM commands c JOIN pieces p ON p.command = c.number "
            "JOIN cycles y ON y.number = p.cycle WHERE c.user = ? AND c.queue IN "
            "(SELECT id FROM models WHERE session = ? UNION SELECT id FROM samplers "
            "WHERE session = ?) ORDER BY y.began",
            user, session, session,
        )  # fmt: skip


@contextmanager
def _values_of_sqlite() -> Iterator[None]:
    """Inside, a text or number that SQLite has no value for is a mistake of who asks.

    A disk that takes nothing more is an OSError, as it is for files.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, str(error)) from error
        raise
    except (UnicodeEncodeError, OverflowError) as error:
        raise RequestRefused(
            "a request has a text or a number that is none", reason=repr(error)[:200]
        ) from error


def session_id(user: str, key: str = "") -> str:
    """The id of a user's session of a key; without one, of a new session."""
    seed = f"{user} {key}".encode() if key else secrets.token_bytes()
    return f"s{hashlib.sha256(seed).hexdigest()[:16]}"


def model_id(session: str, place: int) -> str:
    """The id of a session's n-th model."""
    return f"{session}:train:{place}"


def sampler_id(session: str, place: int) -> str:
    """The id of a session's n-th sampler."""
    return f"{session}:sample:{place}"


def _fields(row: sqlite3.Row) -> dict[str, Any]:
    """The columns of a model or checkpoint, those in JSON read."""
    return {**row} | {name: row[name] and json.loads(row[name]) for name in ("config", "said")}


def _unknown(what: str, found: str) -> JobUnknown:
    return JobUnknown(f"there is no such {what}", found=found)
