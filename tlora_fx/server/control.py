"""The service's side of the scheduler: it makes the loop do what users want of their jobs.

Before each decision what the store says is compared with what the loop does. A job to pause is
held; so is one that waits while another of higher priority waits, and nothing that runs is stopped
for a priority. A job to cancel is taken back where it waits; where it trains it is asked to end
after its step, which disturbs none of its group. All of it may be done twice, or after a restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tlora_fx.host.durable import replace_file
from tlora_fx.inspect.wording import plural
from tlora_fx.runtime.run_folder import STOP
from tlora_fx.scheduler.formations import Callback, Formation
from tlora_fx.scheduler.service import SchedulerService
from tlora_fx.scheduler.state import ActiveJob, JobRequest
from tlora_fx.server.store import BUT, REASON, OwnedJob, ServiceStore

LOOK_SECONDS = 0.25
#: Why a job is taken back.
CANCELLED = "its user cancelled it"
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Control:
    """Keeps a run as its users want it; see the module."""

    store: ServiceStore
    folder: Path
    running: SchedulerService
    _looked: float = float("-inf")
    _known: int = -1
    _asked: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> None:
        """Look, if it is time to or jobs have come."""
        loop = self.running.loop
        if time.monotonic() - self._looked < LOOK_SECONDS and len(loop.ended) == self._known:
            return
        self._looked = time.monotonic()
        jobs = self.store.settle()
        for name in [name for name, how in loop.ended.items() if how]:
            self.running.forget(name)
        self._known = len(loop.ended)
        if not loop.stopping:
            for job in jobs:
                if job.status is None and job.wanted == "cancel":
                    self.running.withdraw(job.name, CANCELLED, self.running.executor.now())
            self._keep([job for job in jobs if job.status in ("queued", "running")])

    def _keep(self, jobs: Sequence[OwnedJob]) -> None:
        loop = self.running.loop
        there = [job for job in jobs if loop.ended.get(job.name) == ""]
        inside = {
            name: epoch for epoch, formation in loop.running.items() for name in formation.jobs
        }
        starting = {name for group in loop.formations.pending for name in group.jobs}
        for job in jobs:
            # One that is not in the loop waits to be restored, or for the next start.
            if job.wanted == "cancel" and loop.ended.get(job.name, "") == "":
                self._cancel(job, inside.get(job.name))
        free = [job for job in there if not loop.formations.holds(job.name)]
        waiting = [job for job in free if job.wanted == "run" and job.name not in starting]
        highest = max((job.priority for job in waiting), default=0)
        held = {job.name for job in waiting if job.priority < highest}
        held |= {job.name for job in there if job.wanted == "pause"}
        for name in loop.held.keys() - held:
            loop.let_go(name)
        for name in held - loop.held.keys():
            loop.hold(name)

    def _cancel(self, job: OwnedJob, epoch: int | None) -> None:
        stop = self.folder / job.name / STOP
        if not self.running.loop.formations.holds(job.name):
            now = self.running.executor.now()
            self.running.cancel(job.name, CANCELLED, now, begun=True)
            with suppress(OSError):
                stop.unlink(missing_ok=True)
        elif epoch is not None and self._asked.get(job.name) != epoch:
            # A group that died may have heard it, and not have done it.
            self._asked[job.name] = epoch
            stop.parent.mkdir(exist_ok=True)
            replace_file(stop, b"")


@dataclass(slots=True)
class EventLog(Callback):
    """Writes what a run does into the ledger, and into the log.

    unit   what groups hold: "GPU" or "CPU"
    """

    store: ServiceStore
    unit: str = "GPU"

    def say(self, time: float | None, kind: str, jobs: Sequence[str], text: str) -> None:
        """Write one event; time in seconds of the run's clock, None: now."""
        at = self.store.now() if time is None else self.store.started + time
        logger.info(text, extra={"event": kind, "jobs": list(jobs)})
        self.store.tell(at, kind, jobs, text)

    def submitted(self, time: float, job: ActiveJob) -> None:
        """A job is waiting."""
        self.say(time, "submitted", [job.name], "is in the queue")

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """A job will never run."""
        self.say(None, "refused", [request.name], f"cannot run: {reason}")

    def launched(self, time: float, formation: Formation) -> None:
        """A group was formed."""
        gpus = ", ".join(map(str, formation.group.place))
        self.say(
            time,
            "group",
            formation.group.jobs,
            f"group {formation.epoch} is formed on {self.unit} {gpus}",
        )

    def warned(self, time: float, formation: Formation, text: str) -> None:
        """A group goes on."""
        self.say(
            time, "warning", formation.group.jobs, f"group {formation.epoch} goes on{BUT}{text}"
        )

    def noted(self, time: float, text: str) -> None:
        """A worker that waits for a group stays, or is let go of."""
        self.say(time, "service", [], text)

    def left(self, time: float, formation: Formation, job: ActiveJob, reason: str) -> None:
        """A job ended."""
        text = f"failed: {reason}" if reason else "has ended"
        self.say(time, "failed" if reason else "done", [job.name], text)

    def ended(self, time: float, formation: Formation, how: str) -> None:
        """A group is over."""
        if formation.jobs:
            text = f"group {formation.epoch} {how}; its jobs wait"
            if formation.failure:
                text += f"{REASON}{formation.failure.splitlines()[0]}"
            self.say(time, "warning" if how == "failed" else "group", list(formation.jobs), text)

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """A job will not be run again."""
        self.say(time, "failed", [job.name], f"is given up: {reason}")

    def capacity(self, time: float, gpus: int) -> None:
        """GPUs came or went."""
        self.say(time, "capacity", [], f"{gpus} {self.unit}s are there")

    def retried(
        self, time: float, file: str, jobs: Sequence[str], reason: str, seconds: float
    ) -> None:
        """A process that read or prepared jobs died."""
        again = f"again in {seconds:g} s: its process died ({reason})"
        if file:
            self._say_of_file(time, file, jobs, f"submission {file} is read {again}")
        else:
            self.say(time, "warning", jobs, f"is prepared {again}")

    def parked(self, time: float, request: JobRequest, reason: str) -> None:
        """A job waits for the next start."""
        self.say(time, "warning", [request.name], f"waits for the next start: {reason}")

    def missed_files(self, time: float, request: JobRequest, reason: str) -> None:
        """A job waits for its files."""
        self.say(time, "warning", [request.name], f"waits for its files: {reason}")

    def found_files(self, time: float, request: JobRequest) -> None:
        """A job goes on."""
        self.say(time, "submitted", [request.name], "goes on: its files can be read again")

    def compared(self, time: float, ended: Sequence[str], text: str) -> None:
        """Jobs were compared, and some have ended."""
        self.say(time, "done", ended, f"has ended: {text}")

    def cancelled(self, time: float, name: str) -> None:
        """A job was taken back."""
        self.say(time, "cancelled", [name], "is cancelled")

    def resumed(self, jobs: int, done: int) -> None:
        """A run goes on."""
        self.say(None, "service", [], f"going on; {done} of {plural(jobs, 'job')} ended before")

    def read_file(self, name: str, jobs: Sequence[str], mistake: str) -> None:
        """A submission was read."""
        if mistake:
            self._say_of_file(None, name, jobs, f"submission {name} cannot be read: {mistake}")

    def _say_of_file(self, time: float | None, file: str, jobs: Sequence[str], text: str) -> None:
        """Write an event of a submission: without jobs it would be told to all users."""
        if names := jobs or self.store.names_of_file(Path(file)):
            self.say(time, "warning", names, text)
        else:
            logger.warning(text, extra={"event": "warning"})
