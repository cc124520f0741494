"""The figures of a report: those of the main comparison, and one or two for each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tlora_fx.simulator.figures import Figure, Series, bars, lines
from tlora_fx.simulator.report_figures import (
    SPREAD,
    Policies,
    ablation,
    colour,
    compared,
    distribution,
    grouping,
    numbers,
    series_of,
    split,
    utilisation,
    waiting,
    wide,
)
from tlora_fx.simulator.report_metrics import (
    COMPLETION,
    THROUGHPUT,
    Metric,
    Outcomes,
    by_policy,
    spread,
)
from tlora_fx.simulator.sweep import Plan

SweepRow = tuple[float, Policies]


def figures_of(plan: Plan, outcomes: Outcomes) -> list[Figure]:
    """All figures for which there are replays."""
    policies = by_policy(plan.main, outcomes)
    found = [
        compared(
            policies,
            THROUGHPUT,
            "throughput",
            "Training throughput",
            "Samples a second of the whole cluster, while jobs arrive.",
        ),
        distribution(
            policies,
            "completion-cdf",
            "Completion time",
            "The part of the jobs that were done so long after submission, all seeds together.",
            "seconds from submission to end",
            lambda outcome: outcome.summary.completion_seconds,
        ),
        split(policies),
        utilisation(policies),
        grouping(policies),
        *ablation(policies),
        distribution(
            policies,
            "slowdown-cdf",
            "Slowdown of a step",
            "Step time in a group over step time alone, mean over a job's steps; not in the paper.",
            "step time over T_solo",
            lambda outcome: outcome.summary.slowdown,
            log=False,
        ),
        waiting(policies),
    ]
    for name, rows in plan.sweeps.items():
        points = [(value, by_policy(scenarios, outcomes)) for value, scenarios in rows]
        found += sweep(name, points, policies, synthetic=plan.main[0].source.synthetic)
    return [replace(one, paper=PAPER.get(one.name, "")) for one in found]


#: What each figure redraws, by the paper's captions.
PAPER = {
    "throughput": "Training throughput",
    "completion-cdf": "Job completion time",
    "utilisation": "Average GPU SM util.",
    "grouping": "Job colocation proportions",
    "ablation-throughput": "Performance breakdown: training throughput",
    "ablation-completion": "Performance breakdown: job completion time",
    "nano": "Impact of nano-batch size",
    "months-throughput": "Impact of job arrival pattern",
    "months-completion": "Impact of online deployment traces (appendix)",
    "scale-throughput": "Impact of scaling arrival rate",
    "scale-completion": "Impact of system load (appendix)",
    "cluster-throughput": "Impact of cluster size",
    "cluster-completion": "Impact of cluster size (appendix)",
}


TOLD = {
    "scale": "arrivals, times as dense",
    "cluster": "GPUs of the cluster",
    "months": "month",
    "nano": "nano-batches of every group",
}


BY = {"scale": "density of arrivals", "cluster": "size of the cluster", "months": "month"}


def sweep(
    name: str, points: Sequence[SweepRow], main: Policies, *, synthetic: bool
) -> list[Figure]:
    """Throughput and completion over what was varied."""
    label, shows = TOLD[name], ""
    if name == "months" and synthetic:
        label = "arrivals, times as dense as the trace's mean"
        shows = (
            "A synthetic trace has no months: these are the densities of months 1 to 3, relative "
            "to each other, that the paper tells."
        )
    if name == "cluster":
        shows = _replayed(points)
    if name == "nano":
        return [_nano(points, main)]
    made = []
    for metric, what in ((THROUGHPUT, "throughput"), (COMPLETION, "completion")):
        title = f"{what.capitalize()} by {BY[name]}"
        made.append(_over(points, metric, f"{name}-{what}", title, shows, label))
    return made


def _replayed(points: Sequence[SweepRow]) -> str:
    """How many jobs each size replays, where they differ."""
    jobs = [next(iter(row.values()))[0].summary.jobs for _, row in points]
    if len(set(jobs)) == 1:
        return ""
    pairs = zip(points, jobs, strict=True)
    told = ", ".join(f"{count:,} on {size:g}" for (size, _), count in pairs)
    return f"Jobs larger than a cluster are left out of it, so that it replays fewer: {told}."


def _over(
    points: Sequence[SweepRow], metric: Metric, name: str, title: str, shows: str, label: str
) -> Figure:
    x = [value for value, _ in points]
    policies = dict.fromkeys(policy for _, row in points for policy in row)
    series, rows = [], []
    for policy in policies:
        found = [spread(metric, row.get(policy, [])) for _, row in points]
        one = series_of(policy, found, colour(policy))
        series.append(Series(one.name, one.values, one.low, one.high, x, one.colour))
        rows += [
            (policy, value, metric.key, *numbers(each))
            for value, each in zip(x, found, strict=True)
        ]
    svg = lines(title, label, metric.title, series, log_y=wide(series))
    return Figure(name, title, shows, svg, ("policy", label, "metric", *SPREAD), tuple(rows))


def _nano(points: Sequence[SweepRow], main: Policies) -> Figure:
    """Throughput with a fixed count of nano-batches, beside the best of each group."""
    names = [f"{value:g}" for value, _ in points]
    found = [spread(THROUGHPUT, row["tlora"]) for _, row in points]
    if "tlora" in main:
        count = found[0].count if found and found[0] else 1
        names.append("best of each")
        found.append(spread(THROUGHPUT, main["tlora"][:count]))
    title = "Throughput by nano-batches"
    told = (
        "A fixed count in every group, and the best of each (policy tlora). By the estimator, "
        "counts matter only where a group's layout is tensor-parallel."
    )
    svg = bars(title, THROUGHPUT.title, names, [series_of(THROUGHPUT.title, found)])
    rows = [(count, THROUGHPUT.key, *numbers(one)) for count, one in zip(names, found, strict=True)]
    return Figure("nano", title, told, svg, ("nano-batches", "metric", *SPREAD), tuple(rows))
