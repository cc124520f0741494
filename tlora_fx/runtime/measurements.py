"""Evaluations and samples of the jobs of a run, and what follows from them for each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlora_fx.config.job import Job
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.evaluation import Evaluator
from tlora_fx.runtime.generation import Sampler
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.job_evaluation import Metrics
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.round_end import CallbackErrors


class Measurements:
    """Evaluates jobs of a group together and lets them answer their prompts, on the leader.

    group   is prepared
    ranks   its processes
    """

    def __init__(self, group: GroupStep, ranks: Ranks, callback: TrainerCallback) -> None:
        assert group.runner is not None
        self.group, self.callback = group, callback
        self.evaluator = Evaluator(
            group.model, group.runner, ranks, group.plan.parts, group.cutting, callback.warned
        )
        self.sampler = Sampler(group.plan, group.model) if group.mesh.leader else None

    def warn(self, jobs: Sequence[Job]) -> None:
        """Say before training which prompts stay without an answer."""
        if self.sampler is not None:
            self.sampler.warn(jobs, self.callback)

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
                # A job that failed here may go on from where it is.
                run.goes_on = not self.group.gathering.apart
        return outside

    def sample(self, runs: Sequence[JobRun]) -> None:
        """Generate answers to the jobs' prompts, on the leader; a failure costs them alone."""
        if self.sampler is not None and runs and not self.sampler.tell(runs, self.callback):
            self.group.free_memory()

    def _measured(self, runs: Sequence[JobRun]) -> Mapping[int, Metrics]:
        """The evaluations of jobs; where one process fails at all of them, each job's by itself."""
        try:
            return self.evaluator.measure({run.index: run.data for run in runs})
        except Exception:
            if self.group.mesh.size > 1:
                raise
        self.group.free_memory()
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
