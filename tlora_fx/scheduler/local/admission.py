"""Reads job files and prepares their jobs, each file in a process of its own that may be killed.

    FOLDER/admission/000012/request.json  what the process is to do
                           /events.jsonl  what it reports
                           /log          what it printed
                    /facts/              what these processes have compiled, for each other and for
                                         those of a run that goes on

A process that takes longer than it may is killed with all that it has started. The job that it was
at is refused, and another process goes on with the rest of the file. A process that dies otherwise
proves nothing about its job, because the machine may have been out of memory: the job is tried
again after a pause, and refused only when `MAX_DEATHS` processes have died of it in a row. Those
that died with their fork server are not counted. Nothing here waits.

Users take turns: next is the user whose last turn is longest ago, in both reading and preparing. A
turn is one file to read, or at most `TURN_JOBS` jobs to prepare. One process is always left to the
other users. A run without users has no turns: its files are taken in their order.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.errors import AdmissionError
from tlora_fx.host.memory import total_bytes
from tlora_fx.runtime.workers.protocol import (
    EVENTS,
    FORK_SERVER_DIED,
    EventReader,
    exit_text,
)
from tlora_fx.scheduler.local.admission_worker import AdmissionOrder
from tlora_fx.scheduler.local.processes import WorkerStart
from tlora_fx.scheduler.requests import FACTS, forget_old_facts
from tlora_fx.scheduler.state import REQUEST, JobRequest

if TYPE_CHECKING:
    from tlora_fx.scheduler.local.group import Processes

ADMISSION = "tlora_fx.scheduler.local.admission_worker"
FOLDER = "admission"
#: Processes that prepare jobs at a time, and that read files: one that takes long keeps no other
#: user waiting. One file of a user at a time is read, so that of two jobs of one name the first
#: file's is taken. Others go first while one waits because its process died.
PROCESSES = 2
#: Jobs of a user that a process prepares; then it is the next user's turn.
TURN_JOBS = 4
#: Reading a file takes no longer, whatever preparing may take.
READ_SECONDS = 30.0
#: Processes that die one after the other of a file or job until it is refused.
MAX_DEATHS = 5
#: Pause after the first of them; it doubles each time.
RETRY_SECONDS = 2.0
TAIL_BYTES = 600
Spec = Mapping[str, Any]

#: In the folder of an admission: what its process is to do.
_REQUEST = "request.json"
_FACTS = "facts"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of reading a file, or of preparing one job of it.

    seconds        wall time; twice as much CPU time
    memory_bytes   beyond what its process needs before; None: a quarter of the machine's
    trust_remote_code   whether a base may run code of its own where the file asks for it
    """

    seconds: float = 120.0
    memory_bytes: int | None = None
    trust_remote_code: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return self.memory_bytes if self.memory_bytes is not None else total_bytes() // 4


@dataclass(frozen=True, slots=True)
class FileRead:
    """A job file was read: the specs of its jobs, or what is wrong with it."""

    path: Path
    jobs: tuple[Spec, ...] = ()
    mistake: str = ""


@dataclass(frozen=True, slots=True)
class JobPrepared:
    """A job can be trained; shape is that of its base, None where there is nothing to learn."""

    spec: Spec
    request: JobRequest
    shape: ModelFacts | None


@dataclass(frozen=True, slots=True)
class JobRestored:
    """A job of an earlier process can go on."""

    spec: Spec
    shape: ModelFacts | None


@dataclass(frozen=True, slots=True)
class JobRefused:
    """A job cannot be trained, or cannot go on now."""

    spec: Spec
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """A process died; the file or the job that it was at is tried again.

    path      file that it read; None: it prepared a job
    spec      job that it prepared; None: it read a file
    seconds   until the next process
    """

    reason: str
    seconds: float
    path: Path | None = None
    spec: Spec | None = None


Answer = FileRead | JobPrepared | JobRestored | JobRefused | ProcessDied


@dataclass(slots=True, eq=False)
class _Task:
    """A file to read, or jobs to prepare.

    user      whose it is; "": nobody's
    jobs      jobs without an answer yet
    sources   by job, the run that it goes on from
    deaths    processes that died of the file or first job, one after the other
    due       monotonic second before which no process begins
    reads     it is a file's, whether that is read yet or not
    """

    file: Path | None = None
    user: str = ""
    jobs: deque[Spec] = field(default_factory=deque)
    again: bool = False
    submitted: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    deaths: int = 0
    due: float = 0.0
    reads: bool = False

    @property
    def over(self) -> bool:
        return self.file is None and not self.jobs

    def split(self) -> _Task:
        """Take out the file or job that the task is at, as a task of its own."""
        if self.file is not None:
            path, self.file = self.file, None
            return replace(self, file=path)
        return replace(self, jobs=deque([self.jobs.popleft()]))

    def turn(self) -> _Task:
        """Take out the jobs of a user's next turn, as a task of their own."""
        count = TURN_JOBS if self.user else len(self.jobs)
        jobs = deque(self.jobs.popleft() for _ in range(min(count, len(self.jobs))))
        part, self.deaths = replace(self, jobs=jobs), 0
        return part

    def give_up(self, reason: str) -> Answer:
        """Answer for the file or job that the task was at."""
        if self.file is not None:
            path, self.file = self.file, None
            return FileRead(path, mistake=reason)
        return JobRefused(self.jobs.popleft(), reason, self.again)


@dataclass(slots=True)
class _Process:
    """A process at work on a task.

    since   when it was last heard of, seconds
    """

    task: _Task
    folder: Path
    number: int
    reader: EventReader
    since: float
    overdue: bool = False


class Admission:
    """Turns job files into requests, without ever trusting one.

    folder   folder of the run
    module   module that a process runs
    """

    def __init__(
        self,
        folder: Path,
        server: Processes,
        limits: AdmissionLimits = AdmissionLimits(),
        module: str = ADMISSION,
    ) -> None:
        self.folder, self.limits = folder / FOLDER, limits
        self._server, self._module = server, module
        self._files: deque[_Task] = deque()
        self._tasks: deque[_Task] = deque()
        self._running: list[_Process] = []
        self._next = 1
        # Number of the process that each user's last turn began, for reading and for preparing.
        self._turns: dict[tuple[str, bool], int] = {}
        # What a killed run was at says nothing to this one.
        for left in self.folder.iterdir() if self.folder.is_dir() else ():
            if left.name != _FACTS:
                shutil.rmtree(left, ignore_errors=True)
        forget_old_facts(self.folder / _FACTS)

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._files or self._tasks or self._running)

    def read(self, path: Path, user: str = "") -> None:
        """Read a job file of a user; a `FileRead` will come."""
        self._files.append(_Task(path, user, reads=True))

    def prepare(self, jobs: Sequence[Spec], submitted: float, user: str = "") -> None:
        """Prepare the jobs of one file; a `JobPrepared` or `JobRefused` will come of each."""
        if jobs:
            self._tasks.append(_Task(user=user, jobs=deque(jobs), submitted=submitted))

    def restore(self, jobs: Sequence[Spec], sources: Mapping[str, str], user: str = "") -> None:
        """See whether jobs of an earlier process can go on: `JobRestored` or `JobRefused`.

        sources   by job, the folder of the run whose data and base have to be the same
        """
        if jobs:
            self._tasks.append(_Task(user=user, jobs=deque(jobs), again=True, sources=sources))

    def answers(self) -> Iterator[Answer]:
        """Answers since the last call."""
        for process in list(self._running):
            yield from self._hear(process)
        while self._server.ready and (task := self._next_task()):
            self._start(task)

    def _next_task(self) -> _Task | None:
        """Take out what the next process is to do; None: nothing may begin now."""
        for waiting in (self._files, self._tasks):
            reads = waiting is self._files
            at_work = [p.task.user for p in self._running if p.task.reads is reads]
            if len(at_work) >= PROCESSES:
                continue
            now = time.monotonic()
            # One process is left to the other users; a run without users prepares in all of them.
            full = {user for user in at_work if user or reads}
            due = [task for task in waiting if task.due <= now and task.user not in full]
            task = min(due, key=lambda task: self._turns.get((task.user, reads), 0), default=None)
            if task is None:
                continue
            self._turns[task.user, reads] = self._next
            part = task if reads else task.turn()
            if reads or not task.jobs:
                waiting.remove(task)
            return part
        return None

    def withdraw(self, spec: Spec) -> None:
        """Do not prepare a job that waits for it; one that is being prepared has an answer."""
        for task in list(self._tasks):
            task.jobs = deque(job for job in task.jobs if job is not spec)
            if task.over:
                self._tasks.remove(task)

    def excuse(self) -> None:
        """Hold the time until now against no process: nobody has heard them."""
        for process in self._running:
            process.since = time.monotonic()

    def close(self) -> None:
        """Kill what is at work; what it was at has no answer."""
        for process in self._running:
            self._server.signal(process.number, signal.SIGKILL)
        self._files.clear()
        self._tasks.clear()
        self._running.clear()

    def _start(self, task: _Task) -> None:
        folder = self.folder / f"{self._next:06d}"
        self._next += 1
        folder.mkdir(parents=True, mode=0o700)
        order = AdmissionOrder(
            str(folder / EVENTS),
            facts=str(self.folder / _FACTS),
            file="" if task.file is None else str(task.file),
            jobs=tuple(task.jobs),
            again=task.again,
            submitted=task.submitted,
            sources=task.sources,
            cpu_seconds=2 * self._seconds(task),
            memory_bytes=self.limits.bytes,
            trust_remote_code=self.limits.trust_remote_code,
        )
        order.write(folder / _REQUEST)
        start = WorkerStart(str(folder / _REQUEST), str(folder / "log"), module=self._module)
        number = self._server.start(start)
        reader = EventReader(folder / EVENTS)
        self._running.append(_Process(task, folder, number, reader, time.monotonic()))

    def _hear(self, process: _Process) -> Iterator[Answer]:
        code = self._server.code(process.number)
        # Read after the code: once it has ended, nothing more is told.
        for line in process.reader.lines():
            process.since = time.monotonic()
            yield self._answer(process.task, line)
        task = process.task
        if code is not None:
            self._running.remove(process)
            if not task.over:
                yield self._died(process, code)
            if not task.over:
                self._tasks.appendleft(task)
            shutil.rmtree(process.folder, ignore_errors=True)
        elif not self._server.ready:
            # The server was started anew, and starts its processes once it has imported all.
            process.since = time.monotonic()
        elif time.monotonic() - process.since > self._seconds(task):
            process.overdue = True
            self._server.signal(process.number, signal.SIGKILL)

    def _died(self, process: _Process, code: int) -> Answer:
        """Refuse what a process was at because of a limit or too many deaths, or queue it anew."""
        task = process.task.split()
        task.deaths += code != FORK_SERVER_DIED
        if process.overdue or code == -signal.SIGXCPU or task.deaths >= MAX_DEATHS:
            return task.give_up(self._why(process, code, task.deaths))
        seconds = RETRY_SECONDS * 2 ** max(0, task.deaths - 1)
        task.due = time.monotonic() + seconds
        (self._files if task.reads else self._tasks).append(task)
        return ProcessDied(exit_text(code), seconds, task.file, task.jobs[0] if task.jobs else None)

    def _seconds(self, task: _Task) -> float:
        return min(self.limits.seconds, READ_SECONDS) if task.reads else self.limits.seconds

    def _answer(self, task: _Task, line: Mapping[str, Any]) -> Answer:
        match line["kind"]:
            case "read":
                path, task.file = task.file, None
                assert path is not None
                return FileRead(path, tuple(line["jobs"]))
            case "prepared" | "restored":
                try:
                    shape = line["shape"] and FACTS.validate_python(line["shape"])
                    if task.again:
                        return JobRestored(task.jobs.popleft(), shape)
                    request = REQUEST.validate_python(line["request"])
                except (ValidationError, ValueError) as error:
                    return task.give_up(f"its numbers cannot be told: {error}")
                return JobPrepared(task.jobs.popleft(), request, shape)
        return task.give_up(str(line["reason"]))

    def _why(self, process: _Process, code: int, deaths: int) -> str:
        """Why a file or a job is given up whose process ended before it had told all."""
        seconds = self._seconds(process.task)
        help = "if the file is right, allow more with --prepare-seconds"
        if process.overdue:
            expected, found = f"at most {seconds:g} s", "it was still at it"
        elif code == -signal.SIGXCPU:
            expected = f"at most {2 * seconds:g} s of CPU time"
            found = "it was still at it"
        else:
            expected = "an answer"
            found = f"{deaths} processes died, the last one: {exit_text(code)}"
            found = f"{found}\n{_tail(process.folder / 'log')}".strip()
            help = "if the file is right, free memory or allow more with --prepare-memory"
        what = "reading or preparing it was given up"
        return str(AdmissionError(what, expected=expected, found=found, help=help))


def _tail(log: Path) -> str:
    """The end of what a process printed."""
    try:
        with log.open("rb") as file:
            file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
