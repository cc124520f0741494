"""The jobs that a policy sees at once, in the order of their claims."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tlora_fx.scheduler.state import (
    ActiveJob,
    arrival,
)

if TYPE_CHECKING:
    pass


Key = tuple[float, str]


class Window:
    """The oldest jobs that are not done, and the queue of the others.

    The window holds at most `runnable` jobs. A job enters it in order of submission and leaves it
    only when it ends, so the window is always the oldest jobs, and none of them starves behind
    younger ones. Whatever the queue's length, nothing here costs more than its logarithm.

    runnable   most jobs in the window
    """

    def __init__(self, runnable: int) -> None:
        self.runnable = runnable
        self.jobs: dict[str, ActiveJob] = {}
        self._queue: list[tuple[float, str, ActiveJob]] = []
        self._last: Key = (float("-inf"), "")

    def __len__(self) -> int:
        """Jobs in the window and in the queue."""
        return len(self.jobs) + len(self._queue)

    @property
    def queued(self) -> int:
        """Jobs behind the window."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether a job that comes now would have to wait behind the window."""
        return len(self.jobs) + len(self._queue) >= self.runnable

    def put(self, job: ActiveJob) -> bool:
        """A job comes; whether it entered the window."""
        heappush(self._queue, (job.request.submitted, job.name, job))
        return self.fill()

    def fill(self) -> bool:
        """Admit waiting jobs while the window has free slots; whether any came."""
        came = False
        while self._queue and len(self.jobs) < self.runnable:
            submitted, name, job = heappop(self._queue)
            self.jobs[name] = job
            if (submitted, name) < self._last:
                # It was submitted late: put the window into order again.
                self.jobs = {one.name: one for one in sorted(self.jobs.values(), key=arrival)}
            else:
                self._last = (submitted, name)
            came = True
        return came

    def withdraw(self, name: str) -> bool:
        """A job is taken back, from the window or from the queue; whether it was in one."""
        return self.take(name) is not None

    def take(self, name: str) -> ActiveJob | None:
        """The same, with the job; None where it was in neither."""
        job = self.jobs.pop(name, None)
        if job is not None:
            return job
        job = next((entry[2] for entry in self._queue if entry[1] == name), None)
        if job is not None:
            self._queue = [entry for entry in self._queue if entry[1] != name]
            heapify(self._queue)
        return job

    def remove(self, name: str) -> ActiveJob:
        """A job of the window ends; the next may come in by `fill`."""
        return self.jobs.pop(name)

    def waiting(self) -> list[ActiveJob]:
        """The queue behind the window, in order."""
        return [job for _, _, job in sorted(self._queue, key=lambda entry: entry[:2])]
