"""The report of many replays: one HTML page, a CSV for each figure, and all numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from tlora_fx.errors import ReportNotWritable
from tlora_fx.host.durable import replace_file
from tlora_fx.host.version import __version__
from tlora_fx.simulator.charts import figures_of
from tlora_fx.simulator.comparison import (
    BASELINES,
    METRICS,
    OURS,
    PAPER_BUSY,
    PAPER_COMPLETION,
    PAPER_THROUGHPUT,
    TRAINED,
    WHOLE,
    Metric,
    Outcomes,
    Ratio,
    by_policy,
    ratio_text,
    ratios,
    spread,
    trained_while_loaded,
)
from tlora_fx.simulator.figures import Figure, Number, csv_of, shown
from tlora_fx.simulator.metrics import OUTCOMES
from tlora_fx.simulator.sweep import (
    Choices,
    ClusterOptions,
    JobSource,
    ReplayOptions,
    Scenario,
    ScenarioResult,
    SweepOptions,
    SweepPlan,
    option_rows,
)

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
    def recorded(self) -> list[ScenarioResult]:
        """The replays of which is known who ran where and when."""
        rows = (outcome for outcomes in self.policies.values() for outcome in outcomes)
        return [outcome for outcome in rows if outcome.record is not None]

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
    """Make the folder of a report, and write into it once; raises ReportNotWritable."""
    trial = folder / ".trial.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> ReportNotWritable:
    return ReportNotWritable(
        "the report cannot be written",
        folder=folder,
        found=error.strerror or error,
        help="name another folder with -o",
    )


def write_report(report: Report, folder: Path) -> Path:
    """Write page, figures' numbers, metrics and all numbers; gives the page's path.

    raises    ReportNotWritable
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in report.figures:
            replace_file(folder / f"{figure.name}.csv", figure.csv().encode())
        replace_file(folder / METRICS_FILE, metrics_csv(report).encode())
        if report.recorded:
            replace_file(folder / JOBS_FILE, jobs_csv(report).encode())
            replace_file(folder / GPUS_FILE, gpus_csv(report).encode())
        replace_file(folder / NUMBERS, numbers(report).encode())
        replace_file(folder / PAGE, page(report).encode())
    except OSError as error:
        raise _not_writable(folder, error) from error
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
        for outcome in report.recorded:
            record = outcome.record
            assert record is not None
            table = record.table
            times = (table.submitted, table.started, table.ended)
            for row, job in enumerate(record.requests):
                moments = [float(time[row]) for time in times]
                yield (
                    outcome.scenario.policy,
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
        for outcome in report.recorded:
            assert outcome.record is not None
            for one in outcome.record.intervals:
                jobs, steps = ";".join(one.jobs), ";".join(f"{step:.12g}" for step in one.steps)
                for gpu in one.gpus:
                    yield (
                        outcome.scenario.policy, gpu, one.begin, one.end, one.group, jobs, steps,
                    )  # fmt: skip

    return csv_of(columns, rows())


def numbers(report: Report) -> str:
    """Every scenario with its summary, as JSON."""
    replays = [
        {
            "scenario": _plain(asdict(outcome.scenario)),
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value


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
