"""A run folder that one scheduler holds, and what a killed one left in it.

The ledger may not have heard of the last checkpoints: their writers outlive the run by some
seconds, and stop with one more. So nothing is read before the last of them has ended.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tlora_fx.errors import WorkerLost
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.run_folder import LOCK, PRIVATE, busy, require_same_lock, unwritable
from tlora_fx.runtime.workers.protocol import (
    WORKER_CONFIG,
    WorkerConfig,
    existing,
    rung_losses,
)
from tlora_fx.scheduler.executor import (
    Committed,
    Failed,
    Finished,
)
from tlora_fx.scheduler.lease import revoke
from tlora_fx.scheduler.store import KILLED, Ledger


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Location of a job's newest committed state.

    steps   optimizer steps that it has done there
    """

    path: Path
    steps: float


WAIT_SECONDS = 120.0
GRACE_SECONDS = 3.0


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
        help = "what was trained since is lost; start again with another -o"
        require_same_lock(self.path, self._lock, help)


@contextmanager
def held(folder: Path) -> Iterator[HeldFolder]:
    """Hold a run's folder for this process.

    raises    RunFolderError where another process runs in it, WorkerLost where the workers of a
              killed one do not end
    """
    with _opened(folder, LOCK) as mine, _opened(folder, ".workers.lock") as theirs:
        # A run that is killed while it starts its server leaves the lock to that until its exec.
        if not _locked(mine, GRACE_SECONDS):
            raise busy(folder)
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
        raise unwritable(folder, error) from error


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


def run_seconds(ledger: Ledger) -> float:
    """The run's time now: never before what it has done, though the machine's clock was set back.

    Then its beginning is set back too. What is written from now on has the right time of day, and
    not what a clock that was ahead would have said.
    """
    clock = time.time()
    seconds = clock - float(ledger.fact("started", repr(clock)))
    newest = ledger.newest_time()
    if newest > seconds:
        ledger.set_fact("started", repr(clock - newest))
    return max(seconds, newest)


def recover(ledger: Ledger, folder: Path, now: float) -> None:
    """Write down what the groups of a killed run have committed, and end them."""
    for record in ledger.open_epochs():
        group = folder / "groups" / f"{record.epoch:06d}"
        train = _output(group)
        # Workers on other machines may not have ended; one that took over has the other's lease.
        for folder_of_lease in (group, train.parent):
            revoke(folder_of_lease)
        counters = CheckpointStore(train).counters()
        steps = {job: float(counters_of_job["step"]) for job, counters_of_job in counters.items()}
        if steps:
            rungs = rung_losses(counters)
            ledger.record(Committed(now, record.epoch, steps, str(train), rungs))
        for job, counters_of_job in counters.items():
            if counters_of_job["status"] == "done":
                ledger.record(Finished(now, record.epoch, job, steps[job]))
            elif counters_of_job["status"] == "failed":
                ledger.record(Failed(now, record.epoch, job, counters_of_job["reason"]))
        ledger.record(Failed(now, record.epoch, None, KILLED))


def _output(folder: Path) -> Path:
    """Where a formation left its checkpoints: one that took over went on in the other's folder."""
    with suppress(OSError, ValueError):
        output = Path(WorkerConfig.read(existing(folder, WORKER_CONFIG)).output)
        if output.parent.parent.name == folder.parent.name:
            return folder.with_name(output.parent.name) / output.name
    return folder / "train"


def sources(ledger: Ledger) -> dict[str, CheckpointSource]:
    """Location of the newest committed state of each job that is not done, by name."""
    return {
        record.name: CheckpointSource(Path(record.path), record.steps)
        for record in ledger.active_jobs()
        if record.path
    }
