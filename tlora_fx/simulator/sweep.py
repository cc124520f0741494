"""Many replays: each policy, seed and variation of the load, in several processes.

A `Scenario` is one replay in plain values, so that it travels to another process and so that two
figures that need the same replay share it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tlora_fx.cost.cluster import Cluster
from tlora_fx.simulator.choices import Choices
from tlora_fx.simulator.generator_fit import fit_of_file, shipped_fit
from tlora_fx.simulator.metrics import Summary
from tlora_fx.simulator.synthetic import Draw, generate
from tlora_fx.simulator.trace_files import read_trace
from tlora_fx.simulator.traces import Trace, described

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
class Source:
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
    source: Source = field(default_factory=Source)
    choices: Choices = field(default_factory=Choices)
    cluster: Cluster = field(default_factory=lambda: Cluster(128))
    month: int | None = None
    nano_batches: int | None = None
    horizon: float = 60.0
    switch_seconds: float = 20.0
    runnable: int = 128
    allow_estimated: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
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
def load(source: Source, seed: int) -> Trace:
    """The trace of a source; the seed is of what is drawn."""
    if not source.synthetic:
        return read_trace(
            Path(source.trace), format=source.format, bad_rows=source.bad_rows, seed=seed
        )
    fit = fit_of_file(Path(source.marginals)) if source.marginals else shipped_fit()
    return generate(fit, Draw(source.jobs, source.intensity, source.burstiness, seed))


def run(scenario: Scenario) -> Outcome:
    """Replay one scenario."""
    from tlora_fx.simulator.sweep_run import replayed

    start = time.perf_counter()
    trace = load(scenario.source, scenario.seed)
    if scenario.month is not None:
        trace = trace.month(scenario.month)
    summary, workload = replayed(scenario, trace)
    told = described(replace(trace, jobs=tuple(workload.jobs.values())))
    return Outcome(scenario, summary, told, workload.dropped.rows(), time.perf_counter() - start)


def run_all(
    scenarios: Iterable[Scenario], processes: int, done: Callable[[Outcome], None] | None = None
) -> dict[Scenario, Outcome]:
    """Replay all scenarios, each once.

    done    called after each
    """
    wanted = list(dict.fromkeys(scenarios))
    found: dict[Scenario, Outcome] = {}
    for outcome in _outcomes(wanted, min(processes, len(wanted))):
        found[outcome.scenario] = outcome
        if done is not None:
            done(outcome)
    return found


def _outcomes(wanted: Sequence[Scenario], processes: int) -> Iterator[Outcome]:
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
class Plan:
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
) -> Plan:
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
    return Plan(tuple(main), found)


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
