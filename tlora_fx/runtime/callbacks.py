"""Callbacks of a run: the protocol, several callbacks as one, and those that a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_fx.errors import CallbackWrong, errors_as
from tlora_fx.runtime.user_code import told_with_line, user_object

if TYPE_CHECKING:
    from tlora_fx.config.job import Job
    from tlora_fx.runtime.job_evaluation import EvaluationReport
    from tlora_fx.runtime.job_run import JobRun, SampleReport, StepReport


class TrainerCallback:
    """Callback of a run while it goes on; every method does nothing until it is overridden."""

    def started(self, runs: Sequence[JobRun]) -> None:
        """Training begins, or goes on."""

    def stepped(self, report: StepReport) -> None:
        """A job did an optimizer step."""

    def evaluating(self) -> None:
        """Jobs are about to be evaluated, which may take its time."""

    def evaluated(self, report: EvaluationReport) -> None:
        """A job was evaluated."""

    def joined(self, run: JobRun) -> None:
        """A job has come to a run that was training already."""

    def sampled(self, report: SampleReport) -> None:
        """A job has answered its `sample_prompts`."""

    def ended(self, run: JobRun) -> None:
        """A job is done, has failed, or pauses."""

    def saving(self) -> None:
        """A checkpoint is about to be taken, or waited for, which may take its time."""

    def saved(self, path: Path, runs: Sequence[JobRun]) -> None:
        """A checkpoint is on the disk; others stay in it as they were before.

        runs   as it holds them, without tensors: the jobs themselves may be further by now
        """

    def warned(self, text: str) -> None:
        """Something went wrong that does not stop the run."""

    def noted(self, text: str) -> None:
        """Something to know of the run; nothing is wrong."""


class EachInTurn(TrainerCallback):
    """Hands on what it hears, in order; what one raises goes through, and ends the turn."""

    def __init__(self, *callbacks: TrainerCallback) -> None:
        self.callbacks = list(callbacks)
        for event in (name for name in vars(TrainerCallback) if not name.startswith("_")):
            setattr(self, event, partial(self._tell, event))

    def _tell(self, event: str, *facts: Any) -> None:
        for callback in list(self.callbacks):
            self._tell_one(callback, event, facts)

    def _tell_one(self, callback: TrainerCallback, event: str, facts: tuple[Any, ...]) -> None:
        getattr(callback, event)(*facts)


class Callbacks(EachInTurn):
    """Hands on what it hears, in order.

    A callback that raises costs a warning, never a step: it hears no more. What asks the run to
    stop, such as KeyboardInterrupt, goes through.

    warn    is told of it; None: the others are
    """

    def __init__(
        self, callbacks: Iterable[TrainerCallback], warn: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(*callbacks)
        self._warn = warn or self.warned

    def _tell_one(self, callback: TrainerCallback, event: str, facts: tuple[Any, ...]) -> None:
        try:
            super()._tell_one(callback, event, facts)
        except Exception as error:  # noqa: BLE001  (a user's code may raise anything)
            self.callbacks.remove(callback)
            inner = callback.callbacks[0] if isinstance(callback, OfJob) else callback
            kind = type(inner)
            told = told_with_line(error, getattr(inner, event, None))
            self._warn(
                f"the callback {kind.__qualname__} failed in {event} and hears no more: {told}"
            )


class OfJob(EachInTurn):
    """Hands on what it hears of one job: its reports, its run, and what is of no job."""

    def __init__(self, job: str, callback: TrainerCallback) -> None:
        super().__init__(callback)
        self._job = job

    def _tell(self, event: str, *facts: Any) -> None:
        own = [self._own(fact) for fact in facts]
        if None not in own:
            super()._tell(event, *own)

    def _own(self, fact: Any) -> Any:
        """A fact as far as it is of the job; None where it is of others."""
        if isinstance(fact, list | tuple):
            return [each for each in fact if self._own(each) is not None] or None
        job = getattr(fact, "job", None)
        return fact if job is None or getattr(job, "name", job) == self._job else None


class JobCallbacks(Callbacks):
    """Lets the callbacks of each job hear of that job, also of one that joins later.

    warn    is told of one that raises
    """

    def __init__(self, jobs: Iterable[Job], warn: Callable[[str], None]) -> None:
        super().__init__((), warn)
        for job in jobs:
            self._add(job)

    def _tell(self, event: str, *facts: Any) -> None:
        if event == "joined":
            self._add(facts[0].job)
        super()._tell(event, *facts)

    def _add(self, job: Job) -> None:
        self.callbacks += [OfJob(job.name, callback) for callback in job.callbacks]


def callback_named(name: str) -> TrainerCallback:
    """A callback of the class that MODULE:CLASS or FILE.py:CLASS names.

    raises    CallbackWrong
    """
    help = "write FILE.py:CLASS, a subclass of tlora_fx.TrainerCallback without arguments"
    what = "a callback cannot be made"
    with errors_as(CallbackWrong, what, Exception, named=True, callback=name, help=help):
        callback = user_object(name)()
    if not isinstance(callback, TrainerCallback):
        raise CallbackWrong(
            "a callback is no tlora_fx.TrainerCallback",
            callback=name,
            found=type(callback).__name__,
            help="derive its class from tlora_fx.TrainerCallback",
        )
    return callback
