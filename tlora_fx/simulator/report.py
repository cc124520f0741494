"""The report of many replays: one HTML page, a CSV for each figure, and all numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter

from tlora_fx.config.paths import is_there
from tlora_fx.errors import ReportNotWritable, errors_as
from tlora_fx.host.durable import replace_file
from tlora_fx.host.version import __version__
from tlora_fx.inspect.wording import spans
from tlora_fx.simulator.comparison import (
    ALLOCATED,
    BASELINES,
    BUSY,
    COMPLETION,
    METRICS,
    OURS,
    PAPER_BUSY,
    PAPER_COMPLETION,
    PAPER_THROUGHPUT,
    QUEUE,
    RUN,
    THROUGHPUT,
    TRAINED,
    WHOLE,
    Metric,
    Outcomes,
    Policies,
    Ratio,
    Spread,
    by_policy,
    part_ratios,
    ratio_text,
    ratios,
    spread,
    trained_while_loaded,
)
from tlora_fx.simulator.figures import (
    TINY,
    Block,
    Figure,
    Number,
    Series,
    bars,
    csv_of,
    gantt,
    lines,
    shown,
)
from tlora_fx.simulator.metrics import OUTCOMES, SIZES, Distribution
from tlora_fx.simulator.sweep import (
    Choices,
    ClusterOptions,
    JobSource,
    ReplayOptions,
    ReplayRecord,
    Scenario,
    ScenarioResult,
    SweepOptions,
    SweepPlan,
    option_rows,
)
from tlora_fx.simulator.traces import span_text

#: A policy keeps its colour in all figures.
COLOURED = (
    *("tlora", "tlora-paper", "mlora-fifo", "mlora-memory", "megatron"),
    *("no-scheduler", "no-kernel-fuser", "megatron:backfill=true"),
)
#: Where values differ by more, their axis is logarithmic.
WIDE = 20
ABLATIONS = ("tlora", "no-kernel-fuser", "no-scheduler")


def colour(policy: str) -> int:
    """Index of a policy's colour."""
    return COLOURED.index(policy) if policy in COLOURED else len(COLOURED)


def compared(policies: Policies, metric: Metric, name: str, title: str, shows: str) -> Figure:
    """A metric of each policy as bars."""
    metrics, shades = ((metric.title, metric),), [colour(policy) for policy in policies]
    return side_by_side(policies, metrics, name, title, shows, metric.title, shades)


SPREAD = ("mean", "least", "most", "seeds")


def spread_cells(over_seeds: Spread | None) -> tuple[Number, ...]:
    """Mean, least, most and how many seeds, for a table."""
    return astuple(over_seeds) if over_seeds else (None, None, None, 0)


def spread_rows(
    heads: Iterable[tuple[Number, ...]], spreads: Iterable[Spread | None]
) -> list[tuple[Number, ...]]:
    """Rows of a table, each what it begins with and its spread."""
    return [(*head, *spread_cells(item)) for head, item in zip(heads, spreads, strict=True)]


def series_of(
    name: str, spreads: Sequence[Spread | None], colour: int = 0, x: Sequence[float] = ()
) -> Series:
    """A row of bars, or a line, with its spread over the seeds."""
    return Series(
        name,
        [item.mean if item else None for item in spreads],
        [item.low if item else None for item in spreads],
        [item.high if item else None for item in spreads],
        x,
        colour,
    )


def distribution(
    policies: Policies,
    name: str,
    title: str,
    shows: str,
    label: str,
    of: Callable[[ScenarioResult], Distribution],
    *,
    log: bool = True,
) -> Figure:
    """A cumulative distribution of each policy."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        values = _pooled([of(outcome) for outcome in outcomes])
        if not values:
            continue
        parts = [(index + 1) / len(values) for index in range(len(values))]
        series.append(Series(policy, parts, x=values, colour=colour(policy)))
        rows += [(policy, value, part) for value, part in zip(values, parts, strict=True)]
    svg = lines(title, label, "part of jobs", series, log_x=log, top=1.0, marks=False)
    return Figure(name, title, shows, svg, ("policy", label, "part of jobs"), tuple(rows))


def _pooled(distributions: Iterable[Distribution]) -> list[float]:
    """101 quantiles of several distributions together."""
    values = sorted(value for each in distributions for value in each.quantiles)
    if len(values) <= 101:
        return values
    return [values[round(index * (len(values) - 1) / 100)] for index in range(101)]


def wide(series: Sequence[Series]) -> bool:
    """Whether values differ so much that their axis is logarithmic."""
    there = [value for row in series for value in row.values if value and value > TINY]
    return bool(there) and max(there) > WIDE * min(there)


def side_by_side(
    policies: Policies,
    metrics: Sequence[tuple[str, Metric]],
    name: str,
    title: str,
    shows: str,
    label: str,
    colours: Sequence[int] = (),
) -> Figure:
    """Metrics of each policy as bars beside each other; `colours` of the policies, if of them."""
    names = list(policies)
    series, rows = [], []
    for index, (part, metric) in enumerate(metrics):
        spreads = [spread(metric, policies[policy]) for policy in names]
        series.append(series_of(part, spreads, colour=index * 2))
        rows += spread_rows([(policy, metric.key) for policy in names], spreads)
    percent = label.startswith("%")
    log = not percent and wide(series)
    top = 100 if percent else None
    svg = bars(title, label, names, series, colours=colours, top=top, log=log)
    return Figure(name, title, shows, svg, ("policy", "metric", *SPREAD), tuple(rows))


def grouping(policies: Policies) -> Figure:
    """Share of the jobs of each size that share a group."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        spreads = [
            Spread.of(
                100 * size.grouped_job_share
                for outcome in outcomes
                for size in outcome.summary.grouping
                if size.name == wanted and size.jobs
            )
            for wanted in SIZES
        ]
        rows += spread_rows([(policy, size) for size in SIZES], spreads)
        if not policy.startswith("megatron"):
            series.append(series_of(policy, spreads, colour(policy)))
    title = "Jobs that share a group, by size"
    shows = (
        "Thirds of the jobs by GPU-seconds of one step alone. A job counts "
        "that ever shared a group; megatron groups none."
    )
    svg = bars(title, "% of jobs", SIZES, series, top=100)
    return Figure("grouping", title, shows, svg, ("policy", "size", *SPREAD), tuple(rows))


def ablation(policies: Policies) -> list[Figure]:
    """Ablation of kernel fuser and scheduler; nothing where they were not replayed."""
    ablated = {name: policies[name] for name in ABLATIONS if name in policies}
    if len(ablated) < 2:
        return []
    shows = "Without fused kernels, and with mLoRA's grouping in place of ours."
    return [
        compared(ablated, metric, f"ablation-{what}", f"Ablation: {what}", shows)
        for metric, what in ((THROUGHPUT, "throughput"), (COMPLETION, "completion"))
    ]


def parts(policies: Policies) -> list[Figure]:
    """Gain by each part of ours; nothing where fewer than two were left out."""
    brought = part_ratios(policies)
    if len(brought) < 2:
        return []
    series, rows = [], []
    for index, name in enumerate(("throughput", "completion")):
        spreads = [getattr(ratio, name) for ratio in brought.values()]
        series.append(series_of(name, spreads, colour=index * 2))
        rows += spread_rows([(part, name) for part in brought], spreads)
    title = "What each part brings"
    shows = (
        "The whole over the whole without one part: throughput of the first over that of the "
        "second, mean completion of the second over that of the first. 1 is nothing."
    )
    svg = bars(title, "times", list(brought), series, log=wide(series))
    return [Figure("parts", title, shows, svg, ("part", "metric", *SPREAD), tuple(rows))]


#: Jobs of a group, and their colour in a Gantt chart.
SHADES = (("1 job", 4), ("2 jobs", 1), ("3 jobs", 0), ("4 or more", 3))


def who_ran_where(policies: Policies) -> list[Figure]:
    """A Gantt chart of our GPUs, with the first seed; nothing where that was not recorded."""
    record = policies[OURS][0].record if OURS in policies else None
    if record is None or not record.intervals:
        return []
    begin = min(interval.begin for interval in record.intervals)
    blocks, rows = [], []
    for one in record.intervals:
        names = ", ".join(one.jobs)
        shade = SHADES[min(len(one.jobs), len(SHADES)) - 1][1]
        hours = (one.begin - begin) / 3600, (one.end - begin) / 3600
        text = f"{names}: {len(one.gpus)} GPUs, {hours[0]:.2f} h to {hours[1]:.2f} h"
        for first, last in spans(sorted(one.gpus)):
            blocks.append(Block(first, last, *hours, shade, text))
            rows.append((one.group, first, last, one.begin, one.end, len(one.jobs), names))
    gpus = policies[OURS][0].scenario.cluster.gpus
    title = f"Who ran where under {OURS}"
    shows = "Each GPU over time, with the first seed. White is idle, colours count a group's jobs."
    svg = gantt(title, "hours", "GPU", gpus, blocks, SHADES)
    columns = ("group", "first gpu", "last gpu", "begin seconds", "end seconds", "jobs", "names")
    return [Figure("gantt", title, shows, svg, columns, tuple(rows))]


def waiting(policies: Policies) -> Figure:
    """Jobs that wait, over time, with the first seed."""
    series, rows = [], []
    for policy, outcomes in policies.items():
        points = outcomes[0].summary.series
        # The chart ends with the last job that waits: long jobs may run for days after it.
        ends = max((n for n, point in enumerate(points) if point.waiting_jobs), default=0)
        shown_points = points[: ends + 2]
        x = [(point.time + point.seconds / 2) / 3600 for point in shown_points]
        y = [point.waiting_jobs for point in shown_points]
        series.append(Series(policy, y, x=x, colour=colour(policy)))
        rows += [
            (policy, point.time, point.waiting_jobs, point.running_jobs, point.allocated_gpus)
            for point in points
        ]
    title = "Jobs that wait"
    svg = lines(title, "hours", "jobs in no group", series, marks=False)
    columns = ("policy", "seconds", "waiting jobs", "running jobs", "allocated GPUs")
    shows = "Until no job waits any more, with the first seed; not in the paper."
    return Figure("waiting", title, shows, svg, columns, tuple(rows))


SweepRow = tuple[float, Policies]


def figures_of(plan: SweepPlan, outcomes: Outcomes) -> list[Figure]:
    """All figures for which there are replays."""
    policies = by_policy(plan.main, outcomes)
    figures = [
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
        side_by_side(
            policies,
            (("queue", QUEUE), ("run", RUN)),
            "completion-split",
            "Completion time, in two parts",
            "Mean seconds in the queue and in a group; the paper gives their sum.",
            "mean seconds",
        ),
        side_by_side(
            policies,
            (("allocated", ALLOCATED), ("busy, by the estimator", BUSY)),
            "utilisation",
            "GPU utilisation",
            "GPUs held by a group, and GPUs computing at the roofline, while jobs arrive.",
            "% of GPU time",
        ),
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
        *parts(policies),
        *who_ran_where(policies),
    ]
    for name, rows in plan.sweeps.items():
        points = [(value, by_policy(scenarios, outcomes)) for value, scenarios in rows]
        figures += sweep(name, points, policies, synthetic=plan.main[0].source.synthetic)
    return [replace(figure, paper=PAPER.get(figure.name, "")) for figure in figures]


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


TOLD = {"scale": "arrivals, times as dense", "cluster": "GPUs of the cluster", "months": "month"}
BY = {"scale": "density of arrivals", "cluster": "size of the cluster", "months": "month"}


def sweep(
    name: str, points: Sequence[SweepRow], main: Policies, *, synthetic: bool
) -> list[Figure]:
    """Throughput and completion over what was varied."""
    if name == "nano":
        return [_nano(points, main)]
    label, shows = TOLD[name], ""
    if name == "months" and synthetic:
        label = "arrivals, times as dense as the trace's mean"
        shows = (
            "A synthetic trace has no months: these are the densities of months 1 to 3, relative "
            "to each other, that the paper tells."
        )
    if name == "cluster":
        shows = _replayed(points)
    return [
        _over_values(
            points, metric, f"{name}-{what}", f"{what.capitalize()} by {BY[name]}", shows, label
        )
        for metric, what in ((THROUGHPUT, "throughput"), (COMPLETION, "completion"))
    ]


def _replayed(points: Sequence[SweepRow]) -> str:
    jobs = [next(iter(row.values()))[0].summary.jobs for _, row in points]
    if len(set(jobs)) == 1:
        return ""
    pairs = zip(points, jobs, strict=True)
    counts = ", ".join(f"{count:,} on {size:g}" for (size, _), count in pairs)
    return f"Jobs larger than a cluster are left out of it, so that it replays fewer: {counts}."


def _over_values(
    points: Sequence[SweepRow], metric: Metric, name: str, title: str, shows: str, label: str
) -> Figure:
    x = [value for value, _ in points]
    policies = dict.fromkeys(policy for _, row in points for policy in row)
    series, rows = [], []
    for policy in policies:
        spreads = [spread(metric, row.get(policy, [])) for _, row in points]
        series.append(series_of(policy, spreads, colour(policy), x))
        rows += spread_rows([(policy, value, metric.key) for value in x], spreads)
    svg = lines(title, label, metric.title, series, log_y=wide(series))
    return Figure(name, title, shows, svg, ("policy", label, "metric", *SPREAD), tuple(rows))


def _nano(points: Sequence[SweepRow], main: Policies) -> Figure:
    """Throughput with a fixed count of nano-batches, beside the best of each group."""
    names = [f"{value:g}" for value, _ in points]
    spreads = [spread(THROUGHPUT, row["tlora"]) for _, row in points]
    if "tlora" in main:
        count = spreads[0].count if spreads and spreads[0] else 1
        names.append("best of each")
        spreads.append(spread(THROUGHPUT, main["tlora"][:count]))
    title = "Throughput by nano-batches"
    shows = (
        "A fixed count in every group, and the best of each (policy tlora). By the estimator, "
        "counts matter only where a group's layout is tensor-parallel."
    )
    svg = bars(title, THROUGHPUT.title, names, [series_of(THROUGHPUT.title, spreads)])
    rows = spread_rows([(name, THROUGHPUT.key) for name in names], spreads)
    return Figure("nano", title, shows, svg, ("nano-batches", "metric", *SPREAD), tuple(rows))


PAGE = "index.html"
NUMBERS = "results.json"
METRICS_FILE = "metrics.csv"
JOBS_FILE, GPUS_FILE = "jobs.csv", "gpus.csv"


@dataclass(frozen=True)
class Report:
    """Replays of a command, and their results."""

    plan: SweepPlan
    outcomes: Outcomes
    command: str = ""

    @cached_property
    def policies(self) -> dict[str, list[ScenarioResult]]:
        """Replays of the main comparison, by policy."""
        return by_policy(self.plan.main, self.outcomes)

    @property
    def base(self) -> Scenario:
        """Scenario that all replays share, if they do not vary it."""
        return self.plan.main[0]

    @property
    def first(self) -> ScenarioResult:
        """The first replay: what it says of the trace holds for its seed."""
        return self.outcomes[self.base]

    @property
    def synthetic(self) -> bool:
        """Whether any number of the trace was drawn."""
        return bool(self.first.trace["synthetic"])

    @property
    def recorded(self) -> list[tuple[str, ReplayRecord]]:
        """Policies of whose replays is known who ran where and when, and that."""
        rows = (outcome for outcomes in self.policies.values() for outcome in outcomes)
        return [(row.scenario.policy, row.record) for row in rows if row.record is not None]

    @cached_property
    def ratios(self) -> list[Ratio]:
        """Ours against each baseline."""
        return ratios(self.policies, OURS, BASELINES)

    @cached_property
    def figures(self) -> list[Figure]:
        """Figures of the report."""
        return figures_of(self.plan, self.outcomes)

    def choices(self) -> list[tuple[str, str, str]]:
        """Option, value and meaning of all that was chosen."""
        return chosen(self.plan)

    def metric_rows(self) -> list[tuple[Metric, list[str]]]:
        """Each metric as text, by policy: mean, and the spread over seeds."""
        return [
            (metric, [_cell(metric, row) for row in self.policies.values()]) for metric in METRICS
        ]

    def notes(self) -> list[str]:
        """Notes on why cells of the metrics are empty."""
        return [
            f"{name}: no sample was trained in the {shown(rows[0].summary.loaded.seconds)} s in "
            "which jobs arrive, so nothing is told of that time; to the end of the last job it is "
            f"{_cell(WHOLE, rows)} samples/s"
            for name, rows in self.policies.items()
            if not trained_while_loaded(rows)
        ]


def chosen(plan: SweepPlan) -> list[tuple[str, str, str]]:
    """Option, value and meaning of all that was chosen; where that is not the default, that too."""
    base = plan.main[0]
    seeds = sorted({scenario.seed for scenario in plan.main})
    rows = _choice_rows(base, seeds)
    usual = Scenario("", source=JobSource(trace=base.source.trace))
    usual_rows = _choice_rows(usual, range(SweepOptions().seeds))
    return [
        (name, value, meaning if value == default else f"{meaning}; by default {default}")
        for (name, value, meaning), (_, default, _) in zip(rows, usual_rows, strict=True)
    ]


def _choice_rows(scenario: Scenario, seeds: Sequence[int]) -> list[tuple[str, str, str]]:
    jobs, *choices = option_rows(Choices, scenario.choices)
    if scenario.source.synthetic:
        jobs = ("jobs", f"{scenario.source.jobs:,}", "number of jobs that are drawn")
    return [
        jobs,
        *choices,
        *option_rows(ClusterOptions, scenario.cluster),
        *option_rows(ReplayOptions, scenario),
        ("seeds", ", ".join(map(str, seeds)), "seeds of all random choices"),
        *(row for row in option_rows(JobSource, scenario.source) if row[0] == "bad-rows"),
    ]


def _cell(metric: Metric, outcomes: Sequence[ScenarioResult]) -> str:
    over_seeds = spread(metric, outcomes)
    if over_seeds is None or (metric in TRAINED and not trained_while_loaded(outcomes)):
        return "–"
    if over_seeds.count == 1 or shown(over_seeds.low) == shown(over_seeds.high):
        return shown(over_seeds.mean)
    return f"{shown(over_seeds.mean)} ({shown(over_seeds.low)}–{shown(over_seeds.high)})"


def require_folder(folder: Path) -> None:
    """Make the folder of a report, and write into it once.

    raises    ReportNotWritable; also where a file would be overwritten that is of no report
    """
    files = (PAGE, NUMBERS, METRICS_FILE, JOBS_FILE, GPUS_FILE)
    there = [name for name in files if is_there(folder / name)]
    # Files that are called jobs.csv or index.html alone are somebody else's.
    if there and NUMBERS not in there:
        raise ReportNotWritable(
            "a file that is no part of a report would be overwritten",
            file=folder / there[0],
            help="name another folder with -o, or move the file away",
        )
    trial = folder / ".trial.tmp"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()


def _writing(folder: Path) -> AbstractContextManager[None]:
    """Inside, a folder that cannot be written to is told by ReportNotWritable."""
    help = "name another folder with -o"
    return errors_as(ReportNotWritable, "the report cannot be written", folder=folder, help=help)


def write_report(report: Report, folder: Path) -> Path:
    """Write page, figures' numbers, metrics and all numbers; gives the page's path.

    raises    ReportNotWritable
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The file by which the next report knows the folder comes first.
        replace_file(folder / NUMBERS, numbers(report).encode())
        for figure in report.figures:
            replace_file(folder / f"{figure.name}.csv", figure.csv().encode())
        replace_file(folder / METRICS_FILE, metrics_csv(report).encode())
        if report.recorded:
            replace_file(folder / JOBS_FILE, jobs_csv(report).encode())
            replace_file(folder / GPUS_FILE, gpus_csv(report).encode())
        replace_file(folder / PAGE, page(report).encode())
    return folder / PAGE


def metrics_csv(report: Report) -> str:
    """Each policy, seed and metric."""
    columns = ("policy", "seed", *(metric.key for metric in METRICS))
    return csv_of(
        columns,
        (
            (policy, outcome.scenario.seed, *(metric.of(outcome.summary) for metric in METRICS))
            for policy, outcomes in report.policies.items()
            for outcome in outcomes
        ),
    )


def jobs_csv(report: Report) -> str:
    """Each job under each policy, with the first seed; times in seconds, empty for never.

    `run seconds` are in groups, `shared seconds` of them in groups of two or more.
    """
    columns = (
        "policy", "job", "base", "gpus", "steps", "steps done", "step alone seconds", "submitted",
        "started", "ended", "outcome", "formations", "run seconds", "shared seconds",
    )  # fmt: skip

    def rows() -> Iterator[Sequence[Number]]:
        for policy, record in report.recorded:
            table = record.table
            times = (table.submitted, table.started, table.ended)
            for row, job in enumerate(record.requests):
                moments = [float(time[row]) for time in times]
                yield (
                    policy,
                    job.name,
                    job.base,
                    job.gpus,
                    job.steps,
                    float(table.steps_done[row]),
                    float(table.solo_seconds[row]),
                    *(moment if math.isfinite(moment) else None for moment in moments),
                    OUTCOMES[int(table.outcome[row])],
                    int(table.formations[row]),
                    float(table.run_seconds[row]),
                    float(table.grouped_seconds[row]),
                )

    return csv_of(columns, rows())


def gpus_csv(report: Report) -> str:
    """Groups on each GPU under each policy, with the first seed: a row for each group's jobs.

    `steps` are those that each job of the group did in that time, in the order of `jobs`.
    """
    columns = ("policy", "gpu", "begin seconds", "end seconds", "group", "jobs", "steps")

    def rows() -> Iterator[Sequence[Number]]:
        for policy, record in report.recorded:
            for one in record.intervals:
                jobs, steps = ";".join(one.jobs), ";".join(f"{step:.12g}" for step in one.steps)
                for gpu in one.gpus:
                    yield policy, gpu, one.begin, one.end, one.group, jobs, steps

    return csv_of(columns, rows())


def numbers(report: Report) -> str:
    """Every scenario with its summary, as JSON."""
    scenario = TypeAdapter(Scenario)
    replays = [
        {
            "scenario": scenario.dump_python(outcome.scenario, mode="json"),
            "trace": outcome.trace,
            "dropped": outcome.dropped,
            "wall_seconds": outcome.wall_seconds,
            "summary": outcome.summary.as_json(),
        }
        for outcome in report.outcomes.values()
    ]
    head = {
        "tlora-fx": __version__,
        "command": report.command,
        "synthetic": report.synthetic,
        "paper": {
            "throughput": PAPER_THROUGHPUT,
            "completion": PAPER_COMPLETION,
            "busy": PAPER_BUSY,
        },
        "ratios": [asdict(ratio) for ratio in report.ratios],
    }
    return json.dumps({**head, "replays": replays}, indent=1)


def page(report: Report) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    assets = files("tlora_fx.simulator") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    template = (assets / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = shown
    environment.filters["ratio"] = ratio_text
    environment.filters["span"] = span_text
    return environment.from_string(template).render(
        report=report,
        style=style,
        trace=report.first.trace,
        dropped=report.first.dropped,
        paper_throughput=PAPER_THROUGHPUT,
        paper_completion=PAPER_COMPLETION,
        paper_busy=PAPER_BUSY,
        ours=OURS,
        version=__version__,
        numbers=NUMBERS,
        metrics_file=METRICS_FILE,
        jobs_file=JOBS_FILE,
        gpus_file=GPUS_FILE,
    )
