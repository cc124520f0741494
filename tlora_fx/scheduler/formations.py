"""Groups that run, groups that leave, and groups that wait for their place to become free.

At the end stands the credit of their jobs for GPU time that they gave to others. A job that
consented to lend may run slower than its bound. What it gives up then, measured in GPU-seconds of
its own GPUs, is written to its credit and shared as debt by its neighbours, each by the GPUs that
it asked for. A creditor is repaid when a group makes it faster than it is alone, by the neighbours
that owe; and it is taken first from the queue. What is given is what is taken: balances sum to
zero, those that ended in debt or credit included.

source   of credit: tLoRA, section 3.4, elastic contribution; field notes: it needs an account
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tlora_fx.cost.estimator import Estimator, Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import CreditRefused, PlaceTaken
from tlora_fx.scheduler.executor import Executor, GroupLaunch
from tlora_fx.scheduler.state import ROUNDING, ActiveJob, Decision, Group, JobRequest, broken

if TYPE_CHECKING:
    from tlora_fx.scheduler.store import Ledger

Membership = tuple[frozenset[str], frozenset[int]]


def membership(group: Group) -> Membership:
    """Key of a group: its jobs and its GPUs."""
    return frozenset(group.jobs), frozenset(group.place)


@dataclass(slots=True, eq=False)
class Formation:
    """One formation of a group, from its launch until its place is given back.

    launched    as it was reserved and launched, what the executor knows it by
    started     when its first step began; None: not yet
    settled     until when its jobs' credit is written down, seconds
    leaving     asked to stop, or about to be told that it failed: what a policy sees no more
    next_group  the group that it shall become next, without stopping; None: it stays as it is
    successor   the formation that it is becoming, which is not running yet
    origin      the epoch that it was before, where it is a successor
    asked       when that was begun, seconds
    came, went  jobs that joined and left when it took over, ended ones not counted
    paused      seconds for which its jobs stood still when it took over; None: it was formed anew
    failure     why it ended as a whole, if it did
    """

    epoch: int
    group: Group
    launched: Group
    jobs: dict[str, ActiveJob]
    committed: dict[str, float]
    time: float
    started: float | None = None
    settled: float = float("-inf")
    leaving: bool = False
    next_group: Group | None = None
    successor: Formation | None = None
    origin: int | None = None
    asked: float = 0.0
    came: tuple[str, ...] = ()
    went: tuple[str, ...] = ()
    paused: float | None = None
    failure: str = ""
    key: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.key = membership(self.group)

    def without(self, name: str, seconds: float) -> None:
        """A job ended; the others go on, with another step time."""
        del self.jobs[name]
        rest = tuple(other for other in self.group.jobs if other != name)
        self.group = replace(self.group, jobs=rest, seconds=seconds)
        self.key = membership(self.group)

    def advanced(self, steps: Mapping[str, float]) -> None:
        """Take over steps of jobs that are still in it; late news moves nothing back."""
        for name, done in steps.items():
            job = self.jobs.get(name)
            if job is not None and done > job.steps_done:
                job.steps_done = min(done, float(job.request.steps))


#: Sums of demands that are remembered.
KEPT = 1 << 16


class GroupStepTime(NamedTuple):
    """One step of a group where it stands; in `busy_seconds` of GPUs it is at the roofline."""

    seconds: float
    busy_seconds: float


class StepTimes:
    """The step times of groups on the places that they got."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._known: dict[tuple[object, ...], GroupStepTime] = {}

    def of(
        self, requests: Sequence[JobRequest], place: Sequence[int], cluster: Cluster
    ) -> GroupStepTime:
        """Step time of a group of one base on some GPUs."""
        gpus, tier = len(place), cluster.tier(place)
        base = requests[0].base
        key = (base, gpus, tier, *sorted([request.demand for request in requests]))
        step = self._known.get(key)
        if step is None:
            rows = np.sum([request.demand for request in requests], axis=0)[None]
            held = np.array([float(gpus)])
            seconds = self.estimator.seconds(base, rows, held, [tier])
            busy = self.estimator.busy(base, rows, held, seconds)
            step = GroupStepTime(float(seconds[0]), float(busy[0] * seconds[0]) * gpus)
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = step
        return step


class Callback:
    """Hears of everything that a run does, in that order; each method does nothing by default."""

    def submitted(self, time: float, job: ActiveJob) -> None:
        """A job is waiting."""

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """A job will never run."""

    def decided(
        self, time: float, decision: Decision, wall_seconds: float, evaluations: int
    ) -> None:
        """The policy has decided."""

    def launched(self, time: float, formation: Formation) -> None:
        """A group was formed."""

    def warned(self, time: float, formation: Formation, text: str) -> None:
        """Something went wrong in a group, and it goes on."""

    def noted(self, time: float, text: str) -> None:
        """Something became of a worker that waits for a group."""

    def left(self, time: float, formation: Formation, job: ActiveJob, reason: str) -> None:
        """A job ended, done ("") or failed for a reason; its group still has it in `run.jobs`."""

    def ended(self, time: float, formation: Formation, how: str) -> None:
        """A group is over: "drained", "finished", "failed"; its jobs' steps are settled."""

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """A job that is in no group will not be run again."""

    def capacity(self, time: float, gpus: int) -> None:
        """The number of GPUs has changed."""

    def retried(
        self, time: float, file: str, jobs: Sequence[str], reason: str, seconds: float
    ) -> None:
        """A process died that read a job file, or ("") prepared jobs; another begins in seconds."""

    def parked(self, time: float, request: JobRequest, reason: str) -> None:
        """A job of an earlier process cannot go on now; the next start tries it again."""

    def missed_files(self, time: float, request: JobRequest, reason: str) -> None:
        """Files of a job cannot be read; it goes on once they can."""

    def found_files(self, time: float, request: JobRequest) -> None:
        """The files of a job can be read again."""

    def compared(self, time: float, ended: Sequence[str], text: str) -> None:
        """Jobs were compared by their halving, and some have ended."""

    def cancelled(self, time: float, name: str) -> None:
        """A job was taken back before it began: its file is gone."""

    def kept(self, time: float, name: str) -> None:
        """The file of a job is gone, and the job goes on, since it has begun."""

    def resumed(self, jobs: int, done: int) -> None:
        """A run goes on with what an earlier process began."""

    def read_file(self, name: str, jobs: Sequence[str], mistake: str) -> None:
        """A job file was read: its new jobs, and what is wrong with it."""


#: How a group shall be spread over its GPUs; None: as the executor finds best.
LayoutOf = Callable[[Group, Sequence[JobRequest]], Layout | None]


class Formations:
    """Formations that an executor was asked to run.

    pending   groups that shall run, once their jobs and GPUs are free
    """

    def __init__(
        self,
        executor: Executor,
        ledger: Ledger | None,
        callback: Callback,
        layout_of: LayoutOf | None,
    ) -> None:
        self.running: dict[int, Formation] = {}
        self.pending: list[Group] = []
        self._executor = executor
        self._ledger = ledger
        self._callback = callback
        self._layout_of = layout_of
        self._next = ledger.next_epoch() if ledger else 1
        self._held: set[int] = set()
        self._busy: set[str] = set()
        self._standing: tuple[Group, ...] | None = None

    def standing(self) -> tuple[Group, ...]:
        """Groups that run or are about to, for a policy, without those that leave."""
        if self._standing is None:
            running = [
                (formation.successor or formation).group
                for formation in self.running.values()
                if not formation.leaving and not self._is_pending(formation.next_group)
            ]
            self._standing = (*running, *self.pending)
        return self._standing

    def _is_pending(self, group: Group | None) -> bool:
        return any(other is group for other in self.pending)

    def claimed_gpus(self) -> int:
        """GPUs that are held, or will be as soon as they are free."""
        return len(self._held.union(*(group.place for group in self.pending)))

    def touched(self) -> None:
        """Note that a formation has changed."""
        self._standing = None

    def want(self, groups: Sequence[Group]) -> None:
        """Set the groups that shall run: other groups change, or are asked to stop."""
        self.pending = list(groups)
        for formation in list(self.running.values()):
            if not formation.leaving:
                self._match(formation)
        self.touched()

    def _match(self, formation: Formation) -> None:
        """Find what a formation is among the groups that shall run, or is to become."""
        current = formation.successor or formation
        formation.next_group = None
        for group in self.pending:
            if group is current.group or membership(group) == current.key:
                current.group = group
                self.pending = [other for other in self.pending if other is not group]
                return
        formation.next_group = next(
            (group for group in self.pending if self._goes_on(current, group)), None
        )
        if formation.next_group is None:
            self.drain(formation)

    def _goes_on(self, formation: Formation, group: Group) -> bool:
        """Whether a formation can become a group without a stop: some jobs stay where it is."""
        stays = not formation.jobs.keys().isdisjoint(group.jobs)
        there = set(group.place) == set(formation.launched.place)
        return (
            stays
            and there
            and self._executor.can_change(formation.launched, formation.epoch, group)
        )

    def part(self, formation: Formation, names: Container[str]) -> None:
        """Remove jobs from a formation; where that takes a stop, drain the formation."""
        if formation.leaving:
            return
        rest = tuple(other for other in formation.group.jobs if other not in names)
        group = replace(formation.group, jobs=rest)
        if formation.successor is None and rest and self._goes_on(formation, group):
            formation.next_group = group
            self.pending.append(group)
            self.touched()
        else:
            self.drain(formation)

    def drain(self, formation: Formation) -> None:
        """Ask a formation to stop."""
        formation.leaving, formation.next_group = True, None
        self._executor.drain(formation.launched, formation.epoch)
        if formation.successor is not None:
            formation.successor.leaving = True
            self._executor.drain(formation.successor.launched, formation.successor.epoch)
        self.touched()

    def end(self, formation: Formation, how: str, now: float) -> None:
        """A formation is over: its place is free, or its successor's."""
        if self.running.pop(formation.epoch, None) is None:
            return
        self._executor.release(formation.launched, formation.epoch)
        self._held.difference_update(formation.launched.place)
        self._busy.difference_update(formation.jobs)
        if self._ledger and how not in {"drained", "failed"}:
            self._ledger.end(formation.epoch, how, now)
        self._callback.ended(now, formation, how)
        if formation.successor is not None:
            self._succeed(formation, formation.successor, how, now)
        self.touched()

    def _succeed(self, formation: Formation, successor: Formation, how: str, now: float) -> None:
        """What a formation was becoming is there, or will never be."""
        if how == "failed" or not successor.jobs:
            self._busy.difference_update(successor.jobs)
            self._executor.release(successor.launched, successor.epoch)
            if self._ledger:
                self._ledger.end(successor.epoch, how, now)
            return
        self.running[successor.epoch] = successor
        self._held.update(successor.launched.place)
        self._busy.update(successor.jobs)
        successor.time, successor.next_group = now, formation.next_group
        successor.came = tuple(
            name for name in successor.jobs if name not in formation.launched.jobs
        )
        successor.went = tuple(
            name for name in formation.jobs if name not in successor.launched.jobs
        )
        self._callback.launched(now, successor)
        if successor.next_group is not None and not self._is_pending(successor.next_group):
            successor.next_group = None

    def holds(self, name: str) -> bool:
        """Whether a job is in a formation, or joins one."""
        return name in self._busy

    def freed(self, name: str) -> None:
        """A job is in no formation any more."""
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
        before = {
            id(formation.next_group): formation
            for formation in self.running.values()
            if formation.next_group is not None
        }
        for group in self.pending:
            formation = before.get(id(group))
            if formation is not None:
                changed = self._change(formation, group, jobs, now)
                launched |= changed
                if formation.next_group is not None:
                    left.append(group)
            elif not self._held.isdisjoint(group.place) or not self._busy.isdisjoint(group.jobs):
                left.append(group)
            elif self._start(group, jobs, now):
                launched = True
            else:
                refused = True
        self.pending = left
        self.touched()
        return launched, refused

    def _change(
        self, formation: Formation, group: Group, jobs: Mapping[str, ActiveJob], now: float
    ) -> bool:
        """Change a formation into a group as far as its jobs are free; whether anything begins.

        Those that leave go at once: another one may wait for them, which has what this one needs.
        """
        if formation.successor is not None or formation.leaving:
            return False
        arriving = [name for name in group.jobs if name not in formation.jobs]
        if self._busy.isdisjoint(arriving):
            formation.next_group = None
            self._become(formation, group, jobs, now)
            return True
        stay = tuple(name for name in group.jobs if name in formation.jobs)
        if len(stay) == len(formation.jobs):
            return False
        self._become(
            formation, replace(group, jobs=stay, seconds=formation.group.seconds), jobs, now
        )
        return True

    def _become(
        self, formation: Formation, group: Group, jobs: Mapping[str, ActiveJob], now: float
    ) -> None:
        epoch, self._next = self._next, self._next + 1
        members = {name: jobs[name] for name in group.jobs}
        steps = {name: job.steps_done for name, job in members.items()}
        if self._ledger:
            self._ledger.launch(group, epoch, None, now, origin=formation.epoch)
        formation.successor = Formation(
            epoch, group, group, members, dict(steps), now, origin=formation.epoch, asked=now
        )
        self._busy.update(group.jobs)
        launch = GroupLaunch(group, epoch, [job.request for job in members.values()], steps)
        self._executor.change(formation.launched, formation.epoch, launch)

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
        formation = Formation(epoch, group, group, members, dict(steps), now)
        self.running[epoch] = formation
        self._held.update(group.place)
        self._busy.update(group.jobs)
        self._executor.launch(GroupLaunch(group, epoch, requests, steps, layout))
        self._callback.launched(now, formation)
        return True


class Credits:
    """Settles the credit of running jobs, as a balance each: positive has given, negative taken.

    A group is settled before each decision and whenever its jobs change, if one of its jobs
    consents to lend or has a balance. Groups that break a bound without consent, as some baselines'
    do, are not: what they take is not lent.

    switch_seconds   from a launch, in which nobody gives anything, where a start is not told
    used             whether any job came that lends, or that has given
    """

    def __init__(self, switch_seconds: float) -> None:
        self.switch_seconds = switch_seconds
        self.used = False
        self._balances: dict[str, float] = {}

    def balance(self, job: str) -> float:
        """Balance of one job, in GPU-seconds."""
        return self._balances.get(job, 0.0)

    def open(self, job: ActiveJob) -> None:
        """A job comes; it may have given before."""
        self.used = self.used or self._concerns(job)
        if job.credit:
            self._add(job.name, job.credit)

    def close(self, name: str) -> None:
        """Close the account of a job that has ended."""
        self._balances.pop(name, None)

    def settle(self, formation: Formation, now: float) -> None:
        """Write down what a formation's jobs gave and took since it was settled last."""
        if not self.used:
            return
        begin = (
            formation.time + self.switch_seconds if formation.started is None else formation.started
        )
        since, formation.settled = max(formation.settled, begin), now
        if len(formation.jobs) < 2 or now <= since:
            return
        jobs = list(formation.jobs.values())
        if any(self._concerns(job) for job in jobs):
            seconds = formation.group.seconds
            if seconds > 0 and not broken(jobs, seconds, now):
                self.share(jobs, seconds, now - since)

    def share(self, jobs: Sequence[ActiveJob], step_seconds: float, seconds: float) -> None:
        """Write down what two or more jobs of a group gave and took, also in their `credit`.

        seconds        for which it ran, switching not counted
        raises         CreditRefused
        """
        given = {job.name: _given(job, step_seconds) * seconds for job in jobs}
        if any(given.values()):
            self._charge(jobs, given)
        self._repay(jobs, step_seconds, seconds)
        for job in jobs:
            job.credit = self.balance(job.name)

    def _charge(self, jobs: Sequence[ActiveJob], given: Mapping[str, float]) -> None:
        """Each neighbour of a lender takes its share of what the lender gave."""
        for lender in jobs:
            amount = given[lender.name]
            if amount <= 0:
                continue
            others = [job for job in jobs if job.name != lender.name]
            asked = sum(job.request.gpus for job in others)
            self._add(lender.name, amount)
            for job in others:
                self._add(job.name, -amount * job.request.gpus / asked)

    def _repay(self, jobs: Sequence[ActiveJob], step_seconds: float, seconds: float) -> None:
        """Debtors pay creditors that run faster than alone by their help."""
        for creditor in jobs:
            owed = self.balance(creditor.name)
            faster = creditor.solo_seconds / step_seconds - 1
            debts = {job.name: max(0.0, -self.balance(job.name)) for job in jobs}
            most = min(owed, sum(debts.values()))
            if faster <= 0 or most <= 0:
                continue
            paid = min(most, faster * creditor.request.gpus * seconds)
            self._add(creditor.name, -paid)
            whole = sum(debts.values())
            for name, debt in debts.items():
                if debt > 0:
                    self._add(name, paid * debt / whole)

    def _add(self, job: str, amount: float) -> None:
        self._balances[job] = self.balance(job) + amount

    def _concerns(self, job: ActiveJob) -> bool:
        request = job.request
        return request.max_slowdown_opt_in > request.max_slowdown or job.credit != 0.0


def _given(job: ActiveJob, step_seconds: float) -> float:
    """GPU-seconds a second that a job gives up past its bound."""
    request = job.request
    slowdown = step_seconds / job.solo_seconds
    if slowdown <= request.max_slowdown:
        return 0.0
    if request.max_slowdown_opt_in <= request.max_slowdown:
        return 0.0
    if slowdown > request.max_slowdown_opt_in * (1 + 1e3 * ROUNDING):
        raise CreditRefused(
            f"job '{request.name}' did not consent to be slowed down so much",
            expected=f"at most {max(request.max_slowdown_opt_in, request.max_slowdown):.4g} times",
            found=f"{slowdown:.4g} times",
        )
    return request.gpus * (1 - request.max_slowdown / slowdown)
