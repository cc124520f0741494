"""Explain why a job is grouped as it is, and what each alternative would have cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from tlora_fx.cost.estimator import ProfileEstimator, table_of
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.errors import BaseUnknown, JobNotInState, did_you_mean, first_of
from tlora_fx.inspect.wording import plural
from tlora_fx.scheduler.formations import membership
from tlora_fx.scheduler.history import DecisionRecord, EpochRecord, History, JobRecord
from tlora_fx.scheduler.search.objective import tier_for
from tlora_fx.scheduler.search.placement import Placer
from tlora_fx.scheduler.snapshot_file import Snapshot
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    Decision,
    Group,
    Reason,
    SchedulerState,
    decision_of,
    limit_seconds,
    slowdown,
)
from tlora_fx.scheduler.store import LEFT_WAITING, WAITS_FOR_FILES

MAX_ROWS = 24


@dataclass(frozen=True, slots=True)
class Alternative:
    """Alternative way in which the job could run.

    what           "as decided", "alone", "with ...", "without ..."
    slowdowns      slowdown of each job of the group, over the job alone
    gain           gain of weighted speed-up over the decision; None for the decision itself
    """

    what: str
    jobs: tuple[str, ...]
    gpus: int
    seconds: float
    memory_bytes: float
    slowdowns: tuple[float, ...]
    gain: float | None
    why_not: str


@dataclass(frozen=True, slots=True)
class DecisionExplanation:
    """Explanation of one job in one snapshot.

    unit   what a group holds: "GPU" or "CPU"
    """

    job: str
    standing: str
    alternatives: tuple[Alternative, ...]
    left_out: int
    reasons: tuple[Reason, ...]
    unit: str = "GPU"

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table."""
        return [_cells(alternative) for alternative in self.alternatives]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.job}: {self.standing}"
        head = ("alternative", f"{self.unit}s", *HEAD)
        rows = [head, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                cell.ljust(width) if name in LEFT else cell.rjust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ]
            yield ("  " + "  ".join(cells)).rstrip()
        yield from self._ending()

    def text(self, *, narrow: bool) -> str:
        """The same as `str`; narrow: with a few short lines for each row of the table."""
        return "\n".join(self._narrow_lines() if narrow else self._lines())

    def _narrow_lines(self) -> Iterator[str]:
        yield f"{self.job}: {self.standing}"
        for what, count, *cells, why_not in self.rows():
            yield f"  {what}"
            told = [
                f"{name} {cell}" for name, cell in zip(HEAD, cells, strict=False) if cell != "-"
            ]
            units = f"{count} {self.unit}{'s' * (count != '1')}"
            yield f"    {', '.join([units, *told])}"
            if why_not:
                yield f"    why not: {why_not}"
        yield from self._ending()

    def _ending(self) -> Iterator[str]:
        if self.left_out:
            yield f"  and {self.left_out} more that gain less"
        for reason in self.reasons:
            yield f"  {_told(reason)}"


HEAD = ("step", "memory", "slowdown", "worst", "gain", "why not")
LEFT = frozenset({"alternative", "why not"})


def explain(state: SchedulerState, decision: Decision, job: str) -> DecisionExplanation:
    """Explain a job's place in a decision, by fresh evaluations and the policy's reasons.

    decision   decision on this state; with reasons where the policy was asked to record them
    raises     JobNotInState
    """
    if job not in state.jobs:
        raise JobNotInState(
            f"job '{job}' is not active",
            expected=", ".join(list(state.jobs)[:12]),
            help=did_you_mean(job, state.jobs, "name an active job"),
        )
    group = _group(decision, job)
    weigher = _Weigher(state, decision, job, group)
    reasons = tuple(reason for reason in decision.reasons if reason.job == job)
    ranked = sorted(weigher.others(), key=lambda row: (bool(row.why_not), -(row.gain or 0.0)))
    shown = ranked[:MAX_ROWS]
    first = (weigher.decided(group),) if group else ()
    left_out = len(ranked) - len(shown)
    standing = _standing(decision, job, group, state.cluster)
    return DecisionExplanation(
        job, standing, (*first, *shown), left_out, reasons, state.cluster.unit
    )


def _standing(decision: Decision, job: str, group: Group | None, cluster: Cluster) -> str:
    if group is None:
        waiting = list(decision.waiting)
        position = f", number {waiting.index(job) + 1} of {len(waiting)}" if job in waiting else ""
        return f"waits{position}"
    others = [name for name in group.jobs if name != job]
    gpus = cluster.counted(group.gpus)
    return f"on {gpus} with {', '.join(others)}" if others else f"alone on {gpus}"


class _Weigher:
    """Evaluates the alternatives of one job."""

    def __init__(
        self, state: SchedulerState, decision: Decision, job: str, group: Group | None
    ) -> None:
        self.state, self.decision, self.job, self.own = state, decision, job, group
        self._base = state.jobs[job].request.base
        self._free: Placer | None = None

    def decided(self, group: Group) -> Alternative:
        rest = tuple(name for name in group.jobs if name != self.job)
        return self._weigh("as decided", (self.job, *rest), group.gpus, None)

    def others(self) -> Iterator[Alternative]:
        """All groups that the job could be in instead, and what its group is without each."""
        request, own = self.state.jobs[self.job].request, self.own
        rest = tuple(name for name in own.jobs if name != self.job) if own else ()
        before = self._worth(own) if own else 0.0
        # What is left of its group goes on with no more GPUs than there are for it now.
        kept = min(self._asked(rest), own.gpus) if own else 0
        left = self._apart_worth(rest, kept)
        self._free = self._placer_without(own)
        if rest or own is None:
            yield self._weigh("alone", (self.job,), request.gpus, before - left, rest, kept)
        for group in self.decision.groups:
            if group is not own and self._shares(group.jobs[0]):
                jobs, base = (self.job, *group.jobs), before - left + self._worth(group)
                self._free = self._placer_without(own, group)
                gpus = self._fitting(group.gpus + request.gpus, group.gpus, kept)
                yield self._weigh(f"with {', '.join(group.jobs)}", jobs, gpus, base, rest, kept)
        self._free = self._placer_without(own)
        for name in self.decision.waiting:
            if name != self.job and self._shares(name):
                jobs, more = (self.job, *rest, name), self._asked((name,))
                least = own.gpus if own else request.gpus
                gpus = self._fitting(least + more, least, 0)
                yield self._weigh(f"and {name}, which waits", jobs, gpus, before)
        for name in rest if own and len(rest) > 1 else ():
            jobs = (self.job, *(other for other in rest if other != name))
            more = self._asked((name,))
            base = before - self._apart_worth((name,), more)
            gpus = min(self._asked(jobs), own.gpus if own else 0)
            yield self._weigh(f"without {name}", jobs, gpus, base, (name,), more)

    def _fitting(self, wanted: int, least: int, beside: int) -> int:
        """The GPUs of a larger group: all that its jobs asked for, or those that one had before."""
        return wanted if self._finds(wanted, beside) or not self._finds(least, beside) else least

    def _finds(self, gpus: int, beside: int) -> bool:
        """Whether there are places for a group and for what it leaves behind."""
        if self._free is None:
            return True
        place = self._free.find(gpus)
        if place is None:
            return False
        self._free.take(place)
        fits = not beside or self._free.find(beside) is not None
        self._free.give(place)
        return fits

    def _placer_without(self, *leaving: Group | None) -> Placer:
        """The GPUs that are free once some groups have left theirs."""
        placer = Placer(self.state.cluster)
        for group in self.decision.groups:
            if group not in leaving:
                placer.take(group.place)
        return placer

    def _shares(self, other: str) -> bool:
        return self.state.jobs[other].request.base == self._base

    def _asked(self, jobs: Sequence[str]) -> int:
        return sum(self.state.jobs[name].request.gpus for name in jobs)

    def _worth(self, group: Group) -> float:
        total = sum(self.state.jobs[name].solo_seconds for name in group.jobs)
        return total / group.seconds if group.seconds > 0 else 0.0

    def _apart_worth(self, jobs: Sequence[str], gpus: int) -> float:
        """Of some jobs as a group of their own."""
        if not jobs:
            return 0.0
        alternative = self._weigh("", tuple(jobs), gpus, None)
        total = sum(self.state.jobs[name].solo_seconds for name in jobs)
        return total / alternative.seconds if isfinite(alternative.seconds) else 0.0

    def _weigh(
        self,
        what: str,
        jobs: tuple[str, ...],
        gpus: int,
        before: float | None,
        leaves: Sequence[str] = (),
        beside: int = 0,
    ) -> Alternative:
        """One alternative."""
        members = [self.state.jobs[name] for name in jobs]
        demand = Demand.total(job.request.demand for job in members)
        tier = tier_for(self.state.cluster, gpus)
        prediction = self.state.estimator.explain(members[0].request.base, demand, gpus, tier)
        fits = prediction.layout is not None and isfinite(prediction.seconds)
        seconds = prediction.seconds if fits else inf
        gain = None
        if before is not None and fits:
            gain = sum(job.solo_seconds for job in members) / seconds - before
        why_not = self._why_not(members, gpus, seconds, prediction.why_not)
        if not why_not and leaves and not self._finds(gpus, beside):
            why_not = f"no place is left for {', '.join(leaves)}"
        slow = tuple(slowdown(job, seconds) for job in members)
        return Alternative(what, jobs, gpus, seconds, prediction.memory_bytes, slow, gain, why_not)

    def _why_not(
        self, members: Sequence[ActiveJob], gpus: int, seconds: float, why_not: str
    ) -> str:
        capacity = self.state.cluster.capacity()
        if gpus > capacity:
            verb = "is" if capacity == 1 else "are"
            return f"there {verb} {self.state.cluster.counted(capacity)}"
        if not isfinite(seconds):
            return why_not or "nothing fits into memory"
        for job in members if len(members) > 1 else ():
            limit = limit_seconds(job, self.state.now, lending=True)
            if seconds > limit * (1 + ROUNDING):
                return f"{job.name} allows at most {limit / job.solo_seconds:.2f}"
        if self._free is not None and self._free.find(gpus) is None:
            return f"no place has so many {self.state.cluster.unit}s free"
        return ""


def _cells(alternative: Alternative) -> tuple[str, ...]:
    fits = isfinite(alternative.seconds)
    worst = max(range(len(alternative.jobs)), key=lambda index: alternative.slowdowns[index])
    return (
        alternative.what,
        str(alternative.gpus),
        f"{alternative.seconds * 1e3:.1f} ms" if fits else "-",
        _bytes(alternative.memory_bytes) if fits else "-",
        f"{alternative.slowdowns[0]:.2f}" if fits else "-",
        f"{alternative.slowdowns[worst]:.2f} {alternative.jobs[worst]}"
        if fits and len(alternative.jobs) > 1
        else "-",
        "-" if alternative.gain is None else f"{alternative.gain:+.3f}",
        alternative.why_not,
    )


def _told(reason: Reason) -> str:
    others = f" with {', '.join(reason.others)}" if reason.others else ""
    gain = "" if reason.gain is None else f", gain {reason.gain:+.3f}"
    detail = f" ({reason.detail})" if reason.detail else ""
    return f"{reason.verdict}{others}{gain}{detail}"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def explained(
    snapshot: Snapshot | None,
    history: History | None,
    job: str,
    *,
    terms: bool = False,
    narrow: bool = False,
) -> str:
    """Explanation of a job by a state and a ledger.

    What is decided now is asked of the policy; what was decided before is read from the ledger, and
    its alternatives are weighed anew.

    snapshot  the newest state of the run; None: nothing was decided yet
    history   history of the run; None where there is none
    terms     tell what the step of its group, or of the job alone where it waits, is made of
    narrow    tell alternatives by short lines, not by a wide table
    raises    JobNotInState; DecisionWrong for a policy that fails
    """
    history = history or History({})
    record = history.jobs.get(job)
    active = snapshot.state.jobs if snapshot else {}
    # What was decided of one that cannot go on is past.
    out = (LEFT_WAITING, WAITS_FOR_FILES)
    decided = record is None or (record.is_active and not record.reason.startswith(out))
    if record is None and job not in active:
        raise _unknown(job, [*active, *history.jobs])
    lines: list[str] = []
    if snapshot is not None and job in active and decided:
        lines += _now(snapshot, history, job, terms=terms, narrow=narrow)
    elif record is not None:
        lines += _ending(record, history.last(job))
        lines += _before(snapshot, history, job, terms=terms, narrow=narrow)
    if record is not None:
        lines += _times(record, history.formations(job))
    return "\n".join(lines)


def _unknown(job: str, known: list[str]) -> JobNotInState:
    names = list(dict.fromkeys(known))
    return JobNotInState(
        f"there is no job '{job}'",
        expected=first_of(names, 12) or "no jobs",
        help=did_you_mean(job, names, "name a job of the run"),
    )


def _now(
    snapshot: Snapshot, history: History, job: str, *, terms: bool, narrow: bool
) -> Iterator[str]:
    again = decision_of(snapshot.policy, snapshot.state, explain=True)
    decided = history.at(snapshot.state.now) or again
    alike = _alike(decided, again, job)
    if alike:
        decided = replace(decided, reasons=again.reasons)
    yield explain(snapshot.state, decided, job).text(narrow=narrow)
    if not alike:
        other = explain(snapshot.state, again, job)
        yield f"  asked again without its past, the policy would answer: {other.standing}"
    if terms:
        yield from _terms(snapshot.state, decided, job)


def _terms(state: SchedulerState, decision: Decision, job: str) -> Iterator[str]:
    """What a step is made of, by the estimator."""
    group = _group(decision, job)
    names = group.jobs if group else (job,)
    requests = [state.jobs[name].request for name in names]
    gpus = group.gpus if group else requests[0].gpus
    tier = state.cluster.tier(group.place) if group else tier_for(state.cluster, gpus)
    demand = Demand.total(request.demand for request in requests)
    prediction = state.estimator.explain(requests[0].base, demand, gpus, tier)
    yield f"  a step of {', '.join(names)} on {state.cluster.counted(gpus)}:"
    yield from (f"    {line}" for line in table_of(prediction).splitlines())


def _alike(decision: Decision, other: Decision, job: str) -> bool:
    group, other_group = _group(decision, job), _group(other, job)
    if group is None or other_group is None:
        return group is other_group
    return membership(group) == membership(other_group)


def _group(decision: Decision, job: str) -> Group | None:
    return next((group for group in decision.groups if job in group.jobs), None)


def _ending(record: JobRecord, last: DecisionRecord | None) -> Iterator[str]:
    """Of a job about which nothing is to be decided, or nothing was yet."""
    match record.status:
        case "done":
            reason = f", {record.reason}" if record.reason else ""
            yield f"{record.name}: done after {plural(round(record.steps), 'step')}{reason}"
        case "queued" | "running" if record.reason:
            reason = record.reason.replace("\n", "\n  ")
            yield f"{record.name}: {reason}"
        case "queued" | "running" if last is None:
            yield f"{record.name}: waits, and no decision has seen it yet"
        case "queued" | "running":
            yield f"{record.name}: {record.status}, and the last decision did not see it"
        case _:
            reason = record.reason.replace("\n", "\n  ")
            yield f"{record.name}: {record.status}: {reason}"


def _before(
    snapshot: Snapshot | None, history: History, job: str, *, terms: bool, narrow: bool
) -> Iterator[str]:
    """The last decision about a job, and what else there was then."""
    last = history.last(job)
    if last is None or snapshot is None:
        return
    removed = [name for name in last.jobs if name not in history.jobs]
    if removed:
        yield f"  decided at {last.time:.1f} s; what else there was is not known: jobs were removed"
        return
    try:
        state = _as_it_was(snapshot.state, history, last)
        text = explain(state, last.decision, job).text(narrow=narrow)
    except BaseUnknown as error:
        yield f"  decided at {last.time:.1f} s; what else there was cannot be told: {error.what}"
        return
    first, *rows = text.splitlines()
    yield f"  decided at {last.time:.1f} s: {first.removeprefix(f'{job}: ')}"
    if state.cluster != snapshot.state.cluster:
        left = snapshot.state.cluster.capacity()
        verb = "is" if left == 1 else "are"
        yield (
            f"  on {state.cluster.counted(state.cluster.gpus)}, of which {left} {verb} left now: "
            "what else there was is told for all of them"
        )
    yield from rows
    if terms:
        yield from _terms(state, last.decision, job)


def _as_it_was(state: SchedulerState, history: History, decided: DecisionRecord) -> SchedulerState:
    """The snapshot of an earlier decision.

    How far jobs were then is not known, so their deadlines are left out of it. Nor is the cluster:
    where GPUs of the decision have gone since, all that it used are taken to have been there.

    raises   BaseUnknown
    """
    state = _with_freed_gpus(state, decided.decision)
    jobs = {}
    for name in decided.jobs:
        request = replace(history.jobs[name].request, deadline=None)
        solo = state.estimator.solo(request.base, request.demand, request.gpus)
        jobs[name] = ActiveJob(request, solo)
    return replace(state, now=decided.time, jobs=jobs, groups=())


def _with_freed_gpus(state: SchedulerState, decision: Decision) -> SchedulerState:
    """A state whose cluster has all GPUs of a decision; its own where those are there."""
    cluster = state.cluster
    used = {gpu for group in decision.groups for gpu in group.place}
    if used <= set(cluster.present()):
        return state
    gpus = max(cluster.gpus, *(gpu + 1 for gpu in used))
    # The slots of a run are one node, however many it is given.
    node = gpus if cluster.gpus == cluster.gpus_per_node else cluster.gpus_per_node
    wider = replace(cluster, gpus=gpus, gpus_per_node=node, lost=frozenset())
    estimator = state.estimator
    if isinstance(estimator, ProfileEstimator):
        estimator = replace(estimator, cluster=wider)
    return replace(state, cluster=wider, estimator=estimator)


def _times(record: JobRecord, formations: list[EpochRecord]) -> Iterator[str]:
    request = record.request
    yield f"  submitted at {request.submitted:.1f} s"
    if record.first_started is not None:
        queued = record.first_started - request.submitted
        yield f"  first in a group at {record.first_started:.1f} s, {queued:.1f} s later"
    for epoch in formations:
        others = ", ".join(name for name in epoch.jobs if name != record.name)
        end = "" if epoch.ended is None else f" to {epoch.ended:.1f} s"
        how = f", {epoch.how.splitlines()[0]}" if epoch.how else ""
        gpus = ",".join(map(str, epoch.place))
        yield (
            f"  group {epoch.epoch} on {gpus} {f'with {others}' if others else 'alone'}: "
            f"from {epoch.launched:.1f} s{end}, {epoch.seconds * 1e3:.1f} ms a step expected{how}"
        )
    if record.steps and record.status not in ("done", "refused"):
        yield f"  {record.steps:g} of {request.steps} steps are committed"
    if record.credit:
        yield f"  credit {record.credit:+.1f} GPU-seconds"
    if record.ended is not None:
        yield f"  ended at {record.ended:.1f} s"
