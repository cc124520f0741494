"""The end of a round: every job's optimizer step, and what it came to.

Where one update serves all jobs nobody waits for it: what it came to is looked at when the next
round is on its way, so that the GPU never waits for the host in between. Jobs with another
optimizer are waited for. Processes that train together look at the same round, for else some would
know that a job has failed, and others not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tlora_fx.errors import MetricsError
from tlora_fx.host import phases
from tlora_fx.host.phases import StartRecord
from tlora_fx.runtime.data.batching import MicroBatches, count_tokens
from tlora_fx.runtime.group_updater import GroupUpdater
from tlora_fx.runtime.job_run import JobRun, RoundReport, StepAhead, StepReport
from tlora_fx.runtime.optim.group_update import PendingOutcomes

#: By job what callbacks and metrics files raised.
CallbackErrors = dict[int, Exception]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A round that was launched and is not looked at."""

    round: RoundReport
    pending: PendingOutcomes
    runs: Sequence[JobRun]
    steps: Sequence[StepAhead]


class RoundEnd:
    """Updates jobs and reports their steps.

    updater   of the group
    tell      reports a job's step, and returns what that raised
    goes_on   whether a job whose file cannot be written may go on from where it is
    meanwhile is called now and then while a round is waited for that one update ended for all jobs
    started   is told what the start took, once the first round is done
    seconds   that the round took which was looked at last
    """

    def __init__(
        self,
        updater: GroupUpdater,
        tell: Callable[[JobRun, StepReport], CallbackErrors],
        *,
        goes_on: bool,
        meanwhile: Callable[[], None],
        started: Callable[[StartRecord], None],
    ) -> None:
        self.updater, self.tell, self.goes_on = updater, tell, goes_on
        self.meanwhile, self.started = meanwhile, started
        self.seconds = 0.0
        self._ahead: _Launched | None = None
        self._number = 0
        # By the number of a round: the start that it ended.
        self._starts: dict[int, StartRecord] = {}
        self._since = time.perf_counter()

    @property
    def ahead(self) -> Sequence[JobRun]:
        """The jobs of the round that is not looked at yet; none where there is no such round."""
        return () if self._ahead is None else self._ahead.runs

    def begin(self) -> None:
        """A round begins."""
        if self._ahead is None:
            self._since = time.perf_counter()

    def waits(self, runs: Sequence[JobRun]) -> bool:
        """Whether this process has to wait for a round of these jobs."""
        return bool(self.updater.split(runs).apart) or not runs

    def step(
        self,
        losses: Tensor,
        runs: Sequence[JobRun],
        batches: Mapping[int, MicroBatches],
        *,
        waits: bool = False,
        rows: tuple[int, int] = (0, 0),
    ) -> CallbackErrors:
        """An optimizer step of each job: all in one, to be looked at later, or one by one.

        losses    [J] on the device
        batches   by the jobs' indices
        waits     the round is looked at now, for another process has to
        rows      how many rows ran, and how many of them as CUDA graphs
        returns   of the round before, where this one is to be looked at later
        """
        split = self.updater.split(runs)
        waits = waits or split.update is None or bool(split.apart)
        outside = self.collect() if waits else {}
        before = self._ahead
        by_index = {run.index: run for run in runs}
        together = [by_index[member.index] for member in split.together]
        steps = [run.start_step(batches[run.index]) for run in together]
        pending, norms = self.updater.launch(split, losses)
        self._number += 1
        tokens = sum(count_tokens(batches[run.index]) for run in runs)
        round_ = RoundReport(self._number, tokens, 0.0, *rows)
        if pending is not None:
            self._ahead = _Launched(round_, pending, together, steps)
            for run, step in zip(together, steps, strict=True):
                self._take(run, run.optimizer.noted, step.step)
        if not waits:
            return self._settled(before)
        known = losses.tolist()
        for member in split.apart:
            run = by_index[member.index]
            self.seconds = time.perf_counter() - self._since
            loss, norm, report = known[run.index], norms[run.index], self._report(round_)
            finish = partial(run.finish_step, loss, batches[run.index], report, norm)
            outside |= self._take(run, finish, run.step + 1)
        return outside | self.collect()

    def collect(self) -> CallbackErrors:
        """Look at the round that was launched last."""
        ahead, self._ahead = self._ahead, None
        return self._settled(ahead)

    def _settled(self, ahead: _Launched | None) -> CallbackErrors:
        if ahead is None:
            return {}
        # Processes that wait for each other do nothing else meanwhile.
        outcomes = ahead.pending.read(self.meanwhile if self.updater.mesh.size == 1 else None)
        now = time.perf_counter()
        self.seconds, self._since = now - self._since, now
        report = self._report(ahead.round)
        outside: CallbackErrors = {}
        for run, step, outcome in zip(ahead.runs, ahead.steps, outcomes, strict=True):
            finish = partial(run.end_step, step, outcome, report)
            outside |= self._take(run, finish, step.step)
        return outside

    def _report(self, round_: RoundReport) -> RoundReport:
        """A round that has come to its end, with its seconds; the first one ends the start."""
        if (start := phases.end()) is not None:
            self._starts = {round_.number: start}
            self.started(start)
        return replace(round_, seconds=self.seconds, start=self._starts.get(round_.number))

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
