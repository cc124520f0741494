"""The executor of this machine: each group is a process for each GPU of its layout, or one on CPU.

    FOLDER/groups/000012/order.json      what the group was asked
                        /told.jsonl      what its first process told
                        /rank-0.log      what each process printed
                        /train/          run folder: the group's checkpoints
    FOLDER/JOB/                          adapter, metrics and status of a job, whatever its group

A job goes on from the newest checkpoint of the group that it was in last. Old groups' checkpoints
are removed as soon as no job needs them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora_fx.cost.cluster import Cluster
from tlora_fx.errors import PlaceTaken
from tlora_fx.scheduler.estimating import Layout
from tlora_fx.scheduler.executor import Committed, Event, Failed, Finished
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.local.order import Order
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.local.running_group import RunningGroup
from tlora_fx.scheduler.request import JobRequest

KILL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How groups are run.

    device           "cpu" or "cuda"
    save_seconds     between checkpoints
    max_row_tokens   of one forward
    compiled         layers are compiled by torch.compile
    more             for workers of other kinds
    """

    device: str = "cpu"
    save_seconds: float = 60.0
    max_row_tokens: int = 16384
    compiled: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a job's newest committed state lies.

    path    run folder, with checkpoints
    steps   optimizer steps that it has done there
    """

    path: Path
    steps: float


class LocalExecutor:
    """Runs groups on this machine.

    folder    of the whole run
    cluster   one node: its GPUs, or slots of a CPU
    specs     what the trainer must know of a job, by name; it may grow
    server    forks the workers
    sources   by job, where its newest committed state lies; those of an earlier process
    started   time of day at second 0 of the executor's clock
    commits   hears of commits that no event tells: those of groups that are killed
    """

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        specs: Mapping[str, Mapping[str, Any]],
        server: ForkServer,
        *,
        options: LocalOptions | None = None,
        sources: Mapping[str, Source] | None = None,
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
        """Hold the group's place for it.

        raises   PlaceTaken
        """
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
        folder = self.folder / "groups" / f"{epoch:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        place = self._held[epoch]
        size = 1 if layout is None else min(layout.mesh.size, len(place))
        gpus = place[:size]
        order = self._order(folder, epoch, group, gpus, layout)
        order.write(folder / "order.json")
        workers = tuple(
            self._server.start(folder / "order.json", folder / f"rank-{rank}.log", environment)
            for rank, environment in enumerate(_environments(gpus))
        )
        self._groups[epoch] = RunningGroup(
            epoch, group.jobs, folder, self._server, workers, self._clock,
            {name: self.sources[name].steps for name in group.jobs if name in self.sources},
        )  # fmt: skip

    def _order(
        self,
        folder: Path,
        epoch: int,
        group: Group,
        gpus: tuple[int, ...],
        layout: Layout | None,
    ) -> Order:
        options = self.options
        return Order(
            epoch=epoch,
            jobs=tuple(self.specs[name] for name in group.jobs),
            sources={
                name: str(self.sources[name].path) for name in group.jobs if name in self.sources
            },
            output=str(folder / "train"),
            job_folders=str(self.folder),
            told=str(folder / "told.jsonl"),
            device=options.device,
            gpus=gpus,
            mesh="" if layout is None or len(gpus) == 1 else str(layout.mesh),
            shard_base=layout is not None and layout.shard_base,
            save_seconds=options.save_seconds,
            max_row_tokens=options.max_row_tokens,
            compiled=options.compiled,
            options=options.more,
        )

    def events(self) -> list[Event]:
        """What happened since the last call."""
        found: list[Event] = []
        for running in list(self._groups.values()):
            found += running.events(self.now())
        self._note(found)
        return sorted(found, key=lambda event: event.time)

    def _note(self, found: Iterable[Event]) -> None:
        """Where each job goes on from."""
        for event in found:
            match event:
                case Committed():
                    for job in event.steps.keys() - self._ended:
                        self.sources[job] = Source(Path(event.path), event.steps[job])
                case Finished() | Failed(job=str()):
                    self._ended.add(str(event.job))
                    self.sources.pop(str(event.job), None)

    def drain(self, group: Group, epoch: int) -> None:
        """Ask for a checkpoint and an end."""
        if epoch in self._groups:
            self._groups[epoch].drain()

    def kill(self, group: Group, epoch: int) -> None:
        """End the processes at once, and wait until they have ended."""
        running = self._groups.get(epoch)
        if running is None:
            return
        running.send(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while not running.ended() and time.monotonic() < end:
            time.sleep(0.01)
        # What it has committed counts, though nobody is told; a job that was done will find that it
        # is when it is launched again.
        found = [e for e in running.events(self.now()) if isinstance(e, Committed)]
        self._note(found)
        for event in found:
            self._commits(event)
        running.over = True

    def release(self, group: Group, epoch: int) -> None:
        """Give the place back, and remove the checkpoints that nobody needs any more."""
        running = self._groups.get(epoch)
        if running is not None and not running.ended():
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
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // slots))}
