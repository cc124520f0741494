"""Who wants to know what the loop does: metrics of a replay, a live table."""

from __future__ import annotations

from typing import Protocol

from tlora_fx.scheduler.loop_runs import Run
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import ActiveJob, Decision


class Watch(Protocol):
    """Told of everything that happens, in the order in which it does."""

    def submitted(self, time: float, job: ActiveJob) -> None:
        """A job is waiting."""

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """A job will never run."""

    def decided(
        self, time: float, decision: Decision, wall_seconds: float, evaluations: int
    ) -> None:
        """The policy has decided."""

    def launched(self, time: float, run: Run) -> None:
        """A group was formed."""

    def warned(self, time: float, run: Run, text: str) -> None:
        """Something went wrong in a group, and it goes on."""

    def left(self, time: float, run: Run, job: ActiveJob, reason: str) -> None:
        """A job ended, done ("") or failed for a reason; its group still has it in `run.jobs`."""

    def ended(self, time: float, run: Run, how: str) -> None:
        """A group is over: "drained", "finished", "failed"; its jobs' steps are settled."""

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """A job that is in no group will not be run again."""

    def capacity(self, time: float, gpus: int) -> None:
        """How many GPUs there are from now on."""


class NoWatch:
    """Nobody wants to know."""

    def submitted(self, time: float, job: ActiveJob) -> None:
        """Nothing."""

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """Nothing."""

    def decided(
        self, time: float, decision: Decision, wall_seconds: float, evaluations: int
    ) -> None:
        """Nothing."""

    def launched(self, time: float, run: Run) -> None:
        """Nothing."""

    def warned(self, time: float, run: Run, text: str) -> None:
        """Nothing."""

    def left(self, time: float, run: Run, job: ActiveJob, reason: str) -> None:
        """Nothing."""

    def ended(self, time: float, run: Run, how: str) -> None:
        """Nothing."""

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """Nothing."""

    def capacity(self, time: float, gpus: int) -> None:
        """Nothing."""
