"""Comparison of replays: metrics of policies over seeds, and ratios of two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from tlora_fx.simulator.metrics import Summary
from tlora_fx.simulator.sweep import Scenario, ScenarioResult


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a summary.

    key      of its column in CSV files; ends in its unit
    path     of the summary's attribute
    scale    of the attribute's unit in the metric's
    """

    key: str
    title: str
    path: str
    scale: float = 1.0

    def of(self, summary: Summary) -> float:
        """The number itself."""
        return float(attrgetter(self.path)(summary)) * self.scale


THROUGHPUT = Metric(
    "samples_per_second", "samples/s while jobs arrive", "loaded.samples_per_second"
)
COMPLETION = Metric("completion_mean_seconds", "completion, mean (s)", "completion_seconds.mean")
ALLOCATED = Metric("allocated_percent", "GPUs allocated (%)", "loaded.allocated_share", 100)
BUSY = Metric("busy_percent", "GPUs busy (%)", "loaded.busy_share", 100)
QUEUE = Metric("queue_mean_seconds", "of it queue, mean (s)", "queue_seconds.mean")
RUN = Metric("run_mean_seconds", "of it run, mean (s)", "run_seconds.mean")
SLOWDOWN = Metric("slowdown_mean", "slowdown of a step, mean", "slowdown.mean")

WHOLE = Metric("whole_samples_per_second", "samples/s to the end", "whole.samples_per_second")
WEIGHTED = Metric(
    "weighted_speedup", "weighted speed-up while jobs arrive", "loaded.weighted_speedup"
)
LONE_WORK = Metric("lone_work_share", "lone work per GPU-second", "loaded.lone_work_share")
#: Of what was trained while jobs arrive: they say nothing where that is nothing.
TRAINED = (THROUGHPUT, WEIGHTED, LONE_WORK, BUSY)

METRICS: tuple[Metric, ...] = (
    THROUGHPUT,
    WHOLE,
    WEIGHTED,
    LONE_WORK,
    COMPLETION,
    Metric("completion_p50_seconds", "completion, p50 (s)", "completion_seconds.p50"),
    Metric("completion_p95_seconds", "completion, p95 (s)", "completion_seconds.p95"),
    Metric("completion_p99_seconds", "completion, p99 (s)", "completion_seconds.p99"),
    QUEUE,
    RUN,
    Metric("stretch_p50", "completion / lone time, p50", "stretch.p50"),
    ALLOCATED,
    BUSY,
    SLOWDOWN,
    Metric("slowdown_p99", "slowdown of a step, p99", "slowdown.p99"),
    Metric("violating_percent", "jobs beyond their bound (%)", "violating_job_share", 100),
    Metric("grouped_percent", "jobs that ever shared (%)", "grouped_job_share", 100),
    Metric("group_jobs", "jobs in a group, mean", "group_jobs"),
    Metric("switches", "switches", "switches"),
    Metric("moves", "moves of jobs", "moves"),
    Metric("evaluations", "evaluations of the estimator", "evaluations"),
    Metric("decisions", "decisions", "decisions"),
    Metric("decision_p50_ms", "a decision, p50 (ms)", "decision_wall_seconds.p50", 1e3),
    Metric("decision_p99_ms", "a decision, p99 (ms)", "decision_wall_seconds.p99", 1e3),
    Metric("finished", "jobs finished", "finished"),
    Metric("unfinished", "jobs unfinished", "unfinished"),
    Metric("refused", "jobs refused", "refused"),
    Metric("failed", "jobs failed", "failed"),
)

Outcomes = Mapping[Scenario, ScenarioResult]
Policies = dict[str, list[ScenarioResult]]
OURS = "tlora"


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds; of ratios the mean is the geometric one."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Spread of values; None where there is no value."""
        given = list(values)
        if not given:
            return None
        return cls(sum(given) / len(given), min(given), max(given), len(given))

    @classmethod
    def of_ratios(cls, values: Iterable[float]) -> Spread:
        """Spread of positive numbers, at least one."""
        given = list(values)
        mean = math.exp(sum(math.log(value) for value in given) / len(given))
        return cls(mean, min(given), max(given), len(given))


def spread(metric: Metric, outcomes: Sequence[ScenarioResult]) -> Spread | None:
    """A metric over the seeds of one policy."""
    return Spread.of(metric.of(outcome.summary) for outcome in outcomes)


def trained_while_loaded(outcomes: Sequence[ScenarioResult]) -> bool:
    """Whether any sample was trained before the last job came."""
    return any(outcome.summary.loaded.samples > 0 for outcome in outcomes)


def by_policy(scenarios: Iterable[Scenario], outcomes: Outcomes) -> dict[str, list[ScenarioResult]]:
    """Outcomes by policy, in the order in which the policies come first."""
    policies: dict[str, list[ScenarioResult]] = {}
    for scenario in scenarios:
        policies.setdefault(scenario.policy, []).append(outcomes[scenario])
    return policies


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of a policy to a baseline, seed by seed.

    throughput   samples/s over the baseline's
    completion   the baseline's mean completion over the policy's
    busy         part of the time in which GPUs compute, over the baseline's
    """

    baseline: str
    throughput: Spread
    completion: Spread
    busy: Spread


def ratio_text(ratio: Spread) -> str:
    """Mean and spread of a ratio."""
    if ratio.count == 1:
        return f"{ratio.mean:.2f}×"
    return f"{ratio.mean:.2f}× ({ratio.low:.2f}–{ratio.high:.2f}, {ratio.count} seeds)"


def ratios(
    policies: Mapping[str, Sequence[ScenarioResult]], ours: str, baselines: Iterable[str]
) -> list[Ratio]:
    """A policy against each baseline that was replayed."""
    found_ratios = []
    for name in baselines:
        if name not in policies or ours not in policies or name == ours:
            continue
        pairs = list(zip(policies[ours], policies[name], strict=True))
        throughput = [_over(THROUGHPUT, a, b) for a, b in pairs]
        completion = [_over(COMPLETION, b, a) for a, b in pairs]
        busy = [_over(BUSY, a, b) for a, b in pairs]
        if all(value > 0 for value in (*throughput, *completion, *busy)):
            spreads = (Spread.of_ratios(values) for values in (throughput, completion, busy))
            found_ratios.append(Ratio(name, *spreads))
    return found_ratios


def _over(metric: Metric, above: ScenarioResult, below: ScenarioResult) -> float:
    base = metric.of(below.summary)
    return metric.of(above.summary) / base if base else 0.0


BASELINES = ("mlora-fifo", "mlora-memory", "megatron", "megatron:backfill=true")
#: tLoRA, abstract: over its baselines.
PAPER_THROUGHPUT = (1.2, 1.8)
PAPER_COMPLETION = (2.3, 5.4)
#: GPU utilisation, "up to 37 %".
PAPER_BUSY = 1.37

#: Policies that lack a part of ours, and the part. Unfused adapters run in no graph, so the first
#: lacks two; the second lacks one of them.
PARTS = {
    "no-kernel-fuser": "fused kernels and graphs",
    "no-graphs": "CUDA graphs",
    "tlora:share=false": "grouping",
    "tlora:release=false": "returned GPUs",
    "tlora:backfill=false": "backfill",
    "no-scheduler": "scheduler, mLoRA's instead",
}


def part_ratios(policies: Policies) -> dict[str, Ratio]:
    """Gain by each part: ours over ours without it."""
    brought = {
        PARTS[ratio.baseline]: ratio for ratio in ratios(policies, OURS, PARTS) if OURS in policies
    }
    for ratio in ratios(policies, "no-graphs", ["no-kernel-fuser"]):
        brought["fused kernels, without graphs"] = ratio
    return brought
