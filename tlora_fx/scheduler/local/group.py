"""A formation of a group on this machine, and the processes that train it."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tlora_fx.cost.estimator import Layout
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.workers.protocol import (
    CROWDED,
    DISK_FULL,
    EVENTS,
    FILES_ABSENT,
    FORK_SERVER_DIED,
    EventReader,
    exit_text,
    rung_losses,
)
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupEvent,
    GroupStarted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.local.processes import IdleNews, WorkerStart
from tlora_fx.scheduler.local.watchdog import Watchdog

TAIL_LINES = 12


NO_MEMORY = "no memory beside idle workers, which are let go of"


class Processes(Protocol):
    """Interface of what starts the processes of groups, by number; see `ForkServer`."""

    @property
    def ready(self) -> bool:
        """Whether processes begin at once."""

    def begin(self) -> None:
        """Make the server ready."""

    def start(self, start: WorkerStart) -> int:
        """Start a worker; returns its number."""

    def free_memory(self, worker: int, needs: float | None) -> None:
        """Free memory for a worker that will need so many bytes."""

    def news(self) -> list[IdleNews]:
        """News of idle workers since the last call."""

    def signal(self, worker: int, number: int) -> None:
        """Send one a signal; nothing happens where it has ended."""

    def code(self, worker: int) -> int | None:
        """Exit code of a worker, negative for a signal; None while it runs."""

    def close(self) -> None:
        """End all workers."""


#: Exit codes of a process that was asked to stop before it could save anything. One that does not
#: listen yet is ended by the signal itself.
_UNSAVED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass(slots=True)
class RunningGroup:
    """A formation that was launched.

    clock       from time of day to the executor's seconds
    output      the run folder with its checkpoints, which one that took over has from the other
    layout      that its processes have, and those of whoever takes over from it
    stays       what jobs must have that join it, as `WorkerConfig` says
    log         where it prints
    begun       whether it has processes; one that is to take over has none yet
    successor   group that takes over from it
    needs       bytes of each of its GPUs, or of main memory; None: not known
    stepped     whether a step was done
    at_fault    the job that is given as the cause of a failure
    named       whether the trainer has named it; otherwise it is the only one
    absent      jobs whose files its processes could not read, each with the reason
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
    stepped: bool = False
    failed: bool = False
    at_fault: str | None = None
    named: bool = False
    reason: str = ""
    absent: dict[str, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    event_reader: EventReader = field(init=False)
    _latest: float = field(default=-math.inf, init=False)

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
        """Events since the last call."""
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
        # Of events that are read late, some count as of now: those behind them are no earlier.
        time = self._latest = max(self._latest, self.clock(line["time"]))
        self.watchdog.hear(line["kind"])
        match line["kind"]:
            case "started":
                yield GroupStarted(time, self.epoch, line.get("paused"))
            case "handed_over":
                yield self._hand_over(time, line.get("absent", {}))
            case "declined":
                yield Warned(time, self.epoch, f"it is formed anew: {line['reason']}")
                self.drain()
            case "progress":
                self.stepped = True
                yield Progress(time, self.epoch, line["steps"])
            case "saved":
                self.committed |= line["steps"]
                rungs = line.get("rungs", {})
                yield Committed(time, self.epoch, line["steps"], str(self.output), rungs)
                yield from self._settled(time, line)
            case "warned":
                yield Warned(time, self.epoch, line["text"])
            case "failed":
                self.reason, self.absent = line["reason"], line.get("absent", {})
                if self.absent:
                    self.reason = f"{exit_text(FILES_ABSENT)}: {self.reason}"
                    return
                # A job alone is at fault for whatever its trainer refuses.
                alone = self.jobs[0] if len(self.jobs) == 1 else None
                self.named = line["job"] in self.jobs
                self.at_fault = line["job"] if self.named else alone

    def _hand_over(self, time: float, absent: Mapping[str, str]) -> Drained:
        """The successor has the processes now, and all its jobs whose files are there."""
        successor = self.successor
        assert successor is not None
        self.over = self.handed_over = True
        successor.workers, successor.begun = self.workers, True
        successor.jobs = tuple(name for name in successor.jobs if name not in absent)
        for name in absent:
            successor.committed.pop(name, None)
        return Drained(time, self.epoch, dict(self.committed), successor.epoch, absent)

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
            self.at_fault, self.reason = None, f"{NO_MEMORY}: {self.reason or self._why(codes)}"
        elif FILES_ABSENT in codes and not (self.absent or self.named):
            # Who could not read them did not tell which, or was killed before: all are looked at.
            self.at_fault, self.reason = None, self.reason or self._why(codes, FILES_ABSENT)
            self.absent = dict.fromkeys(self.jobs, self.reason)
        # Where it was asked to stop, that may be what the trainer stumbled over.
        if not self.asked and self.at_fault is not None and self.at_fault not in self.settled:
            yield Failed(now, self.epoch, self.at_fault, self.reason)
        yield from self._unwritten(now)
        if self._was_stopped(codes) or not any(codes):
            yield Drained(now, self.epoch, dict(self.committed))
        else:
            self.failed = True
            killed = not self.reason and all(code in (0, -signal.SIGKILL) for code in codes)
            blameless = not self.reason and bool({FORK_SERVER_DIED, DISK_FULL} & {*codes})
            blameless = blameless or bool(self.absent)
            reason = self.reason or self._why(codes)
            yield Failed(
                now, self.epoch, None, reason, dict(self.committed), killed, blameless, self.absent
            )

    def _was_stopped(self, codes: list[int]) -> bool:
        """Whether it ended because it was asked to, and not by a failure.

        Before the first step there is nothing to save. Where one process was stopped then, the
        others cannot go on, and were killed or stumbled over its absence.
        """
        if self.stepped:
            return self.asked and all(code in (0, *_UNSAVED) for code in codes)
        return self.asked and any(code in _UNSAVED for code in codes)

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
            rungs = rung_losses({job: found[job] for job in steps})
            yield Committed(now, epoch, steps, str(self.output), rungs)
            yield from self._settled(now, {"steps": steps, "ended": ended})

    def _why(self, codes: list[int], bad: int | None = None) -> str:
        bad = bad or next(code for code in codes if code)
        log = next(iter(sorted(self.folder.glob("*.log"))), self.log)
        lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
        said = [line for line in lines if not re.match(r"\s*$", line)][-TAIL_LINES:]
        return "\n".join([f"a process ended: {exit_text(bad)}", *said])
