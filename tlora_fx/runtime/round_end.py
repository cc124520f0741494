"""The end of a round: every job's optimizer step, and what it came to.

Where one update serves all jobs nobody waits for it: what it came to is looked at when the next
round is on its way, so that the GPU never waits for the host in between. Jobs with another
optimizer are waited for. Processes that train together look at the same round, for else some would
know that a job has failed, and others not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.errors import MetricsError
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.data.batching import MicroBatches
from tlora_fx.runtime.distributed import counted, gradient_norms, gradient_squares
from tlora_fx.runtime.job_run import JobRun, StepAhead, StepReport
from tlora_fx.runtime.optim.group_update import GroupUpdate, PendingOutcomes
from tlora_fx.runtime.optim.optimizer import JobOptimizer

#: By job what callbacks and metrics files raised.
CallbackErrors = dict[int, Exception]


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
        tell: Callable[[JobRun, StepReport], CallbackErrors],
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
        self._served, self._update = [], None

    def waits(self, runs: Sequence[JobRun]) -> bool:
        """Whether this process has to wait for a round of these jobs."""
        update = self._update_of(runs)
        return update is None or len(update.places) < len(runs)

    def step(
        self,
        losses: Tensor,
        runs: Sequence[JobRun],
        batches: Mapping[int, MicroBatches],
        *,
        waits: bool = False,
    ) -> CallbackErrors:
        """An optimizer step of each job: all in one, to be looked at later, or one by one.

        losses    [J] on the device
        batches   by the jobs' indices
        waits     the round is looked at now, for another process has to
        returns   of the round before, where this one is to be looked at later
        """
        update = self._update_of(runs)
        fused = frozenset(() if update is None else update.places)
        apart = [run for run in runs if run.index not in fused]
        waits = waits or update is None or bool(apart)
        outside = self.collect() if waits else {}
        squares = self._squares(update, apart)
        before = self._ahead
        if update is not None:
            together = [run for run in runs if run.index in fused]
            self._launch(update, together, batches, losses, squares)
        if not waits:
            return self._settled(before)
        norms = gradient_norms(apart, self.mesh.device, squares)
        known = losses.tolist()
        for run in apart:
            index, self.seconds = run.index, time.perf_counter() - self._since
            finish = partial(
                run.finish_step, known[index], batches[index], self.seconds, norms[index]
            )
            outside |= self._take(run, finish, run.step + 1)
        return outside | self.collect()

    def _launch(
        self,
        update: GroupUpdate,
        runs: Sequence[JobRun],
        batches: Mapping[int, MicroBatches],
        losses: Tensor,
        squares: Tensor | None,
    ) -> None:
        """One update of all jobs that it serves, to be looked at later."""
        steps = [run.start_step(batches[run.index]) for run in runs]
        self._ahead = _Launched(update.launch(losses, squares), runs, steps)
        for run, step in zip(runs, steps, strict=True):
            self._take(run, run.optimizer.noted, step.step)

    def _squares(self, update: GroupUpdate | None, apart: Sequence[JobRun]) -> Tensor | None:
        """The sum of squares of each job's gradients; None where each process has whole jobs.

        One all-reduce serves all jobs, whoever updates them on which process.
        """
        if not self._in_parts:
            return None
        squares = gradient_squares(apart, self.model, self.mesh)
        if update is not None:
            update.measure(squares)
        dist.all_reduce(squares, group=self.mesh.world)
        return squares

    def collect(self) -> CallbackErrors:
        """Look at the round that was launched last."""
        ahead, self._ahead = self._ahead, None
        return self._settled(ahead)

    def _update_of(self, runs: Sequence[JobRun]) -> GroupUpdate | None:
        """What updates those of these jobs that kernels serve at once; kept while it fits."""
        optimizers = [run.optimizer for run in runs]
        if self._served != optimizers or (self._update and not self._update.holds()):
            self._served = optimizers
            places = [run.index for run in runs]
            self._update = GroupUpdate.of(optimizers, places, self._counts(runs))
        return self._update

    @property
    def _in_parts(self) -> bool:
        """Whether processes hold parts of jobs."""
        return self.mesh.shape.tp > 1 or self.mesh.shape.pp > 1

    def _counts(self, runs: Sequence[JobRun]) -> Callable[[nn.Parameter], bool] | None:
        """What says whether a parameter counts here in its job's norm, where not all do."""
        if not self._in_parts:
            return None
        here = {id(each) for run in runs for each in counted(run, self.model, self.mesh)}
        return lambda parameter: id(parameter) in here

    def _settled(self, ahead: _Launched | None) -> CallbackErrors:
        if ahead is None:
            return {}
        # Processes that wait for each other do nothing else meanwhile.
        outcomes = ahead.pending.read(self.meanwhile if self.mesh.size == 1 else None)
        now = time.perf_counter()
        self.seconds, self._since = now - self._since, now
        outside: CallbackErrors = {}
        for run, step, outcome in zip(ahead.runs, ahead.steps, outcomes, strict=True):
            finish = partial(run.end_step, step, outcome, self.seconds)
            outside |= self._take(run, finish, step.step)
        return outside

    def _take(
        self, run: JobRun, finish: Callable[[], StepReport | None], step: int
    ) -> CallbackErrors:
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
