"""View of the service: every job, its curve, and the groups on the GPUs, kept in memory.

One thread reads what is new in the ledger and in the jobs' metrics, so that a thousand who ask how
a job is cost no more than one. A curve is thinned as it grows and has at most `POINTS` points.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tlora_fx.config.hyperparameters import learning_rate_of, rank_of
from tlora_fx.runtime.run_folder import METRICS, parsed_metrics
from tlora_fx.server.store import OwnedJob, ServiceStore, User

#: Of a curve, at most.
POINTS = 120
#: Formations that are shown, the newest.
GROUPS = 1000
#: Of one job's metrics, at a time.
READ_BYTES = 4 << 20
#: Over which the share of GPUs that groups held is taken.
WINDOW_SECONDS = 600.0


class JobStatus(BaseModel):
    """A job: times are seconds since 1970, `loss` and `tokens_per_second` of its last steps.

    rank            of its adapter; null where the job file does not tell
    learning_rate   of the job file, which the schedule scales
    """

    model_config = ConfigDict(ser_json_inf_nan="null")

    name: str
    user: str
    state: str
    reason: str = ""
    step: int = 0
    steps: int = 0
    priority: int = 0
    submission: int
    submitted: float
    started: float | None = None
    ended: float | None = None
    base: str = ""
    rank: int | None = None
    learning_rate: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    group: int | None = None
    gpus: tuple[int, ...] = ()


class GroupSpan(BaseModel):
    """A formation of a group on its GPUs; jobs of other users are counted, not named."""

    epoch: int
    jobs: tuple[str, ...]
    others: int
    gpus: tuple[int, ...]
    launched: float
    started: float | None
    ended: float | None
    how: str


class Event(BaseModel):
    """Something that happened to some of a user's jobs, or to the service."""

    number: int
    time: float
    kind: str
    jobs: tuple[str, ...]
    text: str


class Overview(BaseModel):
    """The service as a whole, for one user.

    utilisation   share of the GPUs that groups held in the last ten minutes
    jobs          of all users, by state
    """

    user: str
    admin: bool
    gpus: int
    gpu: str
    policy: str
    busy: int
    utilisation: float
    jobs: dict[str, int]
    gpu_hours: float
    now: float


@dataclass
class Curve:
    """Losses by step: means of equally many steps, twice as many each time it has grown full."""

    points: list[tuple[int, float]] = field(default_factory=list)
    every: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, step: int, loss: float) -> None:
        """Add a step; one that was told before takes back all behind it."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self.every:
            return
        self.points.append((step, self._sum / self._count))
        self._sum, self._count = 0.0, 0
        if len(self.points) >= POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [(later, (a + b) / 2) for (_, a), (later, b) in pairs]
            self.every *= 2


@dataclass
class Metrics:
    """Contents of a job's metrics file, as far as it was read."""

    path: Path
    curve: Curve = field(default_factory=Curve)
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    _read: int = 0
    _inode: int = 0
    _tokens: tuple[float, float] | None = None

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        try:
            status = self.path.stat()
            if status.st_ino != self._inode or status.st_size < self._read:
                self.__init__(self.path)  # type: ignore[misc]
                self._inode = status.st_ino
            before = self._read
            with self.path.open("rb") as file:
                while status.st_size > file.seek(self._read):
                    content = file.read(READ_BYTES)
                    whole = content[: content.rfind(b"\n") + 1]
                    if not whole:
                        break
                    self._read += len(whole)
                    for row in parsed_metrics(whole):
                        self._take(row)
        except OSError:
            return False
        return self._read > before

    def _take(self, row: dict[str, Any]) -> None:
        if row.get("eval_loss") is not None:
            self.eval_loss = row["eval_loss"]
        if "loss" not in row:
            return
        self.step, self.loss = row["step"], row["loss"]
        if self.loss is not None:
            self.curve.add(self.step, self.loss)
        before, self._tokens = self._tokens, (row.get("tokens", 0), row.get("seconds", 0))
        if before is not None and self._tokens[1]:
            pace = (self._tokens[0] - before[0]) / self._tokens[1]
            old = self.tokens_per_second
            self.tokens_per_second = pace if old is None else 0.9 * old + 0.1 * pace


@dataclass(slots=True)
class Shown:
    """A job as it was shown last; version: of the view, when that changed."""

    owned: OwnedJob
    status: JobStatus
    body: bytes
    version: int


class RunView:
    """The run of a folder, as far as `refresh` has read it; one thread refreshes, all may read.

    gpus, gpu, policy   what the run was started with
    """

    def __init__(
        self, store: ServiceStore, folder: Path, *, gpus: int = 1, gpu: str = "", policy: str = ""
    ) -> None:
        self.store, self.folder = store, folder
        self.gpus, self.gpu, self.policy = gpus, gpu, policy
        self.version = 0
        self.shown: dict[str, Shown] = {}
        self.metrics: dict[str, Metrics] = {}
        self.groups: list[GroupSpan] = []
        self.last_event = 0
        self._ledger: object = None
        self._owned: list[OwnedJob] = []
        self._places: dict[str, GroupSpan] = {}
        # Rank and learning rate of the jobs of each submission, by its number.
        self._swept: dict[int, dict[str, tuple[int | None, float | None]]] = {}

    def refresh(self) -> None:
        """Read what is new in the run's files."""
        ledger = self.store.version()
        if ledger != self._ledger:
            self._owned = self.store.jobs()
            for name in self.shown.keys() - {owned.name for owned in self._owned}:
                del self.shown[name]
            self._read_groups()
            [(last,)] = self.store.rows("SELECT coalesce(max(number), 0) FROM events")
            self.last_event = int(last)
            self._ledger = ledger
        version = self.version + 1
        for owned in self._owned:
            shown = self.shown.get(owned.name)
            if shown is not None and shown.owned.submission != owned.submission:
                # Another job has the name now.
                self.metrics.pop(owned.name, None)
            changed = shown is None or shown.owned != owned or self._moved(shown)
            # Once it has ended, or waits, it is read a last time.
            fresh = (changed or owned.status == "running") and self._read_metrics(owned)
            if changed or fresh:
                self.shown[owned.name] = self.show(owned, version)
                self.version = version

    def show(self, owned: OwnedJob, version: int = 0) -> Shown:
        """A job, as far as its metrics were read."""
        metrics = self.metrics.get(owned.name) or Metrics(Path())
        request = json.loads(owned.request) if owned.request else {}
        span = self._places.get(owned.name) if owned.active else None
        begun = self.store.started
        rank, rate = self._swept_of(owned)
        told = owned.told if owned.status is None and owned.state == "refused" else ""
        status = JobStatus(
            name=owned.name, user=owned.user, state=owned.state,
            reason=owned.reason or told or "",
            step=max(metrics.step, int(owned.steps or 0)), steps=owned.total,
            priority=owned.priority, submission=owned.submission, submitted=owned.submitted,
            started=None if owned.first_started is None else begun + owned.first_started,
            ended=None if owned.ended is None else begun + owned.ended,
            base=request.get("base", ""), rank=rank, learning_rate=rate,
            loss=metrics.loss, eval_loss=metrics.eval_loss,
            tokens_per_second=metrics.tokens_per_second,
            group=span.epoch if span else None, gpus=span.gpus if span else (),
        )  # fmt: skip
        return Shown(owned, status, status.model_dump_json().encode(), version)

    def visible(self, user: User, after: int = -1) -> list[Shown]:
        """A user's jobs that changed behind a version, in order of submission."""
        return [
            shown
            for shown in list(self.shown.values())
            if shown.version > after and (user.admin or shown.owned.user == user.name)
        ]

    def spans(self, user: User) -> list[GroupSpan]:
        """The formations of groups, as this user may see them."""
        return [self._as_seen(span, user) for span in self.groups]

    def events(self, user: User, after: int, most: int = 200) -> list[Event]:
        """Events of a user's jobs, and of the service."""
        return [
            # What a group told in detail may name the others in it.
            Event(
                number=number,
                time=at,
                kind=kind,
                jobs=mine,
                text=text if len(mine) == len(jobs) else text.partition(", but:")[0],
            )
            for number, at, kind, jobs, text in self.store.events(after, most)
            if (mine := self._own(user, jobs)) or not jobs
        ]

    def overview(self, user: User) -> Overview:
        """Overview of the service for a user."""
        now = time.time()
        counts: dict[str, int] = {}
        for owned in self._owned:
            counts[owned.state] = counts.get(owned.state, 0) + 1
        open_gpus = {gpu for span in self.groups if span.ended is None for gpu in span.gpus}
        return Overview(
            user=user.name, admin=user.admin, gpus=self.gpus, gpu=self.gpu, policy=self.policy,
            busy=len(open_gpus), utilisation=self._utilisation(now), jobs=counts,
            gpu_hours=self.store.gpu_hours(user.name), now=now,
        )  # fmt: skip

    def _utilisation(self, now: float) -> float:
        first = max(now - WINDOW_SECONDS, self.store.started)
        held = (
            max(0.0, (span.ended or now) - max(span.launched, first)) * len(span.gpus)
            for span in self.groups
        )
        return min(1.0, sum(held) / max((now - first) * self.gpus, 1e-9))

    def _read_groups(self) -> None:
        rows = self.store.rows(
            "SELECT epoch, jobs, gpus, launched, started, ended, how FROM epochs "
            "ORDER BY epoch DESC LIMIT ?",
            GROUPS,
        )
        begun = self.store.started
        self.groups = [
            GroupSpan(
                epoch=epoch, jobs=json.loads(jobs), others=0, gpus=json.loads(gpus),
                launched=begun + launched, started=started and begun + started,
                ended=None if ended is None else begun + ended, how=how,
            )
            for epoch, jobs, gpus, launched, started, ended, how in rows[::-1]
        ]  # fmt: skip
        self._places = {
            name: span for span in self.groups if span.ended is None for name in span.jobs
        }

    def _read_metrics(self, owned: OwnedJob) -> bool:
        metrics = self.metrics.setdefault(owned.name, Metrics(self.folder / owned.name / METRICS))
        return metrics.refresh()

    def _swept_of(self, owned: OwnedJob) -> tuple[int | None, float | None]:
        number = owned.submission
        if number not in self._swept:
            jobs = self.store.described(number)
            self._swept[number] = {
                name: (rank_of(spec), learning_rate_of(spec)) for name, spec in jobs.items()
            }
        return self._swept[number].get(owned.name, (None, None))

    def _moved(self, shown: Shown) -> bool:
        span = self._places.get(shown.owned.name)
        return shown.status.group != (span.epoch if span and shown.owned.active else None)

    def _own(self, user: User, jobs: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in jobs if self._may_see(user, name))

    def _may_see(self, user: User, name: str) -> bool:
        shown = self.shown.get(name)
        return user.admin or (shown is not None and shown.owned.user == user.name)

    def _as_seen(self, span: GroupSpan, user: User) -> GroupSpan:
        mine = self._own(user, span.jobs)
        if len(mine) == len(span.jobs):
            return span
        how = span.how.partition(":")[0]
        update = {"jobs": mine, "others": len(span.jobs) - len(mine), "how": how}
        return span.model_copy(update=update)


def log_lines(content: bytes) -> Iterator[str]:
    """A job's metrics as lines that people read."""
    for row in parsed_metrics(content):
        if "samples" in row:
            for sample in row["samples"]:
                yield f"step {row['step']}  {sample['prompt']!r} -> {sample['completion']!r}"
            continue
        told = (f"{name} {_short(value)}" for name, value in row.items() if name != "step")
        yield f"step {row['step']}  {'  '.join(told)}"


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
