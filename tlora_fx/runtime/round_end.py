"""The end of a round: every job's optimizer step, and what it came to.

Where one update serves all jobs nobody waits for it: what it came to is looked at when the next
round is on its way, so that the GPU never waits for the host in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tlora_fx.errors import MetricsError
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.batching import MicroBatches
from tlora_fx.runtime.distributed import gradient_norms
from tlora_fx.runtime.group_update import GroupUpdate, PendingOutcomes
from tlora_fx.runtime.job_run import JobRun, StepAhead, StepReport
from tlora_fx.runtime.optimizer import JobOptimizer

#: By job what callbacks and metrics files raised.
Outside = dict[int, Exception]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A round that was launched and is not looked at."""

    pending: PendingOutcomes
    runs: Sequence[JobRun]
    steps: Sequence[StepAhead]


class RoundEnd:
    """Updates jobs and reports their steps.

    tell      reports a job's step, and returns what that raised
    goes_on   whether a job whose file cannot be written may go on from where it is
    meanwhile is called now and then while a round is waited for that one update ended for all jobs
    seconds   that the round took which was looked at last
    """

    def __init__(
        self,
        model: SuperModel,
        mesh: Mesh,
        tell: Callable[[JobRun, StepReport], Outside],
        *,
        goes_on: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        self.model, self.mesh, self.tell, self.goes_on = model, mesh, tell, goes_on
        self.meanwhile = meanwhile
        self.seconds = 0.0
        self._served: list[JobOptimizer] = []
        self._update: GroupUpdate | None = None
        self._ahead: _Launched | None = None
        self._since = time.perf_counter()

    @property
    def ahead(self) -> Sequence[JobRun]:
        """The jobs of the round that is not looked at yet; none where there is no such round."""
        return () if self._ahead is None else self._ahead.runs

    def begin(self) -> None:
        """A round begins."""
        if self._ahead is None:
            self._since = time.perf_counter()

    def forget(self) -> None:
        """What jobs train may lie elsewhere from now on."""
        self._served = []

    def step(
        self, losses: Tensor, runs: Sequence[JobRun], batches: Mapping[int, MicroBatches]
    ) -> Outside:
        """An optimizer step of each job: all in one, to be looked at later, or one by one.

        losses    [J] on the device
        batches   by the jobs' indices
        returns   of the round before, where this one is to be looked at later
        """
        update = self._update_of(runs)
        if update is not None:
            steps = [run.start_step(batches[run.index]) for run in runs]
            before, self._ahead = self._ahead, _Launched(update.launch(losses), runs, steps)
            for run, step in zip(runs, steps, strict=True):
                self._take(run, run.optimizer.noted, step.step)
            return self._settled(before)
        outside = self.settle()
        norms = gradient_norms(runs, self.model, self.mesh)
        known = losses.tolist()
        for run in runs:
            index, self.seconds = run.index, time.perf_counter() - self._since
            finish = partial(
                run.finish_step, known[index], batches[index], self.seconds, norms[index]
            )
            outside |= self._take(run, finish, run.step + 1)
        return outside

    def settle(self) -> Outside:
        """Look at the round that was launched last."""
        ahead, self._ahead = self._ahead, None
        return self._settled(ahead)

    def _update_of(self, runs: Sequence[JobRun]) -> GroupUpdate | None:
        """What updates these jobs at once, where one process trains them; kept while it fits."""
        if self.mesh.size > 1:
            return None
        optimizers = [run.optimizer for run in runs]
        if self._served != optimizers or (self._update and not self._update.holds()):
            self._served = optimizers
            self._update = GroupUpdate.of(optimizers, [run.index for run in runs])
        return self._update

    def _settled(self, ahead: _Launched | None) -> Outside:
        if ahead is None:
            return {}
        outcomes = ahead.pending.read(self.meanwhile)
        now = time.perf_counter()
        self.seconds, self._since = now - self._since, now
        outside: Outside = {}
        for run, step, outcome in zip(ahead.runs, ahead.steps, outcomes, strict=True):
            finish = partial(run.end_step, step, outcome, self.seconds)
            outside |= self._take(run, finish, step.step)
        return outside

    def _take(self, run: JobRun, finish: Callable[[], StepReport | None], step: int) -> Outside:
        """Let a job take in its step, and report it; what that raises ends the job."""
        try:
            report = finish()
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            run.suspect(error, step)
            if not isinstance(error, MetricsError):
                return {}
            run.goes_on = self.goes_on
            return {run.index: error}
        return {} if report is None else self.tell(run, report)
