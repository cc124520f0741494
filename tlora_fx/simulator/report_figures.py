"""Figures of the main comparison: each policy, all seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tlora_fx.simulator.figures import Figure, Number, Series, bars, lines
from tlora_fx.simulator.figures_axes import TINY
from tlora_fx.simulator.metrics import SIZES, Distribution
from tlora_fx.simulator.report_metrics import (
    ALLOCATED,
    BUSY,
    COMPLETION,
    QUEUE,
    RUN,
    THROUGHPUT,
    Metric,
    Spread,
    spread,
)
from tlora_fx.simulator.sweep import Outcome

#: A policy keeps its colour in all figures.
COLOUR = {
    name: place
    for place, name in enumerate(
        (
            "tlora",
            "tlora-paper",
            "mlora-fifo",
            "mlora-memory",
            "megatron",
            "no-scheduler",
            "no-kernel-fuser",
            "megatron:backfill=true",
        )
    )
}
OTHER_COLOUR = 8
#: Where values differ by more, their axis is logarithmic.
WIDE = 20
ABLATIONS = ("tlora", "no-kernel-fuser", "no-scheduler")
Policies = dict[str, list[Outcome]]


def colour(policy: str) -> int:
    """Of a policy."""
    return COLOUR.get(policy, OTHER_COLOUR)


def compared(policies: Policies, metric: Metric, name: str, title: str, shows: str) -> Figure:
    """A metric of each policy as bars."""
    found = {policy: spread(metric, outcomes) for policy, outcomes in policies.items()}
    names = list(found)
    series = [series_of(metric.title, list(found.values()))]
    shades = [colour(policy) for policy in names]
    svg = bars(title, metric.title, names, series, colours=shades, log=wide(series))
    rows = [(policy, metric.key, *numbers(found[policy])) for policy in names]
    return Figure(name, title, shows, svg, ("policy", "metric", *SPREAD), tuple(rows))


SPREAD = ("mean", "least", "most", "seeds")


def numbers(one: Spread | None) -> tuple[Number, ...]:
    """Mean, least, most and how many seeds, for a table."""
    return (one.mean, one.low, one.high, one.count) if one else (None, None, None, 0)


def series_of(name: str, spreads: Sequence[Spread | None], colour: int = 0) -> Series:
    """A row of bars, or a line, with its spread over the seeds."""
    return Series(
        name,
        [one.mean if one else None for one in spreads],
        [one.low if one else None for one in spreads],
        [one.high if one else None for one in spreads],
        colour=colour,
    )


def distribution(
    policies: Policies,
    name: str,
    title: str,
    shows: str,
    label: str,
    of: Callable[[Outcome], Distribution],
    *,
    log: bool = True,
) -> Figure:
    """A cumulative distribution of each policy."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        values = _pooled([of(outcome) for outcome in outcomes])
        if not values:
            continue
        parts = [(place + 1) / len(values) for place in range(len(values))]
        series.append(Series(policy, parts, x=values, colour=colour(policy)))
        rows += [(policy, value, part) for value, part in zip(values, parts, strict=True)]
    svg = lines(title, label, "part of jobs", series, log_x=log, top=1.0, marks=False)
    return Figure(name, title, shows, svg, ("policy", label, "part of jobs"), tuple(rows))


def _pooled(distributions: Iterable[Distribution]) -> list[float]:
    """101 quantiles of several distributions together."""
    values = sorted(value for one in distributions for value in one.quantiles)
    if len(values) <= 101:
        return values
    return [values[round(place * (len(values) - 1) / 100)] for place in range(101)]


def split(policies: Policies) -> Figure:
    """Completion time in its two parts."""
    return _side_by_side(
        policies,
        (("queue", QUEUE), ("run", RUN)),
        "completion-split",
        "Completion time, in two parts",
        "Mean seconds in the queue and in a group; the paper gives their sum.",
        "mean seconds",
    )


def utilisation(policies: Policies) -> Figure:
    """GPUs that are held, and GPUs that compute."""
    return _side_by_side(
        policies,
        (("allocated", ALLOCATED), ("busy, by the estimator", BUSY)),
        "utilisation",
        "GPU utilisation",
        "GPUs held by a group, and GPUs computing at the roofline, while jobs arrive.",
        "% of GPU time",
    )


def wide(series: Sequence[Series]) -> bool:
    """Whether values differ so much that their axis is logarithmic."""
    there = [value for one in series for value in one.values if value and value > TINY]
    return bool(there) and max(there) > WIDE * min(there)


def _side_by_side(
    policies: Policies,
    metrics: Sequence[tuple[str, Metric]],
    name: str,
    title: str,
    shows: str,
    label: str,
) -> Figure:
    names = list(policies)
    series, rows = [], []
    for place, (told, metric) in enumerate(metrics):
        found = [spread(metric, policies[policy]) for policy in names]
        series.append(series_of(told, found, colour=place * 2))
        pairs = zip(names, found, strict=True)
        rows += [(policy, metric.key, *numbers(one)) for policy, one in pairs]
    percent = label.startswith("%")
    log = not percent and wide(series)
    svg = bars(title, label, names, series, top=100 if percent else None, log=log)
    return Figure(name, title, shows, svg, ("policy", "metric", *SPREAD), tuple(rows))


def grouping(policies: Policies) -> Figure:
    """Which jobs share a group, by their size."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        found = [
            Spread.of(
                100 * size.grouped_job_share
                for outcome in outcomes
                for size in outcome.summary.grouping
                if size.name == wanted and size.jobs
            )
            for wanted in SIZES
        ]
        rows += [(policy, size, *numbers(one)) for size, one in zip(SIZES, found, strict=True)]
        if not policy.startswith("megatron"):
            series.append(series_of(policy, found, colour(policy)))
    title = "Jobs that share a group, by size"
    shows = (
        "Thirds of the jobs by GPU-seconds of one step alone. A job counts "
        "that ever shared a group; megatron groups none."
    )
    svg = bars(title, "% of jobs", SIZES, series, top=100)
    return Figure("grouping", title, shows, svg, ("policy", "size", *SPREAD), tuple(rows))


def ablation(policies: Policies) -> list[Figure]:
    """What kernel fuser and scheduler bring; nothing where they were not replayed."""
    own = {name: policies[name] for name in ABLATIONS if name in policies}
    if len(own) < 2:
        return []
    told = "Without fused kernels, and with mLoRA's grouping in place of ours."
    return [
        compared(own, THROUGHPUT, "ablation-throughput", "Ablation: throughput", told),
        compared(own, COMPLETION, "ablation-completion", "Ablation: completion", told),
    ]


def waiting(policies: Policies) -> Figure:
    """Jobs that wait, over time, with the first seed."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        points = outcomes[0].summary.series
        x = [(point.time + point.seconds / 2) / 3600 for point in points]
        y = [point.waiting_jobs for point in points]
        series.append(Series(policy, y, x=x, colour=colour(policy)))
        rows += [
            (policy, point.time, point.waiting_jobs, point.running_jobs, point.allocated_gpus)
            for point in points
        ]
    title = "Jobs that wait"
    svg = lines(title, "hours", "jobs in no group", series, marks=False)
    columns = ("policy", "seconds", "waiting jobs", "running jobs", "allocated GPUs")
    shows = "Over the whole replay, with the first seed; not in the paper."
    return Figure("waiting", title, shows, svg, columns, tuple(rows))
