"""Job files as they appear in a folder, each taken once it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora_fx.config.job import Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import JobFolderError, TloraError
from tlora_fx.scheduler.store import Ledger

SUFFIXES = (".yaml", ".yml")
TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Found:
    """A file that was read.

    jobs      those that nobody had submitted before
    mistake   what is wrong with the file, or with jobs of it that are left out
    sha256    of its content
    """

    path: Path
    sha256: str
    jobs: tuple[Job, ...] = ()
    mistake: str = ""


@dataclass(slots=True)
class JobFolder:
    """The job files of a folder, or one file.

    A file counts as written when it is the same at two looks one after the other. One that changes
    later is read again: new jobs are taken, and what is known stays as it was. What was settled of
    a file is remembered in the ledger, so that a run that goes on does it no second time.

    specs   by name, what is known of each job
    """

    path: Path
    ledger: Ledger
    specs: dict[str, Mapping[str, Any]]
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        demand_folder(self.path)

    def look(self) -> Iterator[Found]:
        """What is new since the last look; a file is read when the one before it was dealt with."""
        stamps = {path: _stamp(path) for path in self._files()}
        now = {path: stamp for path, stamp in stamps.items() if stamp is not None}
        before, self._seen = self._seen, now
        for path, stamp in now.items():
            if before.get(path) == stamp != self._read.get(path):
                self._read[path] = stamp
                yield from self._take(path)

    @property
    def waiting(self) -> bool:
        """Whether a file was seen that is not read yet."""
        return any(self._read.get(path) != stamp for path, stamp in self._seen.items())

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        listed = sorted(self.path.iterdir())
        return [p for p in listed if p.suffix in SUFFIXES and not p.name.startswith(".")]

    def _take(self, path: Path) -> list[Found]:
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            return [Found(path, "", mistake=f"cannot be read: {error}")]
        known = self.ledger.files().get(str(path.absolute()))
        if known is not None and known[0] == content:
            return []
        try:
            jobs = load_job_file(path).jobs
        except TloraError as error:
            return [Found(path, content, mistake=str(error))]
        fresh = tuple(job for job in jobs if job.name not in self.specs)
        return [Found(path, content, fresh, self._differing(path, jobs))]

    def settle(self, found: Found) -> None:
        """Remember a file, once all its jobs are in the ledger."""
        self.ledger.note_file(str(found.path.absolute()), found.sha256, found.mistake or TAKEN)

    def _differing(self, path: Path, jobs: tuple[Job, ...]) -> str:
        """What is said of jobs that are known otherwise."""
        others = [
            job.name
            for job in jobs
            if job.name in self.specs and job.model_dump(mode="json") != self.specs[job.name]
        ]
        if not others:
            return ""
        return str(
            JobFolderError(
                "a job of this name was submitted before, and is another",
                file=path,
                job=", ".join(others),
                help="give it another name: what was submitted stays as it was",
            )
        )


def demand_folder(path: Path) -> None:
    """Refuse a folder that is not there.

    raises   JobFolderError
    """
    if not path.exists():
        raise JobFolderError(
            "there is no folder of job files",
            folder=path,
            help="make it, and put job files into it at any time",
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
