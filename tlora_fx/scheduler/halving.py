"""Compare jobs of a run by synchronous successive halving, whatever groups they train in.

A worker pauses a job that comes to a rung, and commits it there with its evaluation loss. The job
is parked: no policy sees it. Once all jobs of its halving have come to the rung or have ended, the
weak ones end and the others are let go. The ledger holds losses and decisions, so that a run that
was killed finds both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tlora_fx.config.halving import HalvingSpec, reason_of, result_of
from tlora_fx.errors import TloraError
from tlora_fx.runtime.run_folder import RunFolder
from tlora_fx.scheduler.history import RungRecord
from tlora_fx.scheduler.local.executor import LocalExecutor
from tlora_fx.scheduler.loop import Loop
from tlora_fx.scheduler.store import Ledger

#: Who submitted the jobs, name of the halving, and steps.
Rung = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class RungComparison:
    """Parks jobs at their rungs, and decides which go on.

    specs     of jobs that have not ended, by name
    user_of   who submitted a job: jobs of two users are not compared
    """

    ledger: Ledger
    loop: Loop
    executor: LocalExecutor
    folder: RunFolder
    specs: Mapping[str, Mapping[str, Any]]
    user_of: Callable[[str], str]

    def look(self, coming: Callable[[], Set[str] | None], now: float) -> None:
        """Park jobs that have come to a rung, compare those of which none is missing.

        coming   names of all jobs that have not ended; None: some are not known yet
        """
        rungs: dict[Rung, list[RungRecord]] = {}
        for record in self.ledger.undecided_rungs():
            rung = self.user_of(record.job), str(record.halving.group), record.step
            rungs.setdefault(rung, []).append(record)
            if self.loop.ended.get(record.job) == "" and record.job not in self.loop.parked:
                self.loop.park(record.job)
        names = coming() if rungs else None
        for rung, there in list(rungs.items()):
            if names is not None and self._is_complete(rung, there, names):
                self._decide(rung, there, now)
                del rungs[rung]
        undecided = {each.job for there in rungs.values() for each in there}
        for name in self.loop.parked - undecided:
            self.loop.unpark(name)

    def _is_complete(self, rung: Rung, there: Sequence[RungRecord], coming: Set[str]) -> bool:
        """Whether no job is missing that comes to a rung, and those there are in no group."""
        loop = self.loop
        own = {each.job for each in there if each.is_active} & coming
        apart = all(name in loop.parked and not loop.formations.holds(name) for name in own)
        return apart and not any(self._comes(name, rung) for name in coming)

    def _comes(self, name: str, rung: Rung) -> bool:
        user, group, step = rung
        spec = self.specs.get(name, {}).get("halving")
        if spec is None or spec["group"] != group or self.user_of(name) != user:
            return False
        job = self.loop.held.get(name) or self.loop.window.jobs.get(name)
        # Of a job that is not prepared, or behind the window, nobody knows the steps.
        if job is not None and step not in HalvingSpec(**spec).rungs(job.request.steps):
            return False
        return not self.ledger.has_rung(name, step)

    def _decide(self, rung: Rung, there: Sequence[RungRecord], now: float) -> None:
        _, group, step = rung
        losses = {each.job: each.loss for each in there}
        kept, weak = there[0].halving.compare(losses)
        reasons = {name: reason_of(losses[name], step, len(kept), len(losses)) for name in weak}
        ended = [each.job for each in there if each.is_active and each.job in reasons]
        for name in ended:
            # First the folder: a run that is killed in between decides again.
            with suppress(OSError, TloraError):
                self.folder.restate(name, "done", reason=reasons[name])
        self.ledger.decide_rung(step, kept, reasons, now)
        for name in self.loop.parked.intersection(ended):
            self.executor.forget(name)
            self.loop.finish(name)
        if ended:
            text = result_of(group, step, kept, len(losses))
            self.loop.callback.compared(now, ended, text)
