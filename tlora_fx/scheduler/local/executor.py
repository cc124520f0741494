"""The executor of this machine: each group is a process for each GPU of its layout, or one on CPU.

    FOLDER/groups/000012/worker.json     what the group's workers are to do
                        /successor       the worker.json of the group that shall take over
                        /events.jsonl    what its first process reports
                        /rank-0.log      what each process printed
                        /train/          run folder: the group's checkpoints
    FOLDER/JOB/                          adapter, metrics and status of a job, whatever its group

A job goes on from the newest checkpoint of the group that it was in last. Old groups' checkpoints
are removed as soon as no job needs them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import GIB, Cluster
from tlora_fx.errors import PlaceTaken, RunFolderError, WorkerLost, WorkerStalled
from tlora_fx.host.durable import replace_file
from tlora_fx.host.memory import usable_cpus
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.run_folder import PRIVATE
from tlora_fx.runtime.workers.protocol import (
    CROWDED,
    EVENTS,
    SUCCESSOR,
    WORKER_CONFIG,
    EventReader,
    WorkerConfig,
    existing,
)
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    ExecutorEvent,
    Failed,
    Finished,
    GroupEvent,
    GroupStarted,
    Noted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.lease import revoke
from tlora_fx.scheduler.local.processes import IdleNews
from tlora_fx.scheduler.state import Group, JobRequest
from tlora_fx.scheduler.store import Ledger

TAIL_LINES = 12
NO_ROOM = "no memory beside idle workers, which are let go of"
#: The least that a group may go without progress.
STEP_SECONDS = 300.0
#: Compiled layers may be compiled anew for rows of another size, in the middle of a step.
COMPILING_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """How long a group may go without progress before it is killed.

    seconds        None: `times` its longest step so far, and at least `least_seconds`
    first_seconds  until its first step is done, which loads, compiles and captures; and while it
                   evaluates or writes a checkpoint
    """

    seconds: float | None = None
    times: float = 20.0
    min_seconds: float = STEP_SECONDS
    first_seconds: float = 1800.0

    def of(self, longest_seconds: float) -> float:
        """For a group whose longest step took so long."""
        if self.seconds is not None:
            return self.seconds
        return max(self.min_seconds, self.times * longest_seconds)


class Watchdog:
    """Knows when a group has gone too long without a sign.

    longest   seconds of its longest step
    """

    def __init__(self, limits: StallLimits) -> None:
        self.limits = limits
        self.longest = 0.0
        self._heard = time.monotonic()
        self._stepped = self._busy = False
        self._asked: float | None = None
        self._grace: float | None = None

    def hear(self, kind: str) -> None:
        """A line of the group's event log came."""
        now = time.monotonic()
        if kind == "progress":
            # The first one ends a time in which it compiled.
            self.longest = max(self.longest, now - self._heard) if self._stepped else 0.0
            self._stepped = True
        self._busy = kind in ("saving", "evaluating")
        self._heard = now

    def asked(self) -> None:
        """The group is to stop."""
        self._asked = time.monotonic()

    def hurry(self, grace_seconds: float) -> None:
        """From now on it has no longer than this to stop."""
        self._asked, self._grace = time.monotonic(), grace_seconds

    @property
    def seconds(self) -> float:
        """How long it may go without a sign now."""
        usual = self.limits.of(self.longest)
        busy = self._busy or not self._stepped
        return max(usual, self.limits.first_seconds) if busy else usual

    def reason(self) -> str:
        """Why it is to be killed; "" where it is not."""
        now = time.monotonic()
        if self._asked is not None and self._grace is not None:
            if now - self._asked <= self._grace:
                return ""
            what, most = "a group did not stop in its grace", self._grace
        elif now - self._heard <= self.seconds:
            return ""
        else:
            what, most = "a group made no progress and was killed", self.seconds
        silent = f"no sign for {now - self._heard:.1f} s"
        step = f"; its longest step took {self.longest:.1f} s" if self.longest else ""
        return str(WorkerStalled(what, expected=f"at most {most:.4g} s", found=silent + step))


class Processes(Protocol):
    """What starts the processes of groups, by number; see `ForkServer`."""

    @property
    def ready(self) -> bool:
        """Whether processes begin at once."""

    def begin(self) -> None:
        """Make ready."""

    def start(
        self,
        order: Path,
        log: Path,
        environment: Mapping[str, str],
        module: str = "",
        *,
        stays: str = "",
        place: Iterable[int] = (),
        needs: float | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> int:
        """Start one; its number."""

    def free_memory(self, worker: int, needs: float | None) -> None:
        """One will need so many bytes."""

    def news(self) -> list[IdleNews]:
        """What became of idle ones since the last call."""

    def signal(self, worker: int, number: int) -> None:
        """Send one a signal; nothing happens where it has ended."""

    def code(self, worker: int) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def close(self) -> None:
        """End all."""


@dataclass(slots=True)
class RunningGroup:
    """A formation that was launched.

    clock       from time of day to the executor's seconds
    output      the run folder with its checkpoints, which one that took over has from the other
    layout      that its processes have, and those of whoever takes over from it
    stays       what jobs must have that join it, as `WorkerConfig` says
    log         where it prints
    begun       whether it has processes; one that is to take over has none yet
    successor   what takes over from it
    needs       bytes of each of its GPUs, or of main memory; None: not known
    """

    epoch: int
    jobs: tuple[str, ...]
    folder: Path
    server: Processes
    workers: tuple[int, ...]
    clock: Callable[[float], float]
    committed: dict[str, float]
    watchdog: Watchdog
    output: Path
    layout: Layout | None = None
    stays: str = ""
    log: Path | None = None
    begun: bool = True
    successor: RunningGroup | None = None
    needs: float | None = None
    asked: bool = False
    over: bool = False
    handed_over: bool = False
    failed: bool = False
    at_fault: str | None = None
    reason: str = ""
    settled: set[str] = field(default_factory=set)
    event_reader: EventReader = field(init=False)

    def __post_init__(self) -> None:
        self.event_reader = EventReader(self.folder / EVENTS)

    def drain(self) -> None:
        """Ask for a checkpoint and an end; once."""
        if not self.asked:
            self.asked = True
            self.watchdog.asked()
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """A signal for each process."""
        for worker in self.workers:
            self.server.signal(worker, number)

    def ended(self) -> bool:
        """Whether no process is left."""
        return all(self.server.code(worker) is not None for worker in self.workers)

    def events(self, now: float) -> Iterator[GroupEvent]:
        """What is new."""
        if self.over:
            return
        codes = [self.server.code(worker) for worker in self.workers]
        whole = all(code is not None for code in codes)
        # Read after the codes: once all have ended, nothing more is told.
        for line in self.event_reader.lines():
            yield from self._read(line)
        if self.handed_over:
            return
        if whole:
            self.over = True
            yield from self._end(now, [code for code in codes if code is not None])
        elif any(codes):
            # The others wait for one that has died.
            self.send(signal.SIGKILL)
        elif reason := self.watchdog.reason():
            self.reason = reason
            self.send(signal.SIGKILL)

    def _read(self, line: Mapping[str, Any]) -> Iterator[GroupEvent]:
        time = self.clock(line["time"])
        self.watchdog.hear(line["kind"])
        match line["kind"]:
            case "started":
                yield GroupStarted(time, self.epoch, line.get("paused"))
            case "handed_over":
                yield self._hand_over(time)
            case "declined":
                yield Warned(time, self.epoch, f"it is formed anew: {line['reason']}")
                self.drain()
            case "progress":
                yield Progress(time, self.epoch, line["steps"])
            case "saved":
                self.committed |= line["steps"]
                yield Committed(time, self.epoch, line["steps"], str(self.output))
                yield from self._settled(time, line)
            case "warned":
                yield Warned(time, self.epoch, line["text"])
            case "failed":
                self.reason = line["reason"]
                # A job alone is at fault for whatever its trainer refuses.
                alone = self.jobs[0] if len(self.jobs) == 1 else None
                self.at_fault = line["job"] if line["job"] in self.jobs else alone

    def _hand_over(self, time: float) -> Drained:
        """The successor has the processes now."""
        assert self.successor is not None
        self.over = self.handed_over = True
        self.successor.workers, self.successor.begun = self.workers, True
        return Drained(time, self.epoch, dict(self.committed), self.successor.epoch)

    def _settled(self, time: float, line: Mapping[str, Any]) -> Iterator[GroupEvent]:
        for job, (status, reason) in line["ended"].items():
            if job in self.settled:
                continue
            self.settled.add(job)
            if status == "done":
                yield Finished(time, self.epoch, job, line["steps"][job])
            else:
                yield Failed(time, self.epoch, job, reason)

    def _end(self, now: float, codes: list[int]) -> Iterator[GroupEvent]:
        """The last events; those of single jobs that ended came before."""
        if CROWDED in codes:
            # No job is at fault that would have had memory without the idle workers beside it.
            self.at_fault, self.reason = None, f"{NO_ROOM}: {self.reason or self._why(codes)}"
        # Where it was asked to stop, that may be what the trainer stumbled over.
        if not self.asked and self.at_fault is not None and self.at_fault not in self.settled:
            yield Failed(now, self.epoch, self.at_fault, self.reason)
        stopped = self.asked and all(code in (0, 128 + signal.SIGTERM) for code in codes)
        yield from self._unwritten(now)
        if stopped or not any(codes):
            yield Drained(now, self.epoch, dict(self.committed))
        else:
            self.failed = True
            yield Failed(
                now, self.epoch, None, self.reason or self._why(codes), dict(self.committed)
            )

    def _unwritten(self, now: float) -> Iterator[GroupEvent]:
        """A checkpoint that was written, and its writer killed before it told."""
        ended = {}
        steps = {}
        # Of jobs that left it, another group may know better by now.
        mine = {*self.jobs, *(self.successor.jobs if self.successor else ())}
        # One that was to come back has been elsewhere: what it left here may be old.
        known = {**(self.successor.committed if self.successor else {}), **self.committed}
        found = CheckpointStore(self.output).counters()
        for job, counters in found.items():
            if job not in mine:
                continue
            if counters["step"] > known.get(job, 0) or counters["status"] != "running":
                steps[job] = counters["step"]
            if counters["status"] != "running":
                ended[job] = (counters["status"], counters["reason"])
        if steps and (steps.keys() - self.settled):
            self.committed |= steps
            epoch = self.successor.epoch if self.successor else self.epoch
            yield Committed(now, epoch, steps, str(self.output))
            yield from self._settled(now, {"steps": steps, "ended": ended})

    def _why(self, codes: list[int]) -> str:
        bad = next(code for code in codes if code)
        how = f"killed by {signal.Signals(-bad).name}" if bad < 0 else f"exit code {bad}"
        log = next(iter(sorted(self.folder.glob("*.log"))), self.log)
        lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
        said = [line for line in lines if not re.match(r"\s*$", line)][-TAIL_LINES:]
        return "\n".join([f"a process ended: {how}", *said])


KILL_SECONDS = 30.0
#: That a group whose jobs have all ended may take for its own end.
LAST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How groups are run.

    more             for workers of other kinds
    pipeline         passes instead of the default, with extensions that bring some of them
    accept_changes   jobs go on though their data or base are not as they were
    callbacks        FILE.py:CLASS of a `TrainerCallback` that each group's process makes and tells
    resident         a worker whose group has ended keeps the base for the next group
    memory_of        bytes that a group needs of each of its GPUs, or of main memory; None: nobody
                     knows
    """

    device: str = "cpu"
    save_seconds: float = 60.0
    max_row_tokens: int = 16384
    compiled: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    stall: StallLimits = field(default_factory=StallLimits)
    pipeline: str | None = None
    extensions: tuple[str, ...] = ()
    accept_changes: bool = False
    callbacks: tuple[str, ...] = ()
    resident: bool = True
    memory_of: Callable[[Group, Sequence[JobRequest]], float | None] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Where a job's newest committed state lies.

    steps   optimizer steps that it has done there
    """

    path: Path
    steps: float


class LocalExecutor:
    """Runs groups on this machine.

    cluster   one node: its GPUs, or slots of a CPU
    specs     what the trainer must know of a job, by name; it may grow
    sources   by job, where its newest committed state lies; those of an earlier process
    started   time of day at second 0 of the executor's clock
    commits   hears of commits that no event tells: those of groups that are killed
    """

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        specs: Mapping[str, Mapping[str, Any]],
        server: Processes,
        *,
        options: LocalOptions | None = None,
        sources: Mapping[str, CheckpointSource] | None = None,
        started: float | None = None,
        commits: Callable[[Committed], None] | None = None,
    ) -> None:
        self.folder, self.cluster, self.specs = folder, cluster, specs
        self.options = options or LocalOptions()
        self.sources = dict(sources or {})
        self._started = time.time() if started is None else started
        self._commits = commits or (lambda event: None)
        self._server = server
        self._held: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, RunningGroup] = {}
        self._ended: set[str] = set()
        self._bases: dict[str, str] = {}
        server.begin()

    @property
    def ready(self) -> bool:
        """Whether workers would begin at once; until then they wait for imports."""
        return self._server.ready

    def now(self) -> float:
        """Seconds on the executor's clock."""
        return self._clock(time.time())

    def _clock(self, time_of_day: float) -> float:
        return time_of_day - self._started

    def inventory(self) -> Cluster:
        """This machine; it has one node, and that is never lost while this process runs."""
        return self.cluster

    def reserve(self, group: Group, epoch: int) -> None:
        there = set(self.cluster.present())
        taken = {gpu for other, held in self._held.items() if other != epoch for gpu in held}
        wrong = sorted(gpu for gpu in group.place if gpu in taken or gpu not in there)
        if wrong or not group.place:
            raise PlaceTaken(
                f"the group of {', '.join(group.jobs)} cannot have its place",
                epoch=epoch,
                expected=f"free: {sorted(there - taken)}",
                found=f"place {list(group.place)}",
            )
        self._held.setdefault(epoch, group.place)

    def launch(
        self,
        group: Group,
        epoch: int,
        jobs: Sequence[JobRequest],
        steps_done: Mapping[str, float],
        layout: Layout | None = None,
    ) -> None:
        """Start the group's processes.

        steps_done   not needed: each job's newest checkpoint says it
        raises       PlaceTaken where nothing is reserved for this epoch
        """
        if epoch in self._groups:
            return
        if epoch not in self._held:
            raise PlaceTaken("nothing is reserved for this group", epoch=epoch)
        self._groups[epoch] = running = self._running(epoch, group, layout)
        running.needs = self._memory_of(group, jobs)
        self._bases |= {self._stays(group): job.base for job in jobs}
        self._begin(running, group)

    def _running(self, epoch: int, group: Group, layout: Layout | None) -> RunningGroup:
        folder = self.folder / "groups" / f"{epoch:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        committed = {n: self.sources[n].steps for n in group.jobs if n in self.sources}
        return RunningGroup(
            epoch, group.jobs, folder, self._server, (), self._clock, committed,
            Watchdog(self.options.stall), folder / "train", layout,
        )  # fmt: skip

    def _memory_of(self, group: Group, jobs: Sequence[JobRequest]) -> float | None:
        memory_of = self.options.memory_of
        return None if memory_of is None else memory_of(group, jobs)

    def _begin(self, running: RunningGroup, group: Group) -> None:
        """Start a group's processes."""
        folder, gpus = running.folder, self._gpus(running)
        config = self._config(folder, running.epoch, group, gpus, running.layout)
        config.write(folder / WORKER_CONFIG)
        running.workers = self._start(running, folder, config, gpus)
        running.stays, running.begun = config.stays, True
        running.log = folder / "rank-0.log"

    def _gpus(self, running: RunningGroup) -> tuple[int, ...]:
        """Those of its place that its processes train on."""
        return self._held[running.epoch][: running.layout.mesh.size if running.layout else 1]

    def _start(
        self, running: RunningGroup, folder: Path, config: WorkerConfig, gpus: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Start the processes of a group, whose config is in its folder; their numbers."""
        kind = self._kind(config, gpus)
        return tuple(
            self._server.start(
                folder / WORKER_CONFIG, folder / f"rank-{rank}.log", environment,
                stays=kind, place=gpus[rank : rank + 1] if self.options.device == "cuda" else (),
                needs=running.needs, rank=rank, size=len(gpus),
            )
            for rank, environment in enumerate(_environments(gpus))
        )  # fmt: skip

    def _kind(self, config: WorkerConfig, gpus: tuple[int, ...]) -> str:
        """What the next order must have for which a group's processes stay."""
        if not config.stays or len(gpus) == 1:
            return config.stays
        kind = json.dumps([config.stays, config.mesh, config.shard_base])
        self._bases[kind] = self._bases.get(config.stays, "base")
        return kind

    def can_change(self, group: Group, epoch: int, successor: Group) -> bool:
        """Where the group trains jobs of the same base, on one process or several."""
        running = self._groups.get(epoch)
        if running is None or running.over or running.asked or not running.stays:
            return False
        return self._stays(successor) == running.stays

    def change(
        self,
        group: Group,
        epoch: int,
        successor: Group,
        successor_epoch: int,
        jobs: Sequence[JobRequest],
        steps_done: Mapping[str, float],
    ) -> None:
        if successor_epoch in self._groups:
            return
        before = self._groups[epoch]
        running = self._running(successor_epoch, successor, before.layout)
        running.begun, running.stays = False, before.stays
        running.output, running.log = before.output, before.log
        running.needs = self._memory_of(successor, jobs)
        for worker in before.workers:
            self._server.free_memory(worker, running.needs)
        kept = [name for name, source in self.sources.items() if source.path == before.output]
        self._held[successor_epoch] = self._held[epoch]
        gpus = self._gpus(running)
        config = self._config(running.folder, successor_epoch, successor, gpus, running.layout)
        output, keeps = str(before.output), (*before.jobs, *kept)
        replace(config, output=output, keeps=keeps).write(running.folder / WORKER_CONFIG)
        self._groups[successor_epoch] = before.successor = running
        # Last, since the worker looks for it.
        replace_file(before.folder / SUCCESSOR, str(running.folder / WORKER_CONFIG).encode())

    def _inherit(self, before: RunningGroup, successor: RunningGroup) -> Iterator[GroupEvent]:
        """A group has ended before its successor could take over: that is formed anew."""
        left = tuple(name for name in successor.jobs if name not in self._ended)
        before.successor = None
        if successor.asked or not left:
            successor.over = True
            yield Drained(self.now(), successor.epoch, {})
            return
        successor.jobs, successor.output = left, successor.folder / "train"
        successor.committed = {n: self.sources[n].steps for n in left if n in self.sources}
        successor.watchdog = Watchdog(self.options.stall)
        place = self._held[successor.epoch]
        self._begin(successor, Group(left, len(place), place))

    def _config(
        self, folder: Path, epoch: int, group: Group, gpus: tuple[int, ...], layout: Layout | None
    ) -> WorkerConfig:
        options = self.options
        return WorkerConfig(
            epoch=epoch,
            jobs=tuple(self.specs[name] for name in group.jobs),
            sources={
                name: str(self.sources[name].path) for name in group.jobs if name in self.sources
            },
            output=str(folder / "train"),
            job_folders=str(self.folder),
            event_log=str(folder / EVENTS),
            device=options.device,
            gpus=gpus,
            mesh="" if layout is None or len(gpus) == 1 else str(layout.mesh),
            shard_base=layout is not None and layout.shard_base,
            save_seconds=options.save_seconds,
            max_row_tokens=options.max_row_tokens,
            compiled=options.compiled,
            options=options.more,
            pipeline=options.pipeline,
            extensions=options.extensions,
            accept_changes=options.accept_changes,
            callbacks=options.callbacks,
            stays=self._stays(group),
        )

    def _stays(self, group: Group) -> str:
        """What others need to join it: the base; "" where a pipeline of a user's own made it."""
        base = self.specs[group.jobs[0]].get("base")
        if not self.options.resident or self.options.pipeline is not None:
            return ""
        return "" if base is None else json.dumps(base, sort_keys=True, default=str)

    def events(self) -> list[ExecutorEvent]:
        found: list[ExecutorEvent] = []
        for running in list(self._groups.values()):
            found += running.events(self.now()) if running.begun else ()
        self._note(found)
        for running in list(self._groups.values()):
            successor = running.successor
            if (
                running.over
                and not running.failed
                and successor is not None
                and not successor.begun
            ):
                found += self._inherit(running, successor)
        # Processes of one group have the same said of them.
        texts = dict.fromkeys(self._told_of(news) for news in self._server.news())
        found += [Noted(self.now(), text) for text in texts]
        return sorted(found, key=lambda event: event.time)

    def _told_of(self, news: IdleNews) -> str:
        """What became of an idle worker, in words."""
        idle = f"idle {self._bases.get(news.kind, 'base')} ({news.held / GIB:.1f} GiB)"
        whose = [e for e, group in self._groups.items() if news.order in group.workers]
        group = f"group {max(whose)}" if whose else "a group"
        if news.stays:
            return f"{idle} stays beside {group}"
        return f"{idle} is let go of" + (f": {group} needs its memory" if news.order else "")

    def _note(self, found: Iterable[ExecutorEvent]) -> None:
        for event in found:
            match event:
                case Committed():
                    for job in event.steps.keys() - self._ended:
                        self.sources[job] = CheckpointSource(Path(event.path), event.steps[job])
                case Finished() | Failed(job=str()):
                    self._ended.add(str(event.job))
                    self.sources.pop(str(event.job), None)

    def drain(self, group: Group, epoch: int) -> None:
        if epoch in self._groups:
            self._groups[epoch].drain()

    def hurry(self, grace_seconds: float) -> None:
        """From now on no group has longer than this to stop; what has not is killed."""
        for running in self._groups.values():
            running.watchdog.hurry(grace_seconds)

    def kill(self, group: Group, epoch: int) -> None:
        """End the processes at once, and wait until they have ended."""
        running = self._groups.get(epoch)
        if running is None or running.handed_over:
            return
        running.send(signal.SIGKILL)
        _wait(running, KILL_SECONDS)
        # What it has committed counts, though nobody is told; a job that was done will find that it
        # is when it is launched again.
        commits = [e for e in running.events(self.now()) if isinstance(e, Committed)]
        self._note(commits)
        for event in commits:
            self._commits(event)
        running.over = True

    def release(self, group: Group, epoch: int) -> None:
        """Give the place back, and remove the checkpoints that nobody needs any more."""
        running = self._groups.get(epoch)
        if running is not None and not running.handed_over and not running.ended():
            if running.settled.issuperset(running.jobs):
                # Its last checkpoint is on the way, and then it is there for the next group.
                _wait(running, LAST_SECONDS)
            self.kill(group, epoch)
        self._groups.pop(epoch, None)
        self._held.pop(epoch, None)
        self._tidy()

    def _tidy(self) -> None:
        """Keep the checkpoints of running groups and those that a job goes on from."""
        needed = {running.output for running in self._groups.values()}
        needed |= {source.path for source in self.sources.values()}
        for path in (self.folder / "groups").glob("*/train"):
            if path not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End what still runs: each group is drained."""
        self._server.close()


def _wait(running: RunningGroup, seconds: float) -> None:
    """Wait until a group has ended, so long at most."""
    end = time.monotonic() + seconds
    while not running.ended() and time.monotonic() < end:
        time.sleep(0.01)


def _environments(gpus: tuple[int, ...]) -> Iterable[dict[str, str]]:
    """The variables of torchrun for each process; none where there is one only."""
    if len(gpus) == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(len(gpus)):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(gpus)),
            "LOCAL_WORLD_SIZE": str(len(gpus)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


def cpu_threads(slots: int) -> dict[str, str]:
    """Each slot's share of the cores, for its worker."""
    cores = usable_cpus()
    return {"OMP_NUM_THREADS": str(max(1, cores // slots))}


# Go on with a run whose process was killed: what its ledger and its groups' folders say.
#
# The ledger may not have heard of the last checkpoints: their writers outlive the run by some
# seconds, and stop with one more. So nothing is read before the last of them has ended.

WAIT_SECONDS = 120.0
GRACE_SECONDS = 3.0
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


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A run's folder that this process holds.

    workers   a file descriptor for the workers to inherit: the folder is held as long as one of
              them is there
    """

    path: Path
    workers: int
    _lock: os.stat_result

    def require_there(self) -> None:
        """Refuse to go on where the folder was removed, or another took its place.

        raises    RunFolderError
        """
        try:
            there = os.path.samestat((self.path / ".lock").stat(), self._lock)
        except OSError:
            there = False
        if not there:
            raise RunFolderError(
                "the output folder was removed or replaced while it was in use",
                folder=self.path,
                help="what was trained since is lost; start again with another -o",
            )


@contextmanager
def held(folder: Path) -> Iterator[HeldFolder]:
    """Hold a run's folder for this process.

    raises    RunFolderError where another process runs in it, WorkerLost where the workers of a
              killed one do not end
    """
    with _opened(folder, ".lock") as mine, _opened(folder, ".workers.lock") as theirs:
        # A run that is killed while it starts its server leaves the lock to that until its exec.
        if not _locked(mine, GRACE_SECONDS):
            raise RunFolderError(
                "another process is running in the output folder",
                folder=folder,
                help="wait for it, or choose another folder with -o",
            )
        if not _locked(theirs, WAIT_SECONDS):
            raise WorkerLost(
                f"a process of the killed run still trains after {WAIT_SECONDS:g} seconds",
                folder=folder,
                help=f"see who holds it with: fuser {folder / '.workers.lock'}",
            )
        yield HeldFolder(folder, theirs.fileno(), os.fstat(mine.fileno()))


def _opened(folder: Path, name: str) -> IO[str]:
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return (folder / name).open("a")
    except OSError as error:
        raise RunFolderError(
            "the output folder cannot be written",
            folder=folder,
            found=error,
            help="choose another folder with -o",
        ) from error


def _locked(file: IO[str], seconds: float) -> bool:
    """Whether a lock is had within some seconds."""
    end = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def recover(ledger: Ledger, folder: Path, now: float) -> list[int]:
    """Write down what the groups of a killed run have committed, and end them; their epochs."""
    open_epochs = [record for record in ledger.epochs() if record.ended is None]
    for record in open_epochs:
        group = folder / "groups" / f"{record.epoch:06d}"
        train = _output(group)
        # Workers on other machines may not have ended; one that took over has the other's lease.
        for folder_of_lease in (group, train.parent):
            revoke(folder_of_lease)
        counters = CheckpointStore(train).counters()
        steps = {job: float(counters_of_job["step"]) for job, counters_of_job in counters.items()}
        if steps:
            ledger.record(Committed(now, record.epoch, steps, str(train)))
        for job, counters_of_job in counters.items():
            if counters_of_job["status"] == "done":
                ledger.record(Finished(now, record.epoch, job, steps[job]))
            elif counters_of_job["status"] == "failed":
                ledger.record(Failed(now, record.epoch, job, counters_of_job["reason"]))
        ledger.record(Failed(now, record.epoch, None, KILLED))
    return [record.epoch for record in open_epochs]


def _output(folder: Path) -> Path:
    """Where a formation left its checkpoints: one that took over went on in the other's folder."""
    with suppress(OSError, ValueError):
        output = Path(WorkerConfig.read(existing(folder, WORKER_CONFIG)).output)
        if output.parent.parent.name == folder.parent.name:
            return folder.with_name(output.parent.name) / output.name
    return folder / "train"


def sources(ledger: Ledger) -> dict[str, CheckpointSource]:
    """By job that is not done, where its newest committed state lies."""
    return {
        record.name: CheckpointSource(Path(record.path), record.steps)
        for record in ledger.jobs()
        if record.path and record.is_active
    }
