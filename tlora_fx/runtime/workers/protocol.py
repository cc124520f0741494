"""The files between a scheduler and its processes: a worker's config, its event log.

It imports no torch: who schedules needs none, and a process that trains nothing begins at once.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from tlora_fx.host.durable import replace_file, whole_lines
from tlora_fx.host.storage import append, until_there_is_room

#: Exit codes of a worker. It was killed.
LOST = -signal.SIGKILL
#: It ran out of memory.
OUT_OF_MEMORY = 12
#: It ran out of memory beside idle workers, which have been ended since.
CROWDED = 13
#: Its order needs a new process.
NEEDS_NEW_PROCESS = 14
#: Its disk is full, and what it was at cannot wait for room.
DISK_FULL = 15
#: Files of its jobs, of the base or of their data, cannot be read now.
FILES_ABSENT = 16
#: Its fork server died, and it with that; no process ends with such a code by itself.
FORK_SERVER_DIED = 256

#: In the folder of a formation: what its workers are to do.
WORKER_CONFIG = "worker.json"
#: Beside it: what the process reports, one JSON object a line.
EVENTS = "events.jsonl"
#: Beside a worker config, the path of the worker config of the group that shall take over.
SUCCESSOR = "successor"
#: The names before 0.2.0, which are still read.
_OLD_NAMES = {WORKER_CONFIG: "order.json", EVENTS: "told.jsonl"}


def exit_text(code: int) -> str:
    """How a process ended, by its exit code; negative for a signal."""
    if code == FORK_SERVER_DIED:
        return "killed by the death of its fork server"
    if code == DISK_FULL:
        return "the disk is full"
    if code == FILES_ABSENT:
        return "files of its jobs cannot be read"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        # Real-time signals but the first and last have no name.
        return f"killed by signal {-code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of how workers train, whatever their group.

    device           "cpu" or "cuda"
    save_seconds     a checkpoint is due so long after the last one
    max_row_tokens   of one forward
    pipeline         passes instead of the default
    extensions       files and modules that bring passes, as `load_extension` takes them
    accept_changes   jobs go on though their data or base are not as they were
    callbacks        of users, as `callback_named` takes them
    """

    device: str = "cpu"
    save_seconds: float = 60.0
    max_row_tokens: int = 16384
    compiled: bool = False
    pipeline: str | None = None
    extensions: tuple[str, ...] = ()
    accept_changes: bool = False
    callbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerConfig(TrainingOptions):
    """One formation of a group, for its worker.

    jobs      `Job.model_dump(mode="json")` of each, in the group's order
    sources   by job, the run folder whose newest checkpoint it goes on from
    mesh      such as "dp=2"
    options   for workers of other kinds
    stays     what jobs have in common that may join while it trains, or that its workers stay for;
              "": nobody joins, and they end
    keeps     of a group that takes over: jobs that left, whose last state is in its folder
    now       the time of day, for chat templates that ask for it; "": its reader's
    """

    epoch: int
    jobs: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, str]
    output: str
    job_folders: str
    event_log: str
    gpus: tuple[int, ...] = (0,)
    mesh: str = ""
    shard_base: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    stays: str = ""
    keeps: tuple[str, ...] = ()
    now: str = ""

    def write(self, path: Path) -> None:
        """Leave the config where its worker finds it."""
        replace_file(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The config in a file."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


def existing(folder: Path, name: str) -> Path:
    """The file of this name in a folder, or the one with its name before 0.2.0."""
    path = folder / name
    old = folder / _OLD_NAMES[name]
    return old if old.exists() and not path.exists() else path


def rung_losses(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Evaluation losses of those jobs that a checkpoint has where they are compared with others.

    jobs   as `CheckpointStore.counters` gives them
    """
    return {
        name: math.inf if loss is None else loss
        for name, job in jobs.items()
        for step, loss in job.get("evaluation", {}).get("rungs", ())
        if step == job["step"]
    }


class EventWriter:
    """Appends lines, for a worker.

    A file outlives both ends: a worker whose parent is gone writes on undisturbed, and a line that
    a kill has torn has no end and is never read.

    every_seconds   progress is written at most so often
    """

    def __init__(self, path: Path | str, every_seconds: float = 0.2) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (open while it trains)
        self._every = every_seconds
        self._last = 0.0

    def write(self, kind: str, **facts: Any) -> None:
        """Append one line, with the time of day; in a process that waits for room it may wait."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts}).encode() + b"\n"
        until_there_is_room(lambda: append(self._file, line))

    def progress(self, steps: Mapping[str, int]) -> None:
        """Write the steps done, unless that was written a moment ago."""
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self.write("progress", steps=dict(steps))


class EventReader:
    """Reads the lines of a file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines that were written since the last call; a line without its end waits."""
        try:
            whole = whole_lines(self.path, self._read)
        except FileNotFoundError:
            return []
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
