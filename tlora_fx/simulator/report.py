"""The report of many replays: one HTML page, a CSV for each figure, and all numbers as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from tlora_fx.durable import replace_file
from tlora_fx.errors import ReportNotWritable
from tlora_fx.simulator.figures import Figure
from tlora_fx.simulator.figures_axes import shown
from tlora_fx.simulator.report_metrics import (
    METRICS,
    TRAINED,
    WHOLE,
    Metric,
    Outcomes,
    Ratio,
    by_policy,
    ratios,
    trained_while_loaded,
)
from tlora_fx.simulator.report_metrics import spread as spread_of
from tlora_fx.simulator.report_reasons import (
    BASELINES,
    OURS,
    PAPER_COMPLETION,
    PAPER_THROUGHPUT,
    ratio_text,
    reasons,
)
from tlora_fx.simulator.report_sweeps import figures_of
from tlora_fx.simulator.sweep import SEEDS, Outcome, Plan, Scenario, Source
from tlora_fx.version import __version__

PAGE = "index.html"
NUMBERS = "results.json"
METRICS_FILE = "metrics.csv"


@dataclass(frozen=True)
class Report:
    """What was replayed and what came of it.

    command    that was given, to do it again
    """

    plan: Plan
    outcomes: Outcomes
    command: str = ""

    @cached_property
    def policies(self) -> dict[str, list[Outcome]]:
        """The main comparison."""
        return by_policy(self.plan.main, self.outcomes)

    @property
    def base(self) -> Scenario:
        """What all replays share, if they do not vary it."""
        return self.plan.main[0]

    @property
    def first(self) -> Outcome:
        """The first replay: what it says of the trace holds for its seed."""
        return self.outcomes[self.base]

    @property
    def synthetic(self) -> bool:
        """Whether any number of the trace was drawn."""
        return bool(self.first.trace["synthetic"])

    @cached_property
    def ratios(self) -> list[Ratio]:
        """Ours against each baseline."""
        return ratios(self.policies, OURS, BASELINES)

    @cached_property
    def figures(self) -> list[Figure]:
        """All of them."""
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
        """Why cells of the metrics are empty."""
        return [
            f"{name}: no sample was trained in the {shown(rows[0].summary.loaded.seconds)} s in "
            "which jobs arrive, so nothing is told of that time; to the end of the last job it is "
            f"{_cell(WHOLE, rows)} samples/s"
            for name, rows in self.policies.items()
            if not trained_while_loaded(rows)
        ]


def chosen(plan: Plan) -> list[tuple[str, str, str]]:
    """Option, value and meaning of all that was chosen; where that is not the default, that too."""
    base = plan.main[0]
    given = _told(base, sorted({one.seed for one in plan.main}))
    source = Source(trace=base.source.trace)
    usual = _told(Scenario("", source=source), list(range(SEEDS)))
    return [
        (name, value, meaning if value == other else f"{meaning}; by default {other}")
        for (name, value, meaning), (_, other, _) in zip(given, usual, strict=True)
    ]


def _told(base: Scenario, seeds: Sequence[int]) -> list[tuple[str, str, str]]:
    """Option, value and meaning."""
    jobs, *choices = base.choices.told()
    if base.source.synthetic:
        jobs = ("jobs", f"{base.source.jobs:,}", "that are drawn")
    return [
        jobs,
        *choices,
        ("month", "all" if base.month is None else f"{base.month}", "of the trace"),
        ("gpus", f"{base.cluster.gpus}", "of the cluster"),
        ("gpu", base.cluster.gpu, "their kind"),
        ("gpus-per-node", f"{base.cluster.gpus_per_node}", "in one node"),
        ("nodes-per-rack", f"{base.cluster.nodes_per_rack}", "in one rack"),
        ("runnable", f"{base.runnable}", "jobs that a policy sees at once"),
        ("horizon", f"{base.horizon:g} s", "between decisions"),
        ("switch-seconds", f"{base.switch_seconds:g} s", "that forming a group costs it"),
        ("seeds", ", ".join(map(str, seeds)), "of all that is drawn"),
        ("bad-rows", base.source.bad_rows, "rows that say what no job can be"),
        (
            "allow-estimated",
            "yes" if base.allow_estimated else "no",
            "profiles that were scaled from other hardware",
        ),
    ]


def _cell(metric: Metric, outcomes: Sequence[Outcome]) -> str:
    found = spread_of(metric, outcomes)
    if found is None or (metric in TRAINED and not trained_while_loaded(outcomes)):
        return "–"
    if found.count == 1 or shown(found.low) == shown(found.high):
        return shown(found.mean)
    return f"{shown(found.mean)} ({shown(found.low)}–{shown(found.high)})"


def demand_folder(folder: Path) -> None:
    """Make the folder of a report, and write into it once.

    raises    ReportNotWritable
    """
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
        replace_file(folder / NUMBERS, numbers(report).encode())
        replace_file(folder / PAGE, page(report).encode())
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder / PAGE


def metrics_csv(report: Report) -> str:
    """Each policy, seed and metric."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("policy", "seed", *(metric.key for metric in METRICS)))
    for policy, outcomes in report.policies.items():
        for one in outcomes:
            values = [metric.of(one.summary) for metric in METRICS]
            writer.writerow((policy, one.scenario.seed, *values))
    return out.getvalue()


def numbers(report: Report) -> str:
    """Every scenario with its summary, as JSON."""
    told = [
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
        "paper": {"throughput": PAPER_THROUGHPUT, "completion": PAPER_COMPLETION},
        "ratios": [asdict(one) for one in report.ratios],
    }
    return json.dumps({**head, "replays": told}, indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return sorted(value) if isinstance(value, frozenset) else value


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
        reasons=reasons(report.policies, report.ratios),
        paper_throughput=PAPER_THROUGHPUT,
        paper_completion=PAPER_COMPLETION,
        ours=OURS,
        version=__version__,
        numbers=NUMBERS,
        metrics_file=METRICS_FILE,
    )
