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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.errors import ProfileMismatch, ReplayChoiceWrong, TooManyForOracle, TraceEmpty
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.policies.oracle import MOST_JOBS
from tlora_fx.scheduler.state import MAX_SLOWDOWN, JobRequest
from tlora_fx.simulator.metrics import Summary
from tlora_fx.simulator.replay import replay
from tlora_fx.simulator.synthetic import Draw, fit_of_file, generate, shipped_fit
from tlora_fx.simulator.traces import Dropped, Trace, TraceJob, described, read_trace

# How a trace becomes jobs: what it does not say, chosen and stated.
#
# source   field notes, "Replaying AcmeTrace"; tLoRA, section 4.1


@dataclass(frozen=True, slots=True)
class Choices:
    """How a trace becomes jobs; the defaults are the field notes'.

    jobs            the first so many of the trace; None: all
    scale           arrivals so many times sooner
    rebase          the first job is submitted at second 0
    states          last states that are replayed; empty: all
    types           types that are replayed; empty: all
    cpu_jobs        drop jobs that ask for no GPU, or give them one
    too_large       drop jobs that are larger than the cluster, or give them all of it
    steps           of every job; None: max(1, round(duration / T_solo))
    bases           drawn uniformly
    ranks           drawn uniformly
    batches         sequences of a step, drawn uniformly or by the job's GPUs
    batch_rule      independent, or gpus: the largest batch that is not above the job's GPUs
    mean_tokens     of a sample
    spread          of the logarithm of a sample's tokens
    most_tokens     of a sample
    lengths         typical: a step's samples are quantiles of the distribution, alike for all jobs
                    of one batch; drawn: each job's own
    max_slowdown    of every job, in groups of two or more
    seed            of the draws
    """

    jobs: int | None = None
    scale: float = 1.0
    rebase: bool = True
    states: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    cpu_jobs: Literal["drop", "one-gpu"] = "drop"
    too_large: Literal["drop", "clip"] = "drop"
    steps: int | None = None
    bases: tuple[str, ...] = ("llama-3-8b", "qwen3-8b")
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    batch_rule: Literal["independent", "gpus"] = "independent"
    mean_tokens: float = 130.0
    spread: float = 0.387
    most_tokens: int = 422
    lengths: Literal["typical", "drawn"] = "typical"
    max_slowdown: float = MAX_SLOWDOWN
    seed: int = 0

    def told(self) -> list[tuple[str, str, str]]:
        """Option, value and meaning of each choice."""
        steps = str(self.steps) if self.steps else "max(1, round(duration / T_solo))"
        by_gpus = "the largest of these not above the job's GPUs"
        batch = by_gpus if self.batch_rule == "gpus" else "drawn, whatever the GPUs"
        return [
            ("jobs", "all" if self.jobs is None else f"{self.jobs:,}", "the first of the trace"),
            ("scale", f"{self.scale:g}", "arrivals so many times sooner"),
            ("rebase", _yes(self.rebase), "the first job is submitted at second 0"),
            ("states", ", ".join(self.states) or "all", "last states that are replayed"),
            ("types", ", ".join(self.types) or "all", "types that are replayed"),
            ("cpu-jobs", self.cpu_jobs, "jobs with gpu_num = 0"),
            ("too-large", self.too_large, "jobs with more GPUs than the cluster"),
            ("steps", steps, "so that each job alone lasts as long as in the trace"),
            ("bases", ", ".join(self.bases), "drawn uniformly"),
            ("ranks", _list(self.ranks), "drawn uniformly"),
            ("batches", _list(self.batches), f"sequences a step; {batch}"),
            ("batch-rule", self.batch_rule, "the paper is unclear: independent or gpus"),
            ("mean-tokens", f"{self.mean_tokens:g}", "of a sample; GSM8K's is about 130"),
            ("spread", f"{self.spread:g}", "of the logarithm of a sample's tokens"),
            ("most-tokens", f"{self.most_tokens}", "of a sample; GSM8K's longest has 422"),
            ("lengths", self.lengths, "typical: quantiles, alike for all jobs of one batch"),
            ("max-slowdown", f"{self.max_slowdown:g}", "in every group of two or more"),
        ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def require_choices(choices: Choices) -> None:
    """Refuse choices that make no sense.

    raises    ReplayChoiceWrong
    """
    wrong = [
        ("scale", choices.scale > 0, "a number above 0"),
        ("jobs", choices.jobs is None or choices.jobs > 0, "a whole number above 0"),
        ("steps", choices.steps is None or choices.steps > 0, "a whole number above 0"),
        ("bases", bool(choices.bases), "one base or more"),
        ("ranks", bool(choices.ranks) and min(choices.ranks) > 0, "ranks above 0"),
        ("batches", bool(choices.batches) and min(choices.batches) > 0, "batches above 0"),
        ("mean-tokens", choices.mean_tokens >= 2, "2 tokens or more"),
        ("most-tokens", choices.most_tokens >= choices.mean_tokens, "no less than the mean"),
        ("spread", choices.spread >= 0, "0 or more"),
        ("max-slowdown", choices.max_slowdown >= 1, "1 or more"),
        ("cpu-jobs", choices.cpu_jobs in {"drop", "one-gpu"}, "drop or one-gpu"),
        ("too-large", choices.too_large in {"drop", "clip"}, "drop or clip"),
        ("batch-rule", choices.batch_rule in {"independent", "gpus"}, "independent or gpus"),
        ("lengths", choices.lengths in {"typical", "drawn"}, "typical or drawn"),
    ]
    for name, fine, expected in wrong:
        if not fine:
            found = getattr(choices, name.replace("-", "_"))
            raise ReplayChoiceWrong(f"--{name} makes no sense", expected=expected, found=found)


SYNTHETIC = "synthetic"
#: Of the main comparison, unless another number is asked for.
SEEDS = 5
SCALES = (0.5, 1.0, 2.0, 5.0)
CLUSTER_SIZES = (32, 64, 128, 256)
NANO_BATCHES = (1, 2, 4, 8)
#: Of a synthetic trace, which has no months: how the paper says that they differ.
INTENSITIES = (1.0, 2.0, 4.0)
SWEEPS = ("scale", "cluster", "months", "nano")


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where the jobs come from.

    trace       a file, or "synthetic"
    format      of the file; None: by its columns
    bad_rows    drop or refuse
    jobs        of a synthetic trace
    intensity   of a synthetic trace's arrivals
    burstiness  of a synthetic trace's arrivals
    marginals   a synthetic trace is fitted to; None: the shipped fit
    """

    trace: str = SYNTHETIC
    format: str | None = None
    bad_rows: str = "drop"
    jobs: int = 1000
    intensity: float = 1.0
    burstiness: float = 1.0
    marginals: str | None = None

    @property
    def synthetic(self) -> bool:
        """Whether it is drawn."""
        return self.trace == SYNTHETIC


@dataclass(frozen=True, slots=True)
class Scenario:
    """One replay.

    month            of the trace, counted from 1; None: all
    nano_batches     of every group; None: the best of each
    horizon          seconds between decisions
    switch_seconds   what forming a group costs it
    runnable         jobs that the policy sees
    allow_estimated  profiles that were scaled from other hardware
    """

    policy: str
    seed: int = 0
    source: JobSource = field(default_factory=JobSource)
    choices: Choices = field(default_factory=Choices)
    cluster: Cluster = field(default_factory=lambda: Cluster(128))
    month: int | None = None
    nano_batches: int | None = None
    horizon: float = 60.0
    switch_seconds: float = 20.0
    runnable: int = 128
    allow_estimated: bool = False


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """What came of it.

    summary        the replay's
    trace          what was replayed
    dropped        kind, reason, count and first place of what was left out
    wall_seconds   what the replay took
    """

    scenario: Scenario
    summary: Summary
    trace: dict[str, Any]
    dropped: list[tuple[str, str, int, str]]
    wall_seconds: float


@lru_cache(maxsize=4)
def load(source: JobSource, seed: int) -> Trace:
    """The trace of a source; the seed is of what is drawn."""
    if not source.synthetic:
        return read_trace(
            Path(source.trace), format=source.format, bad_rows=source.bad_rows, seed=seed
        )
    fit = fit_of_file(Path(source.marginals)) if source.marginals else shipped_fit()
    return generate(fit, Draw(source.jobs, source.intensity, source.burstiness, seed))


def run(scenario: Scenario) -> ScenarioResult:
    """Replay one scenario."""
    start = time.perf_counter()
    trace = load(scenario.source, scenario.seed)
    if scenario.month is not None:
        trace = trace.month(scenario.month)
    summary, workload = replayed(scenario, trace)
    told = described(replace(trace, jobs=tuple(workload.jobs.values())))
    return ScenarioResult(
        scenario, summary, told, workload.dropped.rows(), time.perf_counter() - start
    )


def run_all(
    scenarios: Iterable[Scenario],
    processes: int,
    done: Callable[[ScenarioResult], None] | None = None,
) -> dict[Scenario, ScenarioResult]:
    """Replay all scenarios, each once.

    done    called after each
    """
    wanted = list(dict.fromkeys(scenarios))
    found: dict[Scenario, ScenarioResult] = {}
    for outcome in _outcomes(wanted, min(processes, len(wanted))):
        found[outcome.scenario] = outcome
        if done is not None:
            done(outcome)
    return found


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

    main      each policy and seed
    sweeps    by name: (value, its scenarios), in the order of the figure
    """

    main: tuple[Scenario, ...]
    sweeps: dict[str, list[tuple[float, tuple[Scenario, ...]]]]

    def scenarios(self) -> list[Scenario]:
        """All of them; some twice."""
        others = [one for rows in self.sweeps.values() for _, row in rows for one in row]
        return [*self.main, *others]


def plan_of(
    base: Scenario,
    policies: Sequence[str],
    seeds: int,
    sweeps: Sequence[str] = (),
    *,
    sweep_seeds: int = 1,
    sizes: Sequence[int] = CLUSTER_SIZES,
    months: int = 1,
) -> SweepPlan:
    """What has to be replayed.

    seeds    of the main comparison; they follow the base's
    months   that the trace has
    """
    first = base.seed
    main = _each([base], policies, range(first, first + seeds))
    few = range(first, first + min(seeds, sweep_seeds))
    found: dict[str, list[tuple[float, tuple[Scenario, ...]]]] = {}
    for name in sweeps:
        own = ("tlora",) if name == "nano" else policies
        rows = variations(base, name, sizes, months)
        found[name] = [(value, tuple(_each([one], own, few))) for value, one in rows]
    return SweepPlan(tuple(main), found)


def _each(
    bases: Sequence[Scenario], policies: Sequence[str], seeds: Iterable[int]
) -> list[Scenario]:
    return [
        replace(one, policy=policy, seed=seed, choices=replace(one.choices, seed=seed))
        for one in bases
        for seed in seeds
        for policy in policies
    ]


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


# Make LoRA jobs of a trace, by choices.


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
    require_choices(choices)
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
    from tlora_fx.cost.model_facts import demand_of

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


# One replay of a scenario: estimator, jobs, policy, engine.


def replayed(scenario: Scenario, trace: Trace, **options: Any) -> tuple[Summary, Workload]:
    """Make jobs of a trace and replay them under the scenario's policy.

    A job's steps follow from its time alone with fused kernels, whatever the policy, so that all
    policies are given the same work.

    options    for the engine, such as `progress`
    """
    policy = policy_of(scenario.policy)
    workload = workload_in(scenario, trace)
    found = replay(
        workload.requests,
        policy,
        estimator_of(scenario, bases_of(scenario, trace), fused=getattr(policy, "fused", True)),
        scenario.cluster,
        horizon=scenario.horizon,
        switch_seconds=scenario.switch_seconds,
        runnable=scenario.runnable,
        seed=scenario.seed,
        **options,
    )
    return found.summary, workload


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


def estimator_of(scenario: Scenario, bases: Iterable[str], *, fused: bool) -> ProfileEstimator:
    """The estimator of a scenario's policy.

    raises    ProfileMismatch, UnknownGpu, BaseUnknown
    """
    cluster = scenario.cluster
    profiles = _profiles(tuple(bases), cluster.gpu, scenario.allow_estimated)
    counts = (1, 2, 4, 8) if scenario.nano_batches is None else (scenario.nano_batches,)
    return ProfileEstimator(profiles, cluster, fused=fused, nano_batches=counts)


@lru_cache(maxsize=64)
def _profiles(bases: tuple[str, ...], gpu: str, allow_estimated: bool) -> dict[str, Profile]:
    try:
        return profiles_for(bases, gpu, allow_estimated=allow_estimated)
    except ProfileMismatch as error:
        help = "take scaled ones with --allow-estimated, or measure it with `tlora-fx profile`"
        raise ProfileMismatch(error.what, help=help, **error.facts) from None


# What is looked at before anything is replayed, so that no mistake is found hours later.


def require_ready(plan: SweepPlan) -> None:
    """Refuse replays that cannot be begun: their GPUs, bases, profiles, jobs and policies.

    raises    ReplayChoiceWrong, UnknownGpu, BaseUnknown, ProfileMismatch, TooManyForOracle, and
              all that reading a trace does
    """
    base = plan.main[0]
    demand_times(base)
    trace = load(base.source, base.seed)
    if base.month is not None:
        trace = trace.month(base.month)
    made = workload_in(base, trace)
    require_few_for_oracle({one.policy for one in plan.scenarios()}, base.runnable, made.requests)


def demand_times(scenario: Scenario) -> None:
    """Refuse times that make no sense.

    raises    ReplayChoiceWrong
    """
    for name, found, fine, expected in (
        ("horizon", scenario.horizon, scenario.horizon > 0, "seconds above 0"),
        ("switch-seconds", scenario.switch_seconds, scenario.switch_seconds >= 0, "0 or more"),
    ):
        if not fine:
            raise ReplayChoiceWrong(f"--{name} makes no sense", expected=expected, found=found)


def require_few_for_oracle(
    policies: Iterable[str], runnable: int, requests: Iterable[JobRequest]
) -> None:
    """Refuse the exact policy where it might see more jobs of a base than it can part.

    runnable   jobs that a policy sees at once
    raises     TooManyForOracle
    """
    if runnable <= MOST_JOBS or all(policy_of(name).name != "oracle" for name in policies):
        return
    [(base, most)] = Counter(one.base for one in requests).most_common(1)
    if most > MOST_JOBS:
        raise TooManyForOracle(
            "the exact policy might see too many jobs of one base",
            expected=f"at most {MOST_JOBS} at once",
            found=f"{most:,} jobs of base '{base}', and --runnable {runnable}",
            help=f"add --runnable {MOST_JOBS}, or leave the policy 'oracle' out",
        )
