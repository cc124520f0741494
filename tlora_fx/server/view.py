"""View of the service: jobs that may still train, their curves, and the groups on the GPUs.

One thread reads what is new in the ledger and in the jobs' metrics, and keeps it in memory, so that
a thousand who ask how a job is cost no more than one. A curve is thinned as it grows and has at
most `POINTS` points. A job that has ended leaves the memory, and what is shown of its metrics goes
into the ledger: whoever asks for it reads it there, by pages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from tlora_fx.config.hyperparameters import learning_rate_of, rank_of
from tlora_fx.errors import LedgerError
from tlora_fx.host.durable import whole_lines
from tlora_fx.runtime.run_folder import METRICS, parsed_metrics
from tlora_fx.server.ledger import User
from tlora_fx.server.store import BUT, REASON, OwnedJob, Page, ServiceStore

#: Of a curve, at most.
POINTS = 120
#: Formations that are shown, the newest.
GROUPS = 1000
#: Of one job's metrics, at a time.
READ_BYTES = 4 << 20
#: Submissions of which ranks and learning rates are kept in memory.
SWEPT = 1000
#: For which a job that has ended or was removed stays in memory: streams tell of it meanwhile.
RECENT_SECONDS = 60.0
#: Over which the share of GPUs that groups held is taken.
WINDOW_SECONDS = 600.0


class JobStatus(BaseModel):
    """A job: times are seconds since 1970, `loss` and `tokens_per_second` of its last steps.

    `number` grows with each job that is submitted; pages of jobs are asked for by it.

    rank            of its adapter; null where the job file does not tell
    learning_rate   of the job file, which the schedule scales
    """

    model_config = ConfigDict(ser_json_inf_nan="null")

    number: int
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
    visible       those that this user may see, by state
    """

    user: str
    admin: bool
    gpus: int
    gpu: str
    policy: str
    busy: int
    utilisation: float
    jobs: dict[str, int]
    visible: dict[str, int]
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

    def dumped(self) -> str:
        """Its fields as they are shown, for `loaded`."""
        return json.dumps(
            [self.step, self.loss, self.eval_loss, self.tokens_per_second, self.curve.points]
        )

    @classmethod
    def loaded(cls, path: Path, text: str) -> Self:
        """Metrics as they were dumped; they are not refreshed."""
        step, loss, eval_loss, tokens_per_second, points = json.loads(text)
        curve = Curve([(at, value) for at, value in points])
        return cls(path, curve, step, loss, eval_loss, tokens_per_second)

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        try:
            status = self.path.stat()
            if status.st_ino != self._inode or status.st_size < self._read:
                self.__init__(self.path)  # type: ignore[misc]
                self._inode = status.st_ino
            before = self._read
            while status.st_size > self._read:
                whole = whole_lines(self.path, self._read, READ_BYTES)
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
    shown               jobs that may still train, and those that ended a moment ago
    removed             jobs that were removed a moment ago: version, second, name and user
    groups_version      grows when `groups` changes
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
        self.groups_version = 0
        self.removed: list[tuple[int, float, str, str]] = []
        self.last_event = 0
        self._ledger: object = None
        self._owned: list[OwnedJob] = []
        self._totals: dict[tuple[str, str], int] = {}
        # Monotonic second at which jobs of `shown` were seen to be settled.
        self._settled: dict[str, float] = {}
        [(last,)] = store.rows("SELECT coalesce(max(number), 0) FROM removed")
        self._last_removed = int(last)
        self._spans: dict[int, GroupSpan] = {}
        self._owners: dict[str, str] = {}
        self._places: dict[str, GroupSpan] = {}
        # Rank and learning rate of the jobs of submissions, by number; those that were read last.
        self._swept: dict[int, dict[str, tuple[int | None, float | None]]] = {}

    def refresh(self) -> None:
        """Read what is new in the run's files."""
        ledger = self.store.version()
        version = self.version + 1
        settled: list[OwnedJob] = []
        if ledger != self._ledger:
            # First, so that a job that has a removed one's name is shown as what it is.
            self._read_removed(version)
            self._owned, self._totals = self.store.standing()
            settled = self._newly_settled()
            self._read_groups()
            [(last,)] = self.store.rows("SELECT coalesce(max(number), 0) FROM events")
            self.last_event = int(last)
            self._ledger = ledger
        for owned in (*self._owned, *settled):
            shown = self.shown.get(owned.name)
            changed = shown is None or shown.owned != owned or self._moved(shown)
            # Once it has ended, or waits, it is read a last time.
            fresh = (changed or owned.status == "running") and self._read_metrics(owned)
            if changed or fresh:
                self.shown[owned.name] = self.show(owned, version)
                self.version = version
        self._forget_ended()

    def _newly_settled(self) -> list[OwnedJob]:
        """Jobs of `shown` that have been settled since, as they are now."""
        unsettled = {owned.name for owned in self._owned}
        gone = self.shown.keys() - unsettled - self._settled.keys()
        self._settled |= dict.fromkeys(gone, time.monotonic())
        return [owned for name in gone for owned in self.store.jobs(name) if owned.name == name]

    def _read_removed(self, version: int) -> None:
        for number, name, user in self.store.rows(
            "SELECT number, name, user FROM removed WHERE number > ? ORDER BY number",
            self._last_removed,
        ):
            self._forget(name)
            self.removed = [*self.removed, (version, time.monotonic(), name, user)]
            self._last_removed, self.version = number, version

    def _forget_ended(self) -> None:
        """Forget what streams have had time to tell; what is shown of metrics is kept."""
        long_ago = time.monotonic() - RECENT_SECONDS
        names = [name for name, since in self._settled.items() if since < long_ago]
        metrics = {
            self.shown[name].owned.number: self.metrics[name].dumped()
            for name in names
            if name in self.metrics
        }
        try:
            if metrics:
                self.store.keep_summaries(metrics)
        except LedgerError:
            return  # A full disk takes them later.
        for name in names:
            self._forget(name)
        if self.removed and self.removed[0][1] < long_ago:
            self.removed = [each for each in self.removed if each[1] >= long_ago]

    def _forget(self, name: str) -> None:
        for memory in (self.shown, self.metrics, self._settled):
            memory.pop(name, None)

    def page(self, user: User, page: Page) -> list[Shown]:
        """Jobs that a user may see, those that have ended too; see `Page`."""
        owned = self.store.page(user, page)
        metrics = self._metrics_of(owned)
        return [self._as_shown(job) or self.show(job, metrics=metrics[job.name]) for job in owned]

    def one(self, user: User, name: str) -> Shown:
        """A job that a user may see; raises JobUnknown."""
        shown = self.shown.get(name)
        if shown is not None and (user.admin or shown.owned.user == user.name):
            return shown
        owned = self.store.job(user, name)
        return self._as_shown(owned) or self.show(
            owned, metrics=self._metrics_of([owned])[owned.name]
        )

    def curves(self, user: User, page: Page) -> dict[str, list[tuple[int, float]]]:
        """The loss by step, thinned, of the jobs of a page that have any."""
        metrics = self._metrics_of(self.store.page(user, page))
        return {name: each.curve.points for name, each in metrics.items() if each.curve.points}

    def curve(self, user: User, name: str) -> list[tuple[int, float]]:
        """The loss of one job by step, thinned; raises JobUnknown."""
        owned = self.store.job(user, name)
        return self._metrics_of([owned])[owned.name].curve.points

    def _as_shown(self, owned: OwnedJob) -> Shown | None:
        """What is in memory of a job, where that is what the ledger says."""
        shown = self.shown.get(owned.name)
        return shown if shown is not None and shown.owned == owned else None

    def _metrics_of(self, jobs: Sequence[OwnedJob]) -> dict[str, Metrics]:
        """Metrics of jobs: from memory, from the ledger, or read from their files and kept."""
        metrics = {job.name: self.metrics[job.name] for job in jobs if job.name in self.metrics}
        others = [job for job in jobs if job.name not in metrics]
        kept = self.store.summaries([job.name for job in others])
        new = {}
        for job in others:
            path = self.folder / job.name / METRICS
            if job.name in kept:
                metrics[job.name] = Metrics.loaded(path, kept[job.name])
                continue
            metrics[job.name] = each = Metrics(path)
            each.refresh()
            if not job.active:
                new[job.number] = each.dumped()
        if new:
            # A full disk keeps nobody from being answered.
            with suppress(LedgerError):
                self.store.keep_summaries(new)
        return metrics

    def show(self, owned: OwnedJob, version: int = 0, *, metrics: Metrics | None = None) -> Shown:
        """A job with its metrics; None: as far as they were read."""
        metrics = metrics or self.metrics.get(owned.name) or Metrics(Path())
        request = json.loads(owned.request) if owned.request else {}
        span = self._places.get(owned.name) if owned.active else None
        begun = self.store.started
        rank, rate = self._swept_of(owned)
        told = owned.told if owned.status is None and owned.state == "refused" else ""
        status = JobStatus(
            number=owned.number, name=owned.name, user=owned.user, state=owned.state,
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
        """A user's jobs of `shown` that changed behind a version, in order of submission."""
        return [
            shown
            for shown in list(self.shown.values())
            if shown.version > after and (user.admin or shown.owned.user == user.name)
        ]

    def removed_since(self, user: User, after: int, until: int) -> list[str]:
        """A user's jobs that were removed behind a version and until one.

        Names that other jobs have now are left out.
        """
        return [
            name
            for version, _, name, owner in self.removed
            if after < version <= until and (user.admin or owner == user.name)
            if name not in self.shown
        ]

    def spans(self, user: User) -> list[GroupSpan]:
        """The formations of groups, as this user may see them."""
        return [self._as_seen(span, user) for span in self.groups]

    def events(self, user: User, after: int, most: int = 200) -> list[Event]:
        """Events of a user's jobs, and of the service."""
        events = self.store.events(after, most)
        owners = self.store.owners({name for _, _, _, jobs, _ in events for name in jobs})
        return [
            # What a group told in detail may name the others in it.
            Event(
                number=number,
                time=at,
                kind=kind,
                jobs=mine,
                text=text if len(mine) == len(jobs) else _in_short(text),
            )
            for number, at, kind, jobs, text in events
            if (mine := _own(user, jobs, owners)) or not jobs
        ]

    def overview(self, user: User) -> Overview:
        """Overview of the service for a user."""
        now = self.store.now()
        counts, visible = dict[str, int](), dict[str, int]()
        totals = [(*key, jobs) for key, jobs in self._totals.items() if jobs]
        totals += [(owned.user, owned.state, 1) for owned in self._owned]
        for owner, state, jobs in totals:
            counts[state] = counts.get(state, 0) + jobs
            if user.admin or owner == user.name:
                visible[state] = visible.get(state, 0) + jobs
        open_gpus = {gpu for span in self.groups if span.ended is None for gpu in span.gpus}
        return Overview(
            user=user.name, admin=user.admin, gpus=self.gpus, gpu=self.gpu, policy=self.policy,
            busy=len(open_gpus), utilisation=self._utilisation(now), jobs=counts, visible=visible,
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
        """Read the groups that are new, and those that had not ended."""
        newest = max(self._spans, default=None)
        if newest is None:
            [(last,)] = self.store.rows("SELECT coalesce(max(epoch), 0) FROM epochs")
            newest = last - GROUPS
        unended = [epoch for epoch, span in self._spans.items() if span.ended is None]
        rows = self.store.rows(
            "SELECT epoch, jobs, gpus, launched, started, ended, how FROM epochs WHERE epoch > ? "
            "UNION ALL SELECT epoch, jobs, gpus, launched, started, ended, how FROM epochs "
            "WHERE epoch IN (SELECT value FROM json_each(?)) ORDER BY epoch",
            newest,
            json.dumps(unended),
        )
        spans = {row[0]: self._span(*row) for row in rows}
        if all(self._spans.get(epoch) == span for epoch, span in spans.items()):
            return
        before = self._spans | spans
        self._spans = {epoch: before[epoch] for epoch in sorted(before)[-GROUPS:]}
        names = {name for span in self._spans.values() for name in span.jobs}
        self._owners = {name: user for name, user in self._owners.items() if name in names}
        self._owners |= self.store.owners(names - self._owners.keys())
        self.groups = list(self._spans.values())
        self.groups_version += 1
        self._places = {
            name: span for span in self.groups if span.ended is None for name in span.jobs
        }

    def _span(
        self, epoch: int, jobs: str, gpus: str, launched: float, started: float | None,
        ended: float | None, how: str,
    ) -> GroupSpan:  # fmt: skip
        begun = self.store.started
        return GroupSpan(
            epoch=epoch, jobs=json.loads(jobs), others=0, gpus=json.loads(gpus),
            launched=begun + launched, started=started and begun + started,
            ended=None if ended is None else begun + ended, how=how,
        )  # fmt: skip

    def _read_metrics(self, owned: OwnedJob) -> bool:
        metrics = self.metrics.setdefault(owned.name, Metrics(self.folder / owned.name / METRICS))
        return metrics.refresh()

    def _swept_of(self, owned: OwnedJob) -> tuple[int | None, float | None]:
        number = owned.submission
        if number not in self._swept:
            jobs = self.store.described(number)
            for oldest in list(self._swept)[: len(self._swept) - SWEPT + 1]:
                self._swept.pop(oldest, None)
            self._swept[number] = {
                name: (rank_of(spec), learning_rate_of(spec)) for name, spec in jobs.items()
            }
        return self._swept[number].get(owned.name, (None, None))

    def _moved(self, shown: Shown) -> bool:
        span = self._places.get(shown.owned.name)
        return shown.status.group != (span.epoch if span and shown.owned.active else None)

    def _as_seen(self, span: GroupSpan, user: User) -> GroupSpan:
        mine = _own(user, span.jobs, self._owners)
        if len(mine) == len(span.jobs):
            return span
        how = span.how.partition(":")[0]
        update = {"jobs": mine, "others": len(span.jobs) - len(mine), "how": how}
        return span.model_copy(update=update)


def _own(user: User, jobs: Sequence[str], owners: Mapping[str, str]) -> tuple[str, ...]:
    """Those of some jobs that a user may see."""
    return tuple(name for name in jobs if user.admin or owners.get(name) == user.name)


def _in_short(text: str) -> str:
    return text.partition(BUT)[0].partition(REASON)[0]


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
    if isinstance(value, dict):  # seconds of phases
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
