"""Make LoRA jobs of a trace, by choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.errors import TraceEmpty
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.simulator.choices import Choices, demand_choices
from tlora_fx.simulator.traces import Dropped, Trace, TraceJob

Numbers = NDArray[Any]
#: base, rank, batch, lengths of one step's samples -> Demand
DemandOf = Callable[[str, int, int, Sequence[int]], Demand]


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that are ready to be replayed.

    requests   in order of submission
    jobs       what the trace says of each, by name
    """

    requests: tuple[JobRequest, ...]
    jobs: Mapping[str, TraceJob]
    dropped: Dropped = field(default_factory=Dropped)


def workload_of(
    trace: Trace,
    choices: Choices,
    cluster: Cluster,
    estimator: Estimator,
    demand_of: DemandOf | None = None,
) -> Workload:
    """Make requests of a trace's jobs.

    What a job is (base, rank, batch, lengths) is drawn by its place in the trace, so that it stays
    the same job whatever else is dropped.

    demand_of   base, rank, batch, lengths -> Demand; None: for the bases that are known
    raises      ReplayChoiceWrong, TraceEmpty
    """
    demand_choices(choices)
    dropped = Dropped() if trace.requests is not None else trace.dropped.together(Dropped())
    most = cluster.capacity()
    given = trace.first(choices.jobs) if choices.jobs else trace
    if trace.requests is not None:
        made = _own(given, choices, most, dropped)
    else:
        made = list(_chosen(given, choices, most, estimator, demand_of, dropped))
    if not made:
        raise TraceEmpty(
            "no job of the trace can be replayed",
            trace=trace.source,
            found="\n".join(dropped.lines()),
            help=_what_would_do(dropped, most),
        )
    start = made[0][1].submitted if choices.rebase else 0.0
    requests = tuple(at_time(one, (one.submitted - start) / choices.scale) for _, one in made)
    return Workload(requests, {job.name: job for job, _ in made}, dropped)


def _what_would_do(dropped: Dropped, most: int) -> str:
    """What to do where every job was left out."""
    if any("larger than the cluster" in line for line in dropped.lines()):
        return f"the cluster has {most} GPUs; --gpus asks for more"
    return "choose other --states or --types, or mend the rows that are left out"


def at_time(request: JobRequest, submitted: float) -> JobRequest:
    """The same job at another time; its deadline is as far behind its submission as it was."""
    deadline = request.deadline
    if deadline is not None:
        deadline += submitted - request.submitted
    return replace(request, submitted=submitted, deadline=deadline)


def _own(
    trace: Trace, choices: Choices, most: int, dropped: Dropped
) -> list[tuple[TraceJob, JobRequest]]:
    assert trace.requests is not None
    made = []
    for job in trace.jobs:
        request = trace.requests[job.name]
        gpus = _gpus(job, choices, most, dropped)
        if gpus:
            made.append((job, replace(request, gpus=gpus)))
    return made


def _gpus(job: TraceJob, choices: Choices, most: int, dropped: Dropped) -> int:
    """The GPUs that a job gets to ask for; 0 where it is left out, which is counted."""
    if choices.types and job.type not in choices.types:
        return _out(dropped, f"a type that is not asked for: {job.type}", job)
    if choices.states and job.state not in choices.states:
        return _out(dropped, f"a state that is not asked for: {job.state or 'none'}", job)
    if job.gpus == 0:
        return 1 if choices.cpu_jobs == "one-gpu" else _out(dropped, "asks for no GPU", job)
    if job.gpus > most:
        if choices.too_large == "clip":
            return most
        return _out(dropped, f"larger than the cluster of {most} GPUs", job)
    return job.gpus


def _out(dropped: Dropped, reason: str, job: TraceJob) -> int:
    dropped.add(reason, f"job {job.name}", rule=True)
    return 0


def _chosen(
    trace: Trace,
    choices: Choices,
    most: int,
    estimator: Estimator,
    demand_of: DemandOf | None,
    dropped: Dropped,
) -> list[tuple[TraceJob, JobRequest]]:
    count = len(trace.jobs)
    random = np.random.default_rng([choices.seed, count])
    bases = random.integers(len(choices.bases), size=count).tolist()
    ranks = random.integers(len(choices.ranks), size=count).tolist()
    batches = random.integers(len(choices.batches), size=count).tolist()
    demands = Demands(choices, demand_of or known_demand, random)
    known: dict[tuple[str, int, int], tuple[float, Demand]] = {}
    made = []
    for place, job in enumerate(trace.jobs):
        gpus = _gpus(job, choices, most, dropped)
        if not gpus:
            continue
        base, rank = choices.bases[bases[place]], choices.ranks[ranks[place]]
        batch = batch_by_gpus(choices.batches, gpus)
        if choices.batch_rule == "independent":
            batch = choices.batches[batches[place]]
        demand, longest = demands.of(base, rank, batch)
        # Hashing a demand takes longer than all else here; its identity will do.
        key = (base, id(demand), gpus)
        if key not in known:
            known[key] = (estimator.solo(base, demand, gpus), demand)
        solo = known[key][0]
        if not math.isfinite(solo):
            dropped.add("does not fit into the memory of its GPUs", f"job {job.name}", rule=True)
            continue
        steps = choices.steps or max(1, round(job.duration_seconds / solo))
        request = JobRequest(
            job.name,
            base,
            demand,
            gpus,
            steps,
            job.submitted,
            choices.max_slowdown,
            longest=longest,
        )
        made.append((job, request))
    return made


def batch_by_gpus(batches: Sequence[int], gpus: int) -> int:
    """The largest batch that is not above a job's GPUs; else the smallest."""
    return max((batch for batch in batches if batch <= gpus), default=min(batches))


def known_demand(base: str, rank: int, batch: int, lengths: Sequence[int]) -> Demand:
    """The demand of a base that is known by its short name."""
    from tlora_fx.scheduler.bases import demand_of

    return demand_of(base, rank, batch, lengths)


class Demands:
    """Demands of jobs, with the lengths of their samples."""

    def __init__(self, choices: Choices, demand_of: DemandOf, random: np.random.Generator) -> None:
        self.choices = choices
        self.demand_of = demand_of
        self.random = random
        self.typical: dict[tuple[str, int, int], tuple[Demand, int]] = {}

    def of(self, base: str, rank: int, batch: int) -> tuple[Demand, int]:
        """The demand of one step, and the tokens of its longest sample."""
        if self.choices.lengths == "drawn":
            return self._made(base, rank, batch, self._lengths(self.random.random(batch)))
        key = (base, rank, batch)
        if key not in self.typical:
            quantiles = (np.arange(batch) + 0.5) / batch
            self.typical[key] = self._made(*key, self._lengths(quantiles, exact_mean=True))
        return self.typical[key]

    def _made(self, base: str, rank: int, batch: int, lengths: list[int]) -> tuple[Demand, int]:
        return self.demand_of(base, rank, batch, lengths), max(lengths)

    def _lengths(self, quantiles: Numbers, *, exact_mean: bool = False) -> list[int]:
        mean, spread = self.choices.mean_tokens, self.choices.spread
        normal = NormalDist()
        logs = np.array([normal.inv_cdf(min(max(q, 1e-9), 1 - 1e-9)) for q in quantiles])
        values = mean * np.exp(spread * logs - spread**2 / 2)
        if exact_mean:
            values *= mean / values.mean()
        return [round(v) for v in np.clip(values, 2, self.choices.most_tokens)]
