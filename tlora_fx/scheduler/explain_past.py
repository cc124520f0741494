"""What became of a job, and why: also of one that has ended, was refused, or was never looked at.

What is decided now is asked of the policy; what was decided before is read from the ledger, and its
alternatives are weighed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.errors import BaseUnknown, JobNotInState, nearest
from tlora_fx.scheduler.estimator_explain import table_of
from tlora_fx.scheduler.explain import explain
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.history import Decided, History
from tlora_fx.scheduler.ledger_rows import EpochRecord, JobRecord
from tlora_fx.scheduler.moment_file import Moment
from tlora_fx.scheduler.placement import tier_for
from tlora_fx.scheduler.state import ActiveJob, Decision, State
from tlora_fx.scheduler.synthetic import SyntheticEstimator


def explained(
    moment: Moment | None, history: History | None, job: str, *, terms: bool = False
) -> str:
    """All that a state and a ledger tell of a job.

    moment    the newest state of the run; None: nothing was decided yet
    history   of the run; None: nobody has it
    terms     tell what the step of its group, or of the job alone where it waits, is made of
    raises    JobNotInState
    """
    record = history.jobs.get(job) if history else None
    active = moment.state.jobs if moment else {}
    ended = record is not None and record.status not in ("queued", "running")
    if record is None and job not in active:
        raise _unknown(job, [*active, *(history.jobs if history else {})])
    lines: list[str] = []
    if moment is not None and job in active and not ended:
        lines += _now(moment, history, job, terms=terms)
    elif record is not None:
        lines += _standing(record, history.last(job) if history else None)
        lines += _before(moment, history, job, terms=terms)
    if record is not None and history is not None:
        lines += _told(record, history.formations(job))
    return "\n".join(lines)


def _unknown(job: str, known: list[str]) -> JobNotInState:
    names = list(dict.fromkeys(known))
    near = nearest(job, names)
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return JobNotInState(
        f"there is no job '{job}'",
        expected=f"{', '.join(names[:12])}{more}" or "no jobs",
        help=f"did you mean '{near}'?" if near else "name a job of the run",
    )


def _now(moment: Moment, history: History | None, job: str, *, terms: bool) -> Iterator[str]:
    """Of an active job: what was decided last, with the policy's reasons."""
    again = moment.policy.decide(moment.state, explain=True)
    decided = (history.at(moment.state.now) if history else None) or again
    if _alike(decided, again, job):
        decided = replace(decided, reasons=again.reasons)
        yield str(explain(moment.state, decided, job))
    else:
        yield str(explain(moment.state, decided, job))
        other = explain(moment.state, again, job)
        yield f"  asked again without its past, the policy would answer: {other.standing}"
    if terms:
        yield from _terms(moment.state, decided, job)


def _terms(state: State, decision: Decision, job: str) -> Iterator[str]:
    """What a step is made of, by the estimator."""
    group = _group(decision, job)
    names = group.jobs if group else (job,)
    requests = [state.jobs[name].request for name in names]
    gpus = group.gpus if group else requests[0].gpus
    tier = state.cluster.tier(group.place) if group else tier_for(state.cluster, gpus)
    demand = Demand.total(request.demand for request in requests)
    found = state.estimator.explain(requests[0].base, demand, gpus, tier)
    yield f"  a step of {', '.join(names)} on {gpus} GPU{'s' * (gpus > 1)}:"
    yield from (f"    {line}" for line in table_of(found).splitlines())


def _alike(one: Decision, other: Decision, job: str) -> bool:
    """Whether two decisions say the same of a job."""
    own, others = (_group(decision, job) for decision in (one, other))
    return own is others is None or (own is not None and others is not None and own.same_as(others))


def _group(decision: Decision, job: str) -> Group | None:
    return next((group for group in decision.groups if job in group.jobs), None)


def _standing(record: JobRecord, last: Decided | None) -> Iterator[str]:
    """Of a job about which nothing is to be decided, or nothing was yet."""
    match record.status:
        case "done":
            yield f"{record.name}: done after {record.steps:g} steps"
        case "queued" | "running" if last is None:
            yield f"{record.name}: waits, and no decision has seen it yet"
        case "queued" | "running":
            yield f"{record.name}: {record.status}, and the last decision did not see it"
        case _:
            reason = record.reason.replace("\n", "\n  ")
            yield f"{record.name}: {record.status}: {reason}"


def _before(
    moment: Moment | None, history: History | None, job: str, *, terms: bool
) -> Iterator[str]:
    """The last decision about a job, and what else there was then."""
    last = history.last(job) if history else None
    if last is None or moment is None or history is None:
        return
    try:
        state = _as_it_was(moment.state, history, last)
        told = str(explain(state, last.decision, job))
    except BaseUnknown as error:
        yield f"  decided at {last.time:.1f} s; what else there was cannot be told: {error.what}"
        return
    first, *rows = told.splitlines()
    yield f"  decided at {last.time:.1f} s: {first.removeprefix(f'{job}: ')}"
    if state.cluster != moment.state.cluster:
        left = moment.state.cluster.capacity()
        verb = "is" if left == 1 else "are"
        yield (
            f"  on {_gpus(state.cluster)}, of which {left} {verb} left now: what else "
            "there was is told for all of them"
        )
    yield from rows
    if terms:
        yield from _terms(state, last.decision, job)


def _as_it_was(state: State, history: History, decided: Decided) -> State:
    """The moment of an earlier decision.

    How far jobs were then is not known, so their deadlines are left out of it. Nor is the cluster:
    where GPUs of the decision have gone since, all that it used are taken to have been there.

    raises   BaseUnknown
    """
    state = _with_room(state, decided.decision)
    jobs = {}
    for name in decided.jobs:
        request = replace(history.jobs[name].request, deadline=None)
        solo = state.estimator.solo(request.base, request.demand, request.gpus)
        jobs[name] = ActiveJob(request, solo)
    return replace(state, now=decided.time, jobs=jobs, groups=())


def _with_room(state: State, decision: Decision) -> State:
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
    if isinstance(estimator, ProfileEstimator | SyntheticEstimator):
        estimator = replace(estimator, cluster=wider)
    return replace(state, cluster=wider, estimator=estimator)


def _gpus(cluster: Cluster) -> str:
    return f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)}"


def _told(record: JobRecord, formations: list[EpochRecord]) -> Iterator[str]:
    """Its times and groups."""
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
