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

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import GIB, Cluster
from tlora_fx.errors import PlaceTaken
from tlora_fx.host.durable import replace_file
from tlora_fx.host.memory import usable_cpus
from tlora_fx.runtime.workers.protocol import (
    EVENTS,
    SUCCESSOR,
    WORKER_CONFIG,
    TrainingOptions,
    WorkerConfig,
)
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    ExecutorEvent,
    Failed,
    Finished,
    GroupEvent,
    GroupLaunch,
    Noted,
)
from tlora_fx.scheduler.local.group import Processes, RunningGroup
from tlora_fx.scheduler.local.processes import IdleNews, WorkerStart
from tlora_fx.scheduler.local.recovery import CheckpointSource
from tlora_fx.scheduler.local.watchdog import StallLimits, Watchdog
from tlora_fx.scheduler.state import Group, JobRequest

KILL_SECONDS = 30.0
#: That a group whose jobs have all ended may take for its own end.
LAST_SECONDS = 5.0

#: No event of a worker is older when it is read.
MAX_EVENT_AGE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(TrainingOptions):
    """Options of how groups run.

    more        for workers of other kinds
    memory_of   bytes that a group needs of each of its GPUs, or of main memory; None: nobody knows
    """

    more: Mapping[str, Any] = field(default_factory=dict)
    stall: StallLimits = field(default_factory=StallLimits)
    memory_of: Callable[[Group, Sequence[JobRequest]], float | None] | None = None


class LocalExecutor:
    """Runs groups on this machine.

    cluster   one node: its GPUs, or slots of a CPU
    specs     specs of jobs for the trainer, by name; more may be added
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
        # Setting the machine's clock does not move the run's.
        self._begun = 0.0 if started is None else time.time() - started
        self._begun -= time.monotonic()
        self._commits = commits or (lambda event: None)
        self._server = server
        self._held: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, RunningGroup] = {}
        self._ended: set[str] = set()
        self._bases: dict[str, str] = {}
        # Folders of checkpoints that may be there, those of earlier processes too.
        self._checkpoints = set((folder / "groups").glob("*/train"))
        server.begin()

    @property
    def ready(self) -> bool:
        """Whether workers would begin at once; until then they wait for imports."""
        return self._server.ready

    def now(self) -> float:
        """Seconds on the executor's clock."""
        return self._begun + time.monotonic()

    def _clock(self, time_of_day: float) -> float:
        """The executor's seconds at which a worker wrote a time of day.

        A time in the future, or of long ago, says only that a clock was set: that is now.
        """
        age = time.time() - time_of_day
        return self.now() - (age if 0 <= age <= MAX_EVENT_AGE_SECONDS else 0.0)

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

    def launch(self, launch: GroupLaunch) -> None:
        """Start the group's processes; each job's newest checkpoint says its steps.

        raises       PlaceTaken where nothing is reserved for this epoch
        """
        group, epoch = launch.group, launch.epoch
        if epoch in self._groups:
            return
        if epoch not in self._held:
            raise PlaceTaken("nothing is reserved for this group", epoch=epoch)
        self._groups[epoch] = running = self._running(launch)
        self._bases |= {self._stays(group): job.base for job in launch.jobs}
        self._begin(running, group)

    def _running(self, launch: GroupLaunch, output: Path | None = None) -> RunningGroup:
        """A group without processes yet.

        output   where it saves, if not below its own folder
        """
        group, memory_of = launch.group, self.options.memory_of
        folder = self.folder / "groups" / f"{launch.epoch:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        committed = {n: self.sources[n].steps for n in group.jobs if n in self.sources}
        needs = None if memory_of is None else memory_of(group, launch.jobs)
        return RunningGroup(
            launch.epoch, group.jobs, folder, self._server, (), self._clock, committed,
            Watchdog(self.options.stall), output or folder / "train", launch.layout, needs=needs,
        )  # fmt: skip

    def _begin(self, running: RunningGroup, group: Group) -> None:
        """Start a group's processes."""
        folder, gpus = running.folder, self._gpus(running)
        self._checkpoints.add(running.output)
        config = self._config(folder, running.epoch, group, gpus, running.layout)
        config.write(folder / WORKER_CONFIG)
        kind = self._kind(config, gpus)
        running.workers = tuple(
            self._server.start(
                WorkerStart(
                    str(folder / WORKER_CONFIG), str(folder / f"rank-{rank}.log"),
                    self._environment(rank, gpus), stays=kind, needs=running.needs, rank=rank,
                    place=self._place_of(running, rank, gpus), size=len(gpus),
                )
            )
            for rank in range(len(gpus))
        )  # fmt: skip
        running.stays, running.begun = config.stays, True
        running.log = folder / "rank-0.log"

    def _gpus(self, running: RunningGroup) -> tuple[int, ...]:
        """Those of its place that its processes train on."""
        return self._held[running.epoch][: running.layout.mesh.size if running.layout else 1]

    def _environment(self, rank: int, gpus: tuple[int, ...]) -> dict[str, str]:
        """The variables of torchrun for a process; none where there is one only.

        The first process chooses the port (`runtime.launch.join`).
        """
        if len(gpus) == 1:
            return {}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return rank_variables(rank, [""] * len(gpus)) | master

    def _place_of(self, running: RunningGroup, rank: int, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """What a process of a group has for itself."""
        return gpus[rank : rank + 1] if self.options.device == "cuda" else ()

    def _kind(self, config: WorkerConfig, gpus: tuple[int, ...]) -> str:
        """What the next order must have for which a group's processes stay."""
        if not config.stays or len(gpus) == 1:
            return config.stays
        kind = json.dumps([config.stays, config.mesh, config.shard_base])
        self._bases[kind] = self._bases.get(config.stays, "base")
        return kind

    def can_change(self, group: Group, epoch: int, successor: Group) -> bool:
        """Whether a group can change into its successor: its workers serve the same base."""
        running = self._groups.get(epoch)
        if running is None or running.over or running.asked or not running.stays:
            return False
        return self._stays(successor) == running.stays

    def change(self, group: Group, epoch: int, successor: GroupLaunch) -> None:
        if successor.epoch in self._groups:
            return
        before = self._groups[epoch]
        running = self._running(replace(successor, layout=before.layout), before.output)
        running.begun, running.stays, running.log = False, before.stays, before.log
        for worker in before.workers:
            self._server.free_memory(worker, running.needs)
        kept = [name for name, source in self.sources.items() if source.path == before.output]
        self._held[successor.epoch] = self._held[epoch]
        gpus, group = self._gpus(running), successor.group
        config = self._config(running.folder, successor.epoch, group, gpus, running.layout)
        output, keeps = str(before.output), (*before.jobs, *kept)
        replace(config, output=output, keeps=keeps).write(running.folder / WORKER_CONFIG)
        self._groups[successor.epoch] = before.successor = running
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
        shared = {each.name: getattr(options, each.name) for each in fields(TrainingOptions)}
        return WorkerConfig(
            epoch=epoch,
            jobs=tuple(self.specs[name] for name in group.jobs),
            sources={
                name: str(self.sources[name].path) for name in group.jobs if name in self.sources
            },
            output=str(folder / "train"),
            job_folders=str(self.folder),
            event_log=str(folder / EVENTS),
            gpus=gpus,
            mesh="" if layout is None or len(gpus) == 1 else str(layout.mesh),
            shard_base=layout is not None and layout.shard_base,
            options=options.more,
            stays=self._stays(group),
            now=datetime.now().astimezone().isoformat(timespec="seconds"),
            **shared,
        )

    def _stays(self, group: Group) -> str:
        """What others need to join it: the base; "" where a pipeline of a user's own made it."""
        base = self.specs[group.jobs[0]].get("base")
        if self.options.pipeline is not None:
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

    def forget(self, job: str) -> None:
        """Keep nothing of a job that has ended; one of its name that comes later is another.

        A group that the job was in may still tell of it: until the group is released, that is left
        out.
        """
        self.sources.pop(job, None)
        self._ended &= self._grouped()

    def drain(self, group: Group, epoch: int) -> None:
        if epoch in self._groups:
            self._groups[epoch].drain()

    def hurry(self, grace_seconds: float) -> None:
        """Limit how long groups have to stop from now on; those that do not are killed."""
        for running in self._groups.values():
            running.watchdog.hurry(grace_seconds)

    def excuse(self) -> None:
        """Hold the time until now against no group: nobody has heard them."""
        for running in self._groups.values():
            running.watchdog.excuse()

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
        # Nothing more comes of jobs that have ended, once all their groups have.
        self._ended &= self._grouped()
        self._tidy()

    def _grouped(self) -> set[str]:
        return {name for running in self._groups.values() for name in running.jobs}

    def _tidy(self) -> None:
        """Keep the checkpoints of running groups and those that a job goes on from."""
        needed = {running.output for running in self._groups.values()}
        needed |= {source.path for source in self.sources.values()}
        for path in self._checkpoints - needed:
            shutil.rmtree(path, ignore_errors=True)
        self._checkpoints = {path for path in self._checkpoints if path in needed or path.exists()}

    def close(self) -> None:
        """End what still runs: each group is drained."""
        self._server.close()


def _wait(running: RunningGroup, seconds: float) -> None:
    """Wait until a group has ended, so long at most."""
    end = time.monotonic() + seconds
    while not running.ended() and time.monotonic() < end:
        time.sleep(0.01)


def rank_variables(rank: int, nodes: Sequence[str]) -> dict[str, str]:
    """The variables that tell a process its rank.

    nodes   where each process of its group runs
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
    }


def cpu_threads(slots: int) -> dict[str, str]:
    """Each slot's share of the cores, for its worker."""
    cores = usable_cpus()
    return {"OMP_NUM_THREADS": str(max(1, cores // slots))}
