"""`tlora-fx simulate`: replay a trace under policies, on a simulated clock."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

import typer
from pydantic.dataclasses import dataclass
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlora_fx.cli.arguments.options import seconds, with_options
from tlora_fx.cli.terminal import Console, print_whole
from tlora_fx.cost.hardware import Cluster
from tlora_fx.host.memory import usable_cpus
from tlora_fx.runtime.run_folder import require_no_run
from tlora_fx.scheduler.policies import POLICIES, policy_of
from tlora_fx.simulator.comparison import PARTS, ratio_text
from tlora_fx.simulator.report import Report, chosen, require_folder, write_report
from tlora_fx.simulator.sweep import (
    SWEEPS,
    Choices,
    ClusterOptions,
    JobSource,
    ReplayOptions,
    Scenario,
    ScenarioResult,
    SweepOptions,
    SweepPlan,
    checked,
    load,
    option,
    plan_of,
    require_ready,
    run_all,
    trace_of,
    words,
    workload_in,
)
from tlora_fx.simulator.traces import described, span_text, write_own

#: Megatron's baseline with a queue that a wide job at its head does not block.
BACKFILL = "megatron:backfill=true"
#: Columns of the table in the terminal: title, key of the metric, whether the spread is shown.
SHOWN = (
    ("samples/s", "samples_per_second", True),
    ("weighted", "weighted_speedup", False),
    ("completion s", "completion_mean_seconds", True),
    ("p50", "completion_p50_seconds", False),
    ("p95", "completion_p95_seconds", False),
    ("p99", "completion_p99_seconds", False),
    ("queue", "queue_mean_seconds", False),
    ("run", "run_mean_seconds", False),
    ("held %", "allocated_percent", False),
    ("busy %", "busy_percent", False),
    ("slow", "slowdown_mean", False),
    ("over %", "violating_percent", False),
    ("shared %", "grouped_percent", False),
    ("switches", "switches", False),
    ("decide ms", "decision_p50_ms", False),
    ("done", "finished", False),
)
#: Columns of text that nothing printed exceeds, but for names of files.
WIDE = 100


@dataclass(frozen=True)
class OutputOptions:
    """Options of the files that are written, and of how replays are executed."""

    output: Path | None = option(None, "folder for the report")
    save_trace: Path | None = option(
        None,
        "file for the first seed's jobs, as a trace: JSON lines, or CSV if its name ends in .csv",
    )
    processes: int | None = option(
        None,
        "number of replays to run at once, each in a process; if not given, one per CPU core",
        ge=1,
    )


@with_options(
    JobSource, Choices, ClusterOptions, ReplayOptions, SweepOptions, OutputOptions,
    names={
        "month": ("--month", "--months"),
        "max_tokens": ("--max-tokens", "--most-tokens"),
        "output": ("-o", "--output"),
    },
    parsers={"horizon": lambda text: seconds(text, "--horizon")},
)  # fmt: skip
def run(**values: Any) -> None:
    """Replay a trace of jobs under each scheduling policy, and compare the results.

    The scheduler is the real one; only the clock and the GPUs are simulated. A trace does not say
    everything about a job: the options below choose or draw the rest. The output lists the value of
    each of these options. With -o it also writes a report: an HTML page, and a CSV file for each
    figure. The files of an earlier report in that folder are replaced; other files are kept.
    """
    base, output = scenario_of(values), checked(OutputOptions, values)
    console = Console(highlight=False, soft_wrap=True)
    plan = plan_for(base, checked(SweepOptions, values), recorded=output.output is not None)
    require_ready(plan)
    if output.output is not None:
        require_no_run(output.output)
        require_folder(output.output)
    _say(console, before(base, plan))
    if output.save_trace is not None:
        _say(console, [saved(plan.main[0], output.save_trace)])
    report = replayed(plan, output.processes or usable_cpus())
    _say(console, after(report))
    for part in tables(report):
        print_whole(console, part)
    _say(console, (f"–  {note}" for note in report.notes()))
    _say(console, compared(report))
    if output.output is not None:
        _say(console, [f"written   {write_report(report, output.output)}"])


def _say(console: Console, lines: Iterable[str]) -> None:
    """Print lines; what is too long goes on below its own last column."""
    for line in lines:
        start = re.match(r"- |written +|left out +|  \S.{48} (?=\S)| *\S* {2,}| *", line)
        indent = " " * min(start.end() if start else 0, 54)
        wrapped = wrap(line, WIDE, subsequent_indent=indent, break_long_words=False)
        for part in wrapped or [""]:
            console.print(part, markup=False)


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """Scenario that all replays share; raises ReplayChoiceWrong."""
    return Scenario(
        policy="tlora",
        seed=checked(SweepOptions, values).seed,
        source=checked(JobSource, values),
        choices=checked(Choices, values),
        cluster=Cluster(**asdict(checked(ClusterOptions, values))),
        **asdict(checked(ReplayOptions, values)),
    )


def plan_for(base: Scenario, options: SweepOptions, *, recorded: bool = False) -> SweepPlan:
    """The replays that are asked for; raises UnknownPolicy, and all that reading the trace does.

    recorded    of the first seed it is kept who ran where and when
    """
    if not options.policies.strip(", "):
        raise typer.BadParameter("--policies names none; say all, or leave it out, for all of them")
    policies = words(options.policies) or [
        *(name for name in POLICIES if name != "oracle"),
        BACKFILL,
    ]
    if policies == ["parts"]:
        policies = ["tlora", *PARTS, "megatron", BACKFILL]
    for name in policies:
        policy_of(name)
    sweeps = list(SWEEPS) if options.sweeps == "all" else words(options.sweeps)
    sweeps = [name for name in sweeps if name != "none"]
    for name in sweeps:
        if name not in SWEEPS:
            raise typer.BadParameter(f"--sweeps is {' or '.join(SWEEPS)}; not {name!r}")
    return plan_of(
        base,
        policies,
        options.seeds,
        sweeps,
        sweep_seeds=options.sweep_seeds,
        sizes=options.cluster_sizes,
        months=load(base.source, base.seed).months if sweeps else 1,
        recorded=recorded,
    )


def before(base: Scenario, plan: SweepPlan) -> list[str]:
    """Summary of what will be replayed, with every choice."""
    facts = described(load(base.source, base.seed))
    label = "SYNTHETIC " if facts["synthetic"] else ""
    return [
        f"trace     {label}{facts['source']}",
        (
            f"          {facts['jobs']:,} jobs over {span_text(facts['span_days'])}, "
            f"{facts['mean_gpus']:.1f} GPUs a job, {facts['gpu_hours']:,.0f} GPU-hours"
        ),
        *(f"          {rule}" for rule in facts["rules"]),
        "choices",
        *(f"  {name:<16}{value:<34}{meaning}" for name, value, meaning in chosen(plan)),
        f"replays   {len(dict.fromkeys(plan.scenarios()))}",
    ]


def saved(scenario: Scenario, path: Path) -> str:
    """Write the jobs of a scenario as a trace of our own."""
    trace = trace_of(scenario)
    workload = workload_in(scenario, trace)
    origin = f"{'synthetic: ' if trace.synthetic else ''}{trace.source}"
    write_own(path, workload.requests, workload.jobs, origin)
    return f"written   {path}: {len(workload.requests):,} jobs, as they are replayed"


def replayed(plan: SweepPlan, processes: int) -> Report:
    """Replay all, with a bar that shows how far it is."""
    wanted = plan.scenarios()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=len(dict.fromkeys(wanted)))

        def done(outcome: ScenarioResult) -> None:
            scenario = outcome.scenario
            bar.update(task, advance=1, description=f"{scenario.policy}, seed {scenario.seed}")

        outcomes = run_all(wanted, processes, done)
    return Report(plan, outcomes, shlex.join(["tlora-fx", *sys.argv[1:]]))


def after(report: Report) -> list[str]:
    """Summary of what was left out."""
    rows = report.first.dropped
    if not rows:
        return ["left out  nothing", ""]
    return [
        *(f"left out  {count:,}: {reason} (first: {first})" for _, reason, count, first in rows),
        "",
    ]


def tables(report: Report) -> list[Table]:
    """The metrics that matter most, one policy a row; in brackets the spread over the seeds.

    returns   as many as it takes for none to be wider than WIDE
    """
    by_key = {metric.key: cells for metric, cells in report.metric_rows()}
    columns = [
        [head, *(cell if spread else cell.split(" (", maxsplit=1)[0] for cell in by_key[key])]
        for head, key, spread in SHOWN
    ]
    names = ["policy", *report.policies]
    first = max(map(len, names))
    parts: list[list[list[str]]] = [[]]
    free_width = WIDE - first
    for column in columns:
        width = max(map(len, column)) + 2
        if width > free_width:
            parts.append([])
            free_width = WIDE - first
        parts[-1].append(column)
        free_width -= width
    title = "SYNTHETIC trace; means over seeds" if report.synthetic else "means over seeds"
    return [
        _table(title if at == 0 else "", [names, *part]) for at, part in enumerate(parts) if part
    ]


def _table(title: str, columns: Sequence[Sequence[str]]) -> Table:
    shown = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for index, (head, *_) in enumerate(columns):
        shown.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in zip(*(column[1:] for column in columns), strict=True):
        shown.add_row(*row)
    return shown


def compared(report: Report) -> list[str]:
    """Our policy over each baseline."""
    lines = [
        f"- Against {ratio.baseline}: throughput {ratio_text(ratio.throughput)}; mean completion, "
        f"theirs over ours, {ratio_text(ratio.completion)}; GPUs busy {ratio_text(ratio.busy)}."
        for ratio in report.ratios
    ]
    return ["", *lines] if lines else []
