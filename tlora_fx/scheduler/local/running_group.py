"""One group of the local executor while it runs: its workers, and what they have told."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora_fx.runtime.checkpoint import CheckpointStore
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupEvent,
    Progress,
    Started,
    Warned,
)
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.local.told import Listener

TAIL_LINES = 12


@dataclass(slots=True)
class RunningGroup:
    """A formation that was launched.

    jobs        its names
    folder      of all its files
    workers     numbers of its processes, the telling one first
    clock       from time of day to the executor's seconds
    committed   steps that are safe, by job
    asked       it was asked to drain
    over        its end was told
    """

    epoch: int
    jobs: tuple[str, ...]
    folder: Path
    server: ForkServer
    workers: tuple[int, ...]
    clock: Callable[[float], float]
    committed: dict[str, float]
    asked: bool = False
    over: bool = False
    at_fault: str | None = None
    reason: str = ""
    settled: set[str] = field(default_factory=set)
    listener: Listener = field(init=False)

    def __post_init__(self) -> None:
        self.listener = Listener(self.folder / "told.jsonl")

    @property
    def output(self) -> Path:
        """The run folder with its checkpoints."""
        return self.folder / "train"

    def drain(self) -> None:
        """Ask for a checkpoint and an end; once."""
        if not self.asked:
            self.asked = True
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
        for line in self.listener.lines():
            yield from self._told(line)
        if whole:
            self.over = True
            yield from self._end(now, [code for code in codes if code is not None])
        elif any(codes):
            # The others wait for one that has died.
            self.send(signal.SIGKILL)

    def _told(self, line: Mapping[str, Any]) -> Iterator[GroupEvent]:
        time = self.clock(line["time"])
        match line["kind"]:
            case "started":
                yield Started(time, self.epoch)
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
        if self.at_fault is not None and self.at_fault not in self.settled:
            yield Failed(now, self.epoch, self.at_fault, self.reason)
        stopped = self.asked and all(code in (0, 128 + signal.SIGTERM) for code in codes)
        yield from self._untold(now)
        if stopped or not any(codes):
            yield Drained(now, self.epoch, dict(self.committed))
        else:
            yield Failed(
                now, self.epoch, None, self.reason or self._why(codes), dict(self.committed)
            )

    def _untold(self, now: float) -> Iterator[GroupEvent]:
        """A checkpoint that was written, and its writer killed before it told."""
        ended = {}
        steps = {}
        for job, counters in CheckpointStore(self.output).counters().items():
            if counters["step"] > self.committed.get(job, 0) or counters["status"] != "running":
                steps[job] = counters["step"]
            if counters["status"] != "running":
                ended[job] = (counters["status"], counters["reason"])
        if steps and (steps.keys() - self.settled):
            self.committed |= steps
            yield Committed(now, self.epoch, steps, str(self.output))
            yield from self._settled(now, {"steps": steps, "ended": ended})

    def _why(self, codes: list[int]) -> str:
        """What the log says last."""
        bad = next(code for code in codes if code)
        how = f"killed by {signal.Signals(-bad).name}" if bad < 0 else f"exit code {bad}"
        log = next(iter(sorted(self.folder.glob("*.log"))), None)
        lines = log.read_text(errors="replace").splitlines() if log else []
        said = [line for line in lines if not re.match(r"\s*$", line)][-TAIL_LINES:]
        return "\n".join([f"a process ended: {how}", *said])
