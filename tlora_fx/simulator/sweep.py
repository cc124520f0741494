"""Many replays: each policy, seed and variation of the load, in several processes.

A `Scenario` is one replay in plain values, so that it travels to another process and so that two
figures that need the same replay share it.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
)
from pydantic.dataclasses import dataclass as validated

from tlora_fx.config.validation import check
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand, demand_of
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.errors import ProfileMismatch, ReplayChoiceWrong, TooManyForOracle, TraceEmpty
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.policies.oracle import MAX_JOBS
from tlora_fx.scheduler.state import MAX_SLOWDOWN, ChangeCosts, JobRequest
from tlora_fx.simulator.metrics import Interval, JobTable, Summary
from tlora_fx.simulator.replay import OPTIONS, ReplayResult, replay
from tlora_fx.simulator.synthetic import (
    MAX_ARRIVAL_CHANGE,
    Draw,
    fit_of_file,
    generate,
    shipped_fit,
)
from tlora_fx.simulator.traces import Dropped, Trace, TraceJob, described, read_trace


def option(default: Any, text: str, *, none: str = "all", unit: str = "", **limits: Any) -> Any:
    """A field that is an option of `tlora-fx simulate` too.

    none     what it stands for where nothing is named
    unit     of its value, in reports
    """
    shown: dict[str, Any] = {"none": none, "unit": unit}
    return Field(default, description=text, json_schema_extra=shown, kw_only=True, **limits)


def words(text: str) -> list[str]:
    """The parts between commas; "all" is none."""
    return [] if text == "all" else [word.strip() for word in text.split(",") if word.strip()]


def _listed(value: object) -> object:
    return words(value) if isinstance(value, str) else value


def _upper(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.upper() for word in words)


Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Counts = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed)]


@validated(frozen=True)
class JobSource:
    """Source of the jobs; `jobs` is their number in a synthetic trace."""

    trace: str = option("synthetic", "trace file to replay, or 'synthetic' to draw a trace")
    format: str | None = option(
        None,
        "format of the trace file: acme, pollux, kalos, or own, which --save-trace writes; if not "
        "given, recognised by the columns of the file",
    )
    bad_rows: Literal["drop", "refuse"] = option(
        "drop",
        "invalid rows of the trace: drop and count them, or refuse the trace",
    )
    jobs: int = 1000
    intensity: float = option(
        1.0,
        "arrival rate of a synthetic trace, as a multiple of AcmeTrace's mean rate; "
        f"{1 / MAX_ARRIVAL_CHANGE:g} to {MAX_ARRIVAL_CHANGE:g}",
    )
    burstiness: float = option(
        1.0,
        "coefficient of variation of a synthetic trace's inter-arrival times, "
        f"{1 / MAX_ARRIVAL_CHANGE:g} to {MAX_ARRIVAL_CHANGE:g}; 1 is Poisson",
    )
    marginals: Path | None = option(
        None,
        "JSON file of the distributions that a synthetic trace is drawn from; if not given, "
        "those of AcmeTrace's cluster Seren",
    )

    @property
    def synthetic(self) -> bool:
        """Whether the trace is drawn."""
        return self.trace == SYNTHETIC


@validated(frozen=True)
class Choices:
    """Choices that turn a trace into jobs; the defaults are the field notes'.

    source  field notes, "Replaying AcmeTrace"; tLoRA, section 4.1
    """

    jobs: int | None = option(
        None,
        "number of jobs to replay, from the start of the trace; if not given, all jobs of a file, "
        "or 1,000 of a synthetic trace",
        ge=1,
    )
    scale: float = option(1.0, "divide inter-arrival times by this factor", gt=0)
    rebase: bool = option(True, "shift submit times so that the first job is submitted at second 0")
    states: Annotated[Words, AfterValidator(_upper)] = option(
        (), "replay only jobs that ended in these states, such as COMPLETED"
    )
    types: Words = option((), "replay only jobs of these types, such as SFT,Eval")
    cpu_jobs: Literal["drop", "one-gpu"] = option(
        "drop", "jobs that ask for no GPU: drop them, or give each one GPU"
    )
    too_large: Literal["drop", "clip"] = option(
        "drop",
        "jobs that ask for more GPUs than the cluster has: drop them, or give them all of its GPUs",
    )
    steps: int | None = option(
        None,
        "optimizer steps of every job; if not given, so many that the job, running alone, takes as "
        "long as in the trace",
        none="max(1, round(duration / T_solo))",
        ge=1,
    )
    bases: Words = option(
        ("llama-3-8b", "qwen3-8b"),
        "base models, of which each job gets one at random",
        min_length=1,
    )
    ranks: Counts = option(
        (2, 4, 8, 16), "LoRA ranks, of which each job gets one at random", min_length=1
    )
    batches: Counts = option(
        (1, 2, 4, 8),
        "batch sizes, in sequences per step, of which each job gets one by --batch-rule",
        min_length=1,
    )
    batch_rule: Literal["independent", "gpus"] = option(
        "independent",
        "how a job gets its batch size: at random (independent), or the largest one that is not "
        "above the job's number of GPUs (gpus); the paper does not say which it uses",
    )
    mean_tokens: float = option(
        130.0, "mean length of a sample, in tokens; GSM8K's is about 130", ge=2
    )
    spread: float = option(
        0.387, "standard deviation of the logarithm of a sample's length in tokens", ge=0
    )
    max_tokens: int = option(422, "longest sample, in tokens; GSM8K's has 422", ge=2)
    lengths: Literal["typical", "drawn"] = option(
        "typical",
        "sample lengths: the same quantiles of the distribution for all jobs of one batch size "
        "(typical), or drawn for each job (drawn)",
    )
    max_slowdown: float = option(
        MAX_SLOWDOWN,
        "how many times slower than alone a job may become when it shares GPUs with others",
        ge=1,
    )
    seed: int = 0

    @check("max_tokens")
    def _no_less_than_the_mean(cls, most: int, info: ValidationInfo) -> None:
        if most < info.data.get("mean_tokens", 0):
            raise ValueError("no less than the mean")


@validated(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of the scheduler in replays."""

    month: int | None = option(None, "month of the trace to replay, counted from 1", ge=1)
    runnable: int = option(
        128, "number of unfinished jobs that the policy chooses from; later jobs wait", ge=1
    )
    horizon: float = option(
        60.0,
        "time between scheduling decisions: seconds, or with a unit, such as 5m",
        unit=" s",
        gt=0,
    )
    switch_seconds: float = option(
        20.0, "seconds that a group of jobs makes no progress when it is formed", unit=" s", ge=0
    )
    change_seconds: float | None = option(
        None,
        "seconds that a running group makes no progress when a job joins or leaves it; a move to "
        "another group takes twice as long. If not given, each change forms the group anew",
        none="none", unit=" s", ge=0,
    )  # fmt: skip
    allow_estimated: bool = option(False, "allow profiles that were scaled from other hardware")


@validated(frozen=True)
class ClusterOptions:
    """The GPUs that there are."""

    gpus: int = option(128, "number of GPUs in the cluster", ge=1)
    gpu: str = option("h200", "kind of GPU in the cluster, such as h200")
    gpus_per_node: int = option(8, "GPUs per node", ge=1)
    nodes_per_rack: int = option(4, "nodes per rack", ge=1)


@validated(frozen=True)
class SweepOptions:
    """Options of what is compared."""

    policies: str = option(
        "all",
        "policies to compare: all; parts (tlora, tlora with one of its parts off at a time, and "
        "megatron); or names, such as tlora,tlora-paper,megatron:backfill=true",
    )
    seeds: int = option(5, "number of seeds; each policy is replayed once with each seed", ge=1)
    seed: int = option(0, "first seed", ge=0)
    sweeps: str = option(
        "none",
        "what to vary in further replays: all, none, or some of scale (arrival rate), cluster "
        "(number of GPUs), months (of the trace), nano (number of nano-batches)",
    )
    sweep_seeds: int = option(1, "number of seeds for each point of a sweep", ge=1)
    cluster_sizes: Counts = option(
        (32, 64, 128, 256), "cluster sizes that the cluster sweep replays, in GPUs"
    )


Options = TypeVar("Options")


def checked(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Options of one kind, by their names; None is the default. Raises ReplayChoiceWrong."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    try:
        return kind(**{name: values[name] for name in fields if values.get(name) is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ReplayChoiceWrong(
            f"--{str(first['loc'][0]).replace('_', '-')} makes no sense",
            expected=first["msg"].removeprefix("Input should be "),
            found=first["input"],
        ) from None


def option_rows(kind: Any, values: object) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each option of a kind; `values` has them as attributes."""
    return [
        (name.replace("_", "-"), _shown(getattr(values, name), **extra), str(field.description))
        for name, field in kind.__pydantic_fields__.items()
        if (extra := field.json_schema_extra)
    ]


def _shown(value: Any, none: str, unit: str) -> str:
    match value:
        case None | ():
            return none
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(map(str, value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}{unit}"
        case _:
            return str(value)


SYNTHETIC = "synthetic"
SCALES = (0.5, 1.0, 2.0, 5.0)
NANO_BATCHES = (1, 2, 4, 8)
#: Of a synthetic trace, which has no months: how the paper says that they differ.
INTENSITIES = (1.0, 2.0, 4.0)
SWEEPS = ("scale", "cluster", "months", "nano")


@validated(frozen=True)
class Scenario(ReplayOptions):
    """Settings of one replay.

    nano_batches    of every group; None: the best of each
    recorded        the result says who ran where and when
    """

    policy: str
    seed: int = 0
    source: JobSource = JobSource()
    choices: Choices = Choices()
    cluster: Cluster = Cluster(128)
    nano_batches: int | None = None
    recorded: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """Record of one replay: which jobs ran where and when.

    requests    the jobs, in the order of the table
    """

    requests: tuple[JobRequest, ...]
    table: JobTable
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """Result of a scenario.

    dropped        kind, reason, count and first place of what was left out
    record         None where the scenario is not `recorded`
    """

    scenario: Scenario
    summary: Summary
    trace: dict[str, Any]
    dropped: list[tuple[str, str, int, str]]
    wall_seconds: float
    record: ReplayRecord | None = None


@lru_cache(maxsize=4)
def load(source: JobSource, seed: int) -> Trace:
    """The trace of a source; the seed is of what is drawn."""
    if not source.synthetic:
        return read_trace(
            Path(source.trace), format=source.format, bad_rows=source.bad_rows, seed=seed
        )
    fit = fit_of_file(source.marginals) if source.marginals else shipped_fit()
    return generate(fit, Draw(source.jobs, source.intensity, source.burstiness, seed))


def trace_of(scenario: Scenario) -> Trace:
    """The trace of a scenario, of its month if it has one; raises all that reading a trace does."""
    trace = load(scenario.source, scenario.seed)
    return trace if scenario.month is None else trace.month(scenario.month)


def run(scenario: Scenario) -> ScenarioResult:
    """Replay one scenario."""
    start = time.perf_counter()
    trace = trace_of(scenario)
    result, workload = replayed(scenario, trace)
    facts = described(replace(trace, jobs=tuple(workload.jobs.values())))
    record = None
    if scenario.recorded:
        by_name = {request.name: request for request in workload.requests}
        requests = tuple(by_name[name] for name in result.jobs.names)
        record = ReplayRecord(requests, result.jobs, tuple(result.intervals))
    seconds = time.perf_counter() - start
    dropped = workload.dropped.rows()
    return ScenarioResult(scenario, result.summary, facts, dropped, seconds, record)


def run_all(
    scenarios: Iterable[Scenario],
    processes: int,
    done: Callable[[ScenarioResult], None] | None = None,
) -> dict[Scenario, ScenarioResult]:
    """Replay all scenarios, each once; `done` is called after each."""
    wanted = list(dict.fromkeys(scenarios))
    outcomes: dict[Scenario, ScenarioResult] = {}
    for outcome in _outcomes(wanted, min(processes, len(wanted))):
        outcomes[outcome.scenario] = outcome
        if done is not None:
            done(outcome)
    return outcomes


def _outcomes(wanted: Sequence[Scenario], processes: int) -> Iterator[ScenarioResult]:
    if processes <= 1:
        yield from map(run, wanted)
        return
    # A fork would copy the threads of a progress bar and of torch.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        tasks = [pool.submit(run, scenario) for scenario in wanted]
        try:
            for task in as_completed(tasks):
                yield task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All scenarios of a report.

    sweeps    by name: (value, its scenarios), in the order of the figure
    """

    main: tuple[Scenario, ...]
    sweeps: dict[str, list[tuple[float, tuple[Scenario, ...]]]]

    def scenarios(self) -> list[Scenario]:
        """Scenarios of the report; some twice."""
        others = [scenario for rows in self.sweeps.values() for _, row in rows for scenario in row]
        return [*self.main, *others]


def plan_of(
    base: Scenario,
    policies: Sequence[str],
    seeds: int,
    sweeps: Sequence[str] = (),
    *,
    sweep_seeds: int = 1,
    sizes: Sequence[int] = SweepOptions().cluster_sizes,
    months: int = 1,
    recorded: bool = False,
) -> SweepPlan:
    """Plan of all replays; the seeds of the main comparison follow the base's.

    recorded    of the main comparison's first seed it is kept who ran where and when
    """
    first = base.seed
    main = (
        *_each(replace(base, recorded=recorded), policies, [first]),
        *_each(base, policies, range(first + 1, first + seeds)),
    )
    few = range(first, first + min(seeds, sweep_seeds))
    by_sweep: dict[str, list[tuple[float, tuple[Scenario, ...]]]] = {}
    for name in sweeps:
        shown_policies = ("tlora",) if name == "nano" else policies
        rows = variations(base, name, sizes, months)
        by_sweep[name] = [(value, _each(scenario, shown_policies, few)) for value, scenario in rows]
    return SweepPlan(main, by_sweep)


def _each(base: Scenario, policies: Sequence[str], seeds: Iterable[int]) -> tuple[Scenario, ...]:
    return tuple(
        replace(base, policy=policy, seed=seed, choices=replace(base.choices, seed=seed))
        for seed in seeds
        for policy in policies
    )


def variations(
    base: Scenario, name: str, sizes: Sequence[int], months: int
) -> list[tuple[float, Scenario]]:
    """The points of a sweep's horizontal axis."""
    if name == "scale":
        scale = base.choices.scale
        return [
            (times, replace(base, choices=replace(base.choices, scale=scale * times)))
            for times in SCALES
        ]
    if name == "cluster":
        return [(size, replace(base, cluster=replace(base.cluster, gpus=size))) for size in sizes]
    if name == "nano":
        return [(count, replace(base, nano_batches=count)) for count in NANO_BATCHES]
    if base.source.synthetic:
        intensity = base.source.intensity
        return [
            (times, replace(base, source=replace(base.source, intensity=intensity * times)))
            for times in INTENSITIES
        ]
    return [(month, replace(base, month=month)) for month in range(1, min(3, months) + 1)]


Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that are ready to be replayed.

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
) -> Workload:
    """Make requests of a trace's jobs.

    What a job is (base, rank, batch, lengths) is drawn by its place in the trace, so that it stays
    the same job whatever else is dropped.

    raises      TraceEmpty
    """
    dropped = Dropped() if trace.requests is not None else deepcopy(trace.dropped)
    most = cluster.capacity()
    jobs = trace.first(choices.jobs) if choices.jobs else trace
    if trace.requests is not None:
        pairs = _own(jobs, choices, most, dropped)
    else:
        pairs = list(_chosen(jobs, choices, most, estimator, dropped))
    if not pairs:
        raise TraceEmpty(
            "no job of the trace can be replayed",
            trace=trace.source,
            found="\n".join(dropped.lines()),
            help=_what_would_do(dropped, most),
        )
    start = pairs[0][1].submitted if choices.rebase else 0.0
    requests = tuple(
        at_time(request, (request.submitted - start) / choices.scale) for _, request in pairs
    )
    return Workload(requests, {job.name: job for job, _ in pairs}, dropped)


def _what_would_do(dropped: Dropped, most: int) -> str:
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
    return [
        (job, replace(trace.requests[job.name], gpus=gpus))
        for job in trace.jobs
        if (gpus := _gpus(job, choices, most, dropped))
    ]


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
    dropped: Dropped,
) -> list[tuple[TraceJob, JobRequest]]:
    count = len(trace.jobs)
    random = np.random.default_rng([choices.seed, count])
    bases = random.integers(len(choices.bases), size=count).tolist()
    ranks = random.integers(len(choices.ranks), size=count).tolist()
    batches = random.integers(len(choices.batches), size=count).tolist()
    demands = Demands(choices, random)
    known: dict[tuple[str, int, int], tuple[float, Demand]] = {}
    pairs = []
    for index, job in enumerate(trace.jobs):
        gpus = _gpus(job, choices, most, dropped)
        if not gpus:
            continue
        base, rank = choices.bases[bases[index]], choices.ranks[ranks[index]]
        batch = batch_by_gpus(choices.batches, gpus)
        if choices.batch_rule == "independent":
            batch = choices.batches[batches[index]]
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
        pairs.append((job, request))
    return pairs


def batch_by_gpus(batches: Sequence[int], gpus: int) -> int:
    """The largest batch that is not above a job's GPUs; else the smallest."""
    return max((batch for batch in batches if batch <= gpus), default=min(batches))


class Demands:
    """Demands of jobs, with the lengths of their samples."""

    def __init__(self, choices: Choices, random: np.random.Generator) -> None:
        self.choices = choices
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
        return demand_of(base, rank, batch, lengths), max(lengths)

    def _lengths(self, quantiles: Numbers, *, exact_mean: bool = False) -> list[int]:
        mean, spread = self.choices.mean_tokens, self.choices.spread
        normal = NormalDist()
        logs = np.array([normal.inv_cdf(min(max(q, 1e-9), 1 - 1e-9)) for q in quantiles])
        values = mean * np.exp(spread * logs - spread**2 / 2)
        if exact_mean:
            values *= mean / values.mean()
        return [round(v) for v in np.clip(values, 2, self.choices.max_tokens)]


def replayed(scenario: Scenario, trace: Trace) -> tuple[ReplayResult, Workload]:
    """Make jobs of a trace and replay them under the scenario's policy.

    A job's steps follow from its time alone with fused kernels, whatever the policy, so that all
    policies are given the same work.
    """
    policy = policy_of(scenario.policy)
    workload = workload_in(scenario, trace)
    result = replay(
        workload.requests,
        policy,
        estimator_of(
            scenario,
            bases_of(scenario, trace),
            fused=getattr(policy, "fused", True),
            graphs=getattr(policy, "graphs", True),
        ),
        scenario.cluster,
        options=replace(
            OPTIONS,
            horizon=scenario.horizon,
            switch_seconds=scenario.switch_seconds,
            changes=changes_of(scenario.change_seconds),
            runnable=scenario.runnable,
        ),
        seed=scenario.seed,
        record=scenario.recorded,
    )
    return result, workload


def changes_of(seconds: float | None) -> ChangeCosts | None:
    """Costs of joins, leaves and moves; None where groups cannot change."""
    return None if seconds is None else ChangeCosts(seconds, seconds, 2 * seconds)


def workload_in(scenario: Scenario, trace: Trace) -> Workload:
    """The jobs of a scenario; a sweep over nano-batches keeps them as they are."""
    as_they_are = replace(scenario, nano_batches=None)
    alone = estimator_of(as_they_are, bases_of(scenario, trace), fused=True)
    return workload_of(trace, scenario.choices, scenario.cluster, alone)


def bases_of(scenario: Scenario, trace: Trace) -> list[str]:
    """Bases of the jobs: those that are chosen, or those of a trace of ours."""
    if trace.requests is None:
        return list(scenario.choices.bases)
    return sorted({request.base for request in trace.requests.values()})


def estimator_of(
    scenario: Scenario, bases: Iterable[str], *, fused: bool, graphs: bool = True
) -> ProfileEstimator:
    """The estimator of a scenario's policy; raises ProfileMismatch, UnknownGpu, BaseUnknown."""
    cluster = scenario.cluster
    profiles = _profiles(tuple(bases), cluster.gpu, scenario.allow_estimated)
    counts = (1, 2, 4, 8) if scenario.nano_batches is None else (scenario.nano_batches,)
    return ProfileEstimator(profiles, cluster, fused=fused, graphs=graphs, nano_batches=counts)


@lru_cache(maxsize=64)
def _profiles(bases: tuple[str, ...], gpu: str, allow_estimated: bool) -> dict[str, Profile]:
    try:
        return profiles_for(bases, gpu, allow_estimated=allow_estimated)
    except ProfileMismatch as error:
        help = "take scaled ones with --allow-estimated, or measure it with `tlora-fx profile`"
        raise ProfileMismatch(error.what, help=help, **error.facts) from None


def require_ready(plan: SweepPlan) -> None:
    """Refuse replays that cannot be begun: their GPUs, bases, profiles, jobs and policies.

    raises    ReplayChoiceWrong, UnknownGpu, BaseUnknown, ProfileMismatch, TooManyForOracle, and
              all that reading a trace does
    """
    base = plan.main[0]
    workload = workload_in(base, trace_of(base))
    require_few_for_oracle(
        {scenario.policy for scenario in plan.scenarios()}, base.runnable, workload.requests
    )


def require_few_for_oracle(
    policies: Iterable[str], runnable: int, requests: Iterable[JobRequest]
) -> None:
    """Refuse the exact policy where it might see more jobs of a base than it can part.

    raises     TooManyForOracle
    """
    if runnable <= MAX_JOBS or all(policy_of(name).name != "oracle" for name in policies):
        return
    [(base, most)] = Counter(request.base for request in requests).most_common(1)
    if most > MAX_JOBS:
        raise TooManyForOracle(
            "the exact policy might see too many jobs of one base",
            expected=f"at most {MAX_JOBS} at once",
            found=f"{most:,} jobs of base '{base}', and --runnable {runnable}",
            help=f"add --runnable {MAX_JOBS}, or leave the policy 'oracle' out",
        )
