"""Groups that run, groups that leave, and groups that wait for their place to become free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tlora_fx.errors import PlaceTaken
from tlora_fx.scheduler.estimating import Layout
from tlora_fx.scheduler.executor import Executor
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.loop_runs import Run, membership
from tlora_fx.scheduler.loop_watch import Watch
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import ActiveJob

if TYPE_CHECKING:
    from tlora_fx.scheduler.store import Ledger

#: How a group shall be spread over its GPUs; None: as the executor finds best.
LayoutOf = Callable[[Group, Sequence[JobRequest]], Layout | None]


class Formations:
    """What an executor was asked to run.

    runs      by epoch, those that leave included
    pending   groups that shall run, once their jobs and GPUs are free
    """

    def __init__(
        self, executor: Executor, ledger: Ledger | None, watch: Watch, layout_of: LayoutOf | None
    ) -> None:
        self.runs: dict[int, Run] = {}
        self.pending: list[Group] = []
        self._executor = executor
        self._ledger = ledger
        self._watch = watch
        self._layout_of = layout_of
        self._next = ledger.next_epoch() if ledger else 1
        self._held: set[int] = set()
        self._busy: set[str] = set()
        self._standing: tuple[Group, ...] | None = None

    def standing(self) -> tuple[Group, ...]:
        """What runs or is about to, for a policy: nothing that leaves."""
        if self._standing is None:
            running = [run.group for run in self.runs.values() if not run.leaving]
            self._standing = (*running, *self.pending)
        return self._standing

    def spoken_for(self) -> int:
        """GPUs that are held, or will be as soon as they are free."""
        if not self.pending:
            return len(self._held)
        return len(self._held.union(*(group.place for group in self.pending)))

    def touched(self) -> None:
        """A run has changed."""
        self._standing = None

    def want(self, groups: Sequence[Group]) -> None:
        """From now on these shall run: what is not among them is asked to stop."""
        wanted = {id(group): group for group in groups}
        strangers: dict[object, Group] | None = None
        for run in list(self.runs.values()):
            if run.leaving:
                continue
            if wanted.pop(id(run.group), None) is not None:
                continue
            if strangers is None:
                strangers = {membership(group): group for group in groups}
            same = strangers.get(run.key)
            if same is None:
                self.drain(run)
            else:
                wanted.pop(id(same), None)
                run.group = same
        self.pending = list(wanted.values())
        self.touched()

    def drain(self, run: Run) -> None:
        """Ask a run to stop."""
        run.leaving = True
        self._executor.drain(run.launched, run.epoch)
        self.touched()

    def end(self, run: Run, how: str, now: float) -> None:
        """A run is over: its place is free."""
        if self.runs.pop(run.epoch, None) is None:
            return
        self._executor.release(run.launched, run.epoch)
        self._held.difference_update(run.launched.place)
        self._busy.difference_update(run.jobs)
        if self._ledger and how not in {"drained", "failed"}:
            self._ledger.end(run.epoch, how, now)
        self._watch.ended(now, run, how)
        self.touched()

    def freed(self, name: str) -> None:
        """A job is in no run any more."""
        self._busy.discard(name)

    def drop(self, unfit: Callable[[Group], bool]) -> None:
        """Give up pending groups, such as those on a lost node."""
        self.pending = [group for group in self.pending if not unfit(group)]
        self.touched()

    def launch(self, jobs: Mapping[str, ActiveJob], now: float) -> tuple[bool, bool]:
        """Launch what waits and can; whether any was, and whether any was refused its place."""
        if not self.pending:
            return False, False
        left, launched, refused = [], False, False
        for group in self.pending:
            if not self._held.isdisjoint(group.place) or not self._busy.isdisjoint(group.jobs):
                left.append(group)
            elif self._start(group, jobs, now):
                launched = True
            else:
                refused = True
        self.pending = left
        self.touched()
        return launched, refused

    def _start(self, group: Group, jobs: Mapping[str, ActiveJob], now: float) -> bool:
        epoch, self._next = self._next, self._next + 1
        try:
            self._executor.reserve(group, epoch)
        except PlaceTaken:
            return False
        members = {name: jobs[name] for name in group.jobs}
        requests = [job.request for job in members.values()]
        steps = {name: job.steps_done for name, job in members.items()}
        layout = self._layout_of(group, requests) if self._layout_of else None
        if self._ledger:
            self._ledger.launch(group, epoch, layout, now)
        run = Run(epoch, group, group, members, dict(steps), now)
        self.runs[epoch] = run
        self._held.update(group.place)
        self._busy.update(group.jobs)
        self._executor.launch(group, epoch, requests, steps, layout)
        self._watch.launched(now, run)
        return True
