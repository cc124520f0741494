"""The numbers of a replay that reports compare, and their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from tlora_fx.simulator.metrics import Summary
from tlora_fx.simulator.sweep import Outcome, Scenario


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a summary.

    key      of its column in CSV files; ends in its unit
    title    for people
    better   what is better
    """

    key: str
    title: str
    of: Callable[[Summary], float]
    better: Literal["more", "less", "neither"] = "neither"


def _metric(key: str, title: str, path: str, better: str = "neither", scale: float = 1.0) -> Metric:
    found = attrgetter(path)
    return Metric(key, title, lambda summary: float(found(summary)) * scale, better)  # type: ignore[arg-type]


THROUGHPUT = _metric(
    "samples_per_second", "samples/s while jobs arrive", "loaded.samples_per_second", "more"
)
COMPLETION = _metric(
    "completion_mean_seconds", "completion, mean (s)", "completion_seconds.mean", "less"
)
ALLOCATED = _metric(
    "allocated_percent", "GPUs allocated (%)", "loaded.allocated_share", "more", 100
)
BUSY = _metric("busy_percent", "GPUs busy (%)", "loaded.busy_share", "more", 100)
QUEUE = _metric("queue_mean_seconds", "of it queue, mean (s)", "queue_seconds.mean", "less")
RUN = _metric("run_mean_seconds", "of it run, mean (s)", "run_seconds.mean", "less")
SLOWDOWN = _metric("slowdown_mean", "slowdown of a step, mean", "slowdown.mean", "less")

WHOLE = _metric(
    "whole_samples_per_second", "samples/s to the end", "whole.samples_per_second", "more"
)
WEIGHTED = _metric(
    "weighted_speedup", "weighted speed-up while jobs arrive", "loaded.weighted_speedup", "more"
)
LONE_WORK = _metric("lone_work_share", "lone work per GPU-second", "loaded.lone_work_share", "more")
#: Of what was trained while jobs arrive: they say nothing where that is nothing.
TRAINED = (THROUGHPUT, WEIGHTED, LONE_WORK, BUSY)

METRICS: tuple[Metric, ...] = (
    THROUGHPUT,
    WHOLE,
    WEIGHTED,
    LONE_WORK,
    COMPLETION,
    _metric("completion_p50_seconds", "completion, p50 (s)", "completion_seconds.p50", "less"),
    _metric("completion_p95_seconds", "completion, p95 (s)", "completion_seconds.p95", "less"),
    _metric("completion_p99_seconds", "completion, p99 (s)", "completion_seconds.p99", "less"),
    QUEUE,
    RUN,
    _metric("stretch_p50", "completion / lone time, p50", "stretch.p50", "less"),
    ALLOCATED,
    BUSY,
    SLOWDOWN,
    _metric("slowdown_p99", "slowdown of a step, p99", "slowdown.p99", "less"),
    _metric("violating_percent", "jobs beyond their bound (%)", "violating_job_share", "less", 100),
    _metric("grouped_percent", "jobs that ever shared (%)", "grouped_job_share", scale=100),
    _metric("group_jobs", "jobs in a group, mean", "group_jobs"),
    _metric("switches", "switches", "switches", "less"),
    _metric("moves", "moves of jobs", "moves", "less"),
    _metric("evaluations", "evaluations of the estimator", "evaluations", "less"),
    _metric("decisions", "decisions", "decisions"),
    _metric("decision_p50_ms", "a decision, p50 (ms)", "decision_wall_seconds.p50", "less", 1e3),
    _metric("decision_p99_ms", "a decision, p99 (ms)", "decision_wall_seconds.p99", "less", 1e3),
    _metric("finished", "jobs finished", "finished", "more"),
    _metric("unfinished", "jobs unfinished", "unfinished", "less"),
    _metric("refused", "jobs refused", "refused", "less"),
    _metric("failed", "jobs failed", "failed", "less"),
)

Outcomes = Mapping[Scenario, Outcome]


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds; of ratios the mean is the geometric one."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there is no value."""
        given = list(values)
        if not given:
            return None
        return cls(sum(given) / len(given), min(given), max(given), len(given))

    @classmethod
    def of_ratios(cls, values: Iterable[float]) -> Spread:
        """Of positive numbers, at least one."""
        given = list(values)
        mean = math.exp(sum(math.log(value) for value in given) / len(given))
        return cls(mean, min(given), max(given), len(given))


def spread(metric: Metric, outcomes: Sequence[Outcome]) -> Spread | None:
    """A metric over the seeds of one policy."""
    return Spread.of(metric.of(outcome.summary) for outcome in outcomes)


def trained_while_loaded(outcomes: Sequence[Outcome]) -> bool:
    """Whether any sample was trained before the last job came."""
    return any(outcome.summary.loaded.samples > 0 for outcome in outcomes)


def by_policy(scenarios: Iterable[Scenario], outcomes: Outcomes) -> dict[str, list[Outcome]]:
    """Outcomes by policy, in the order in which the policies come first."""
    found: dict[str, list[Outcome]] = {}
    for scenario in scenarios:
        found.setdefault(scenario.policy, []).append(outcomes[scenario])
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much better a policy is than a baseline, seed by seed.

    throughput   samples/s over the baseline's
    completion   the baseline's mean completion over the policy's
    """

    baseline: str
    throughput: Spread
    completion: Spread


def ratios(
    policies: Mapping[str, Sequence[Outcome]], ours: str, baselines: Iterable[str]
) -> list[Ratio]:
    """A policy against each baseline that was replayed."""
    found = []
    for name in baselines:
        if name not in policies or ours not in policies or name == ours:
            continue
        pairs = list(zip(policies[ours], policies[name], strict=True))
        throughput = [_over(THROUGHPUT, a, b) for a, b in pairs]
        completion = [_over(COMPLETION, b, a) for a, b in pairs]
        if all(value > 0 for value in (*throughput, *completion)):
            made = Ratio(name, Spread.of_ratios(throughput), Spread.of_ratios(completion))
            found.append(made)
    return found


def _over(metric: Metric, above: Outcome, below: Outcome) -> float:
    base = metric.of(below.summary)
    return metric.of(above.summary) / base if base else 0.0
