"""Go on with a run whose process was killed: what its ledger and its groups' folders say.

The ledger may not have heard of the last checkpoints: their writers outlive the run by some
seconds, and stop with one more. So nothing is read before the last of them has ended.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tlora_fx.errors import RunFolderError, WorkerLost
from tlora_fx.runtime.checkpoint import CheckpointStore
from tlora_fx.scheduler.executor import Committed, Failed, Finished
from tlora_fx.scheduler.local.executor import Source
from tlora_fx.scheduler.store import Ledger

WAIT_SECONDS = 120.0
GRACE_SECONDS = 3.0
KILLED = "the run was killed"
#: What a run keeps beside the folders of its jobs, which therefore cannot have these names.
RESERVED = frozenset(
    {
        "groups",
        "state.json",
        "workers.log",
        "ledger.sqlite",
        "ledger.sqlite-wal",
        "ledger.sqlite-shm",
    }
)


@contextmanager
def held(folder: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[int]:
    """Hold a run's folder for this process.

    returns   a file descriptor for the workers to inherit: the folder is then held as long as one
              of them is there
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
        if not _locked(theirs, wait_seconds):
            raise WorkerLost(
                f"a process of the killed run still trains after {wait_seconds:g} seconds",
                folder=folder,
                help=f"see who holds it with: fuser {folder / '.workers.lock'}",
            )
        yield theirs.fileno()


def _opened(folder: Path, name: str) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
    """Write down what the groups of a killed run have committed, and end them.

    returns   the epochs that were found open
    """
    open_epochs = [record for record in ledger.epochs() if record.ended is None]
    for record in open_epochs:
        train = folder / "groups" / f"{record.epoch:06d}" / "train"
        counters = CheckpointStore(train).counters()
        steps = {job: float(own["step"]) for job, own in counters.items()}
        if steps:
            ledger.tell(Committed(now, record.epoch, steps, str(train)))
        for job, own in counters.items():
            if own["status"] == "done":
                ledger.tell(Finished(now, record.epoch, job, steps[job]))
            elif own["status"] == "failed":
                ledger.tell(Failed(now, record.epoch, job, own["reason"]))
        ledger.tell(Failed(now, record.epoch, None, KILLED))
    return [record.epoch for record in open_epochs]


def sources(ledger: Ledger) -> dict[str, Source]:
    """By job that is not done, where its newest committed state lies."""
    return {
        record.name: Source(Path(record.path), record.steps)
        for record in ledger.jobs()
        if record.path and record.status in ("queued", "running")
    }
