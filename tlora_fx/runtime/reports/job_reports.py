"""Reports on jobs to callbacks, and into their folders: steps, ends, adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.distributed import StateGatherer
from tlora_fx.runtime.job_run import JobRun, StepReport, described
from tlora_fx.runtime.round_end import CallbackErrors

#: Steps without any gradient after which a user is told.
STILL_STEPS = 10


class JobReports:
    """Reports the jobs of a trainer; what fails in a callback ends at most the job it speaks of."""

    def __init__(
        self, model: SuperModel, gathering: StateGatherer, callback: TrainerCallback
    ) -> None:
        self.model, self.gathering, self.callback = model, gathering, callback

    def begin(self, runs: list[JobRun]) -> None:
        """Fill the jobs' folders with what is known before the first step."""
        files: Mapping[str, object] = {}
        for run in runs:
            files = run.begin(files)  # type: ignore[arg-type]

    def stepped(self, run: JobRun, report: StepReport) -> CallbackErrors:
        """Report a step; what the callback raises ends the job, unless it has ended by itself."""
        if run.still == STILL_STEPS:
            text = f"no gradient for {STILL_STEPS} steps: it learns nothing"
            self.callback.warned(f"job '{run.job.name}': {text}")
        try:
            self.callback.stepped(report)
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            if run.status == "running":
                run.suspect(error)
                run.goes_on = True
            else:
                self._warn_of(run, error)
            return {run.index: error}
        return {}

    def announce(self, run: JobRun, hear: Callable[[JobRun], None]) -> None:
        """Tell a callback of a job; its failure is a warning."""
        try:
            hear(run)
        except Exception as error:  # noqa: BLE001  (it is so, whoever heard of it)
            self._warn_of(run, error)

    def change(self, run: JobRun, adapter: Mapping[str, Tensor] | None) -> None:
        """A job has joined or left an open model: write down which, and say so.

        adapter   that it leaves; None: it has joined, or it pauses
        """
        if not run.left:
            run.begin()
            self.announce(run, self.callback.joined)
            return
        if adapter is None:
            run.write_status()
        else:
            self.write(run, adapter)
        self.announce(run, self.callback.ended)

    def conclude(self, run: JobRun) -> None:
        """A job has ended: leave its adapter, and say so."""
        self.write(run, self.gathering.whole_adapter(run.job.name, run.final_adapter()))
        self.announce(run, self.callback.ended)

    def write(self, run: JobRun, adapter: Mapping[str, Tensor]) -> None:
        """Leave a job's adapter folder; where it is not whole or not written, the job has failed.

        adapter   put together from all processes
        """
        broken = [name for name, tensor in adapter.items() if not tensor.isfinite().all()]
        if run.status == "done" and broken:
            run.fail(f"step {run.step}: it left numbers in {broken[0]} that are not finite")
        try:
            run.write(adapter, self.base_name())
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            run.goes_on = run.status == "done"
            run.fail(f"its adapter is not written: {described(error)}")

    def base_name(self) -> str | None:
        """The base as adapters name it: hub id or folder."""
        spec = self.model.backbone.spec.as_written()
        return spec.model or (str(spec.config) if spec.config else None)

    def _warn_of(self, run: JobRun, error: Exception) -> None:
        self.callback.warned(f"job '{run.job.name}': a callback failed: {described(error)}")
