"""Evaluations and samples of the jobs of a run, and what follows from them for each job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.evaluation import Evaluator
from tlora_fx.runtime.generation import Sampler
from tlora_fx.runtime.job_evaluation import Metrics
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.round_end import CallbackErrors


class Measurements:
    """Evaluates jobs together and lets them answer their prompts.

    sampler       None but on the leader
    free_memory   frees what a failed evaluation has left
    alone         one process trains: where all jobs fail together each is tried by itself
    goes_on       whether a job that failed here may go on from where it is
    """

    def __init__(
        self,
        evaluator: Evaluator,
        sampler: Sampler | None,
        callback: TrainerCallback,
        free_memory: Callable[[], None],
        *,
        alone: bool,
        goes_on: bool,
    ) -> None:
        self.evaluator, self.sampler, self.callback = evaluator, sampler, callback
        self.free_memory, self.alone, self.goes_on = free_memory, alone, goes_on

    def evaluate(self, runs: Sequence[JobRun]) -> CallbackErrors:
        """Evaluate jobs together; some may stop early. Returns what ends a job, by job."""
        if not runs:
            return {}
        outside: CallbackErrors = {}
        self.callback.evaluating()
        measured = self._measured(runs)
        for run in runs:
            if run.index not in measured:
                continue
            try:
                report = run.take_evaluation(measured[run.index])
                if report is not None:
                    self.callback.evaluated(report)
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                outside[run.index] = error
                _blame(run, error)
                run.goes_on = self.goes_on
        return outside

    def sample(self, runs: Sequence[JobRun]) -> None:
        """Generate answers to the jobs' prompts, on the leader; a failure costs them alone."""
        if self.sampler is not None and runs and not self.sampler.tell(runs, self.callback):
            self.free_memory()

    def _measured(self, runs: Sequence[JobRun]) -> Mapping[int, Metrics]:
        """The evaluations of jobs; where one process fails at all of them, each job's by itself."""
        try:
            return self.evaluator.measure({run.index: run.data for run in runs})
        except Exception:
            if not self.alone:
                raise
        self.free_memory()
        measured: dict[int, Metrics] = {}
        for run in runs:
            try:
                measured |= self.evaluator.measure({run.index: run.data})
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                _blame(run, error)
        return measured


def _blame(run: JobRun, error: Exception) -> None:
    """End a job for an exception: now where it has ended anyway, else when all know."""
    run.suspect(error)
    if run.status != "running":
        run.fail(run.fault)
