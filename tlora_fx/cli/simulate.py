"""`tlora-fx simulate`: replay a trace under policies, on a simulated clock."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from tlora_fx.cli import durations
from tlora_fx.cli import simulate_options as option

if TYPE_CHECKING:
    from tlora_fx.simulator.choices import Choices
    from tlora_fx.simulator.report import Report
    from tlora_fx.simulator.sweep import Outcome, Plan, Scenario

SYNTHETIC_JOBS = 1000
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
#: Columns of text that the table needs.
WIDE = 190


def run(
    trace: option.Trace = "synthetic",
    gpus: option.Gpus = 128,
    policies: option.Policies = "all",
    seeds: option.Seeds = 5,
    output: option.Output = None,
    jobs: option.Jobs = None,
    month: option.Month = None,
    format: option.Format = None,
    bad_rows: option.BadRows = "drop",
    intensity: option.Intensity = 1.0,
    burstiness: option.Burstiness = 1.0,
    marginals: option.Marginals = None,
    scale: option.Scale = 1.0,
    rebase: option.Rebase = True,
    states: option.States = "",
    types: option.Types = "",
    cpu_jobs: option.CpuJobs = "drop",
    too_large: option.TooLarge = "drop",
    steps: option.Steps = None,
    bases: option.Bases = "llama-3-8b,qwen3-8b",
    ranks: option.Ranks = "2,4,8,16",
    batches: option.Batches = "1,2,4,8",
    batch_rule: option.BatchRule = "independent",
    mean_tokens: option.MeanTokens = 130.0,
    spread: option.Spread = 0.387,
    most_tokens: option.MostTokens = 422,
    lengths: option.Lengths = "typical",
    max_slowdown: option.MaxSlowdown = 1.5,
    gpu: option.Gpu = "h200",
    gpus_per_node: option.GpusPerNode = 8,
    nodes_per_rack: option.NodesPerRack = 4,
    allow_estimated: option.AllowEstimated = False,
    runnable: option.Runnable = 128,
    horizon: option.Horizon = "60s",
    switch_seconds: option.SwitchSeconds = 20.0,
    seed: option.Seed = 0,
    sweeps: option.Sweeps = "none",
    sweep_seeds: option.SweepSeeds = 1,
    cluster_sizes: option.ClusterSizes = "32,64,128,256",
    processes: option.Processes = None,
    save_trace: option.SaveTrace = None,
) -> None:
    """Replay a trace under each policy, and compare what came of it.

    The scheduler is the real one; only the clock and the GPUs are simulated. What a trace does not
    say is drawn or chosen by the options below, and the report states every one of them. A report
    is one HTML page with the numbers of each figure beside it.
    """
    given = dict(locals())
    console = Console(highlight=False, soft_wrap=True)
    base = scenario_of(given)
    plan = plan_for(base, given)
    _ready(plan, output)
    _say(console, before(base, plan))
    if save_trace is not None:
        _say(console, [saved(plan.main[0], save_trace)])
    _told(console, replayed(plan, processes or os.cpu_count() or 1), output)


def _ready(plan: Plan, output: Path | None) -> None:
    """Find mistakes before anything is said or replayed."""
    from tlora_fx.simulator.ready import demand_ready
    from tlora_fx.simulator.report import demand_folder

    demand_ready(plan)
    if output is not None:
        demand_folder(output)


def _told(console: Console, report: Report, output: Path | None) -> None:
    _say(console, after(report))
    Console(highlight=False, width=max(console.width, WIDE)).print(table(report))
    _say(console, (f"–  {note}" for note in report.notes()))
    _say(console, compared(report))
    if output is not None:
        from tlora_fx.simulator.report import write_report

        _say(console, [f"written   {write_report(report, output)}"])


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def scenario_of(given: Mapping[str, Any]) -> Scenario:
    """What all replays share.

    raises    ReplayChoiceWrong
    """
    from tlora_fx.cost.cluster import Cluster
    from tlora_fx.simulator.choices import demand_choices
    from tlora_fx.simulator.sweep import SYNTHETIC, Scenario, Source

    synthetic = given["trace"] == SYNTHETIC
    marginals = given["marginals"]
    source = Source(
        trace=given["trace"],
        format=given["format"],
        bad_rows=_one_of(given, "bad_rows", ("drop", "refuse")),
        jobs=given["jobs"] or SYNTHETIC_JOBS,
        intensity=given["intensity"],
        burstiness=given["burstiness"],
        marginals=str(marginals) if marginals else None,
    )
    choices = _choices(given, None if synthetic else given["jobs"])
    demand_choices(choices)
    return Scenario(
        policy="tlora",
        seed=given["seed"],
        source=source,
        choices=choices,
        cluster=Cluster(
            given["gpus"], given["gpus_per_node"], given["nodes_per_rack"], given["gpu"]
        ),
        month=given["month"],
        horizon=durations.seconds(given["horizon"], "--horizon"),
        switch_seconds=given["switch_seconds"],
        runnable=given["runnable"],
        allow_estimated=given["allow_estimated"],
    )


def _choices(given: Mapping[str, Any], jobs: int | None) -> Choices:
    from tlora_fx.simulator.choices import Choices

    same = {
        name: given[name]
        for name in (
            "scale", "rebase", "cpu_jobs", "too_large", "steps", "batch_rule", "mean_tokens",
            "spread", "most_tokens", "lengths", "max_slowdown", "seed",
        )
    }  # fmt: skip
    return Choices(
        jobs=jobs,
        states=tuple(word.upper() for word in words(given["states"])),
        types=tuple(words(given["types"])),
        bases=tuple(words(given["bases"])),
        ranks=numbers(given["ranks"], "--ranks"),
        batches=numbers(given["batches"], "--batches"),
        **same,
    )


def words(text: str) -> list[str]:
    """The parts between commas; "all" is none."""
    return [] if text == "all" else [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise typer.BadParameter(
            f"{option} are whole numbers, such as 2,4,8; not {text!r}"
        ) from None


def _one_of(given: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value: str = given[name]
    if value not in choices:
        option = name.replace("_", "-")
        raise typer.BadParameter(f"--{option} is {' or '.join(choices)}; not {value!r}")
    return value


def plan_for(base: Scenario, given: Mapping[str, Any]) -> Plan:
    """The replays that are asked for.

    raises    UnknownPolicy, and all that reading the trace does
    """
    from tlora_fx.scheduler.policies import POLICIES, policy_of
    from tlora_fx.simulator.sweep import SWEEPS, load, plan_of

    if not given["policies"].strip(", "):
        raise typer.BadParameter("--policies names none; say all, or leave it out, for all of them")
    policies = words(given["policies"]) or [
        *(name for name in POLICIES if name != "oracle"),
        BACKFILL,
    ]
    for name in policies:
        policy_of(name)
    asked = given["sweeps"]
    sweeps = list(SWEEPS) if asked == "all" else [] if asked == "none" else words(asked)
    for name in sweeps:
        _one_of({"sweeps": name}, "sweeps", SWEEPS)
    sizes = numbers(given["cluster_sizes"], "--cluster-sizes")
    if min(sizes, default=0) < 1:
        raise typer.BadParameter(f"--cluster-sizes are above 0; not {given['cluster_sizes']!r}")
    return plan_of(
        base,
        policies,
        given["seeds"],
        sweeps,
        sweep_seeds=given["sweep_seeds"],
        sizes=sizes,
        months=load(base.source, base.seed).months if sweeps else 1,
    )


def before(base: Scenario, plan: Plan) -> list[str]:
    """What will be replayed, with every choice."""
    from tlora_fx.simulator.report import chosen
    from tlora_fx.simulator.sweep import load
    from tlora_fx.simulator.traces import described

    told = described(load(base.source, base.seed))
    label = "SYNTHETIC " if told["synthetic"] else ""
    return [
        f"trace     {label}{told['source']}",
        (
            f"          {told['jobs']:,} jobs over {told['span_days']:.2f} days, "
            f"{told['mean_gpus']:.1f} GPUs a job, {told['gpu_hours']:,.0f} GPU-hours"
        ),
        *(f"          {rule}" for rule in told["rules"]),
        "choices",
        *(f"  {name:<16}{value:<34}{meaning}" for name, value, meaning in chosen(plan)),
        f"replays   {len(dict.fromkeys(plan.scenarios()))}",
    ]


def saved(scenario: Scenario, path: Path) -> str:
    """Write the jobs of a scenario as a trace of our own."""
    from tlora_fx.simulator.own_trace import write_own
    from tlora_fx.simulator.sweep import load
    from tlora_fx.simulator.sweep_run import workload_in

    trace = load(scenario.source, scenario.seed)
    if scenario.month is not None:
        trace = trace.month(scenario.month)
    found = workload_in(scenario, trace)
    origin = f"{'synthetic: ' if trace.synthetic else ''}{trace.source}"
    write_own(path, found.requests, found.jobs, origin)
    return f"written   {path}: {len(found.requests):,} jobs, as they are replayed"


def replayed(plan: Plan, processes: int) -> Report:
    """Replay all, with a bar that shows how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tlora_fx.simulator.report import Report
    from tlora_fx.simulator.sweep import run_all

    wanted = plan.scenarios()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=len(dict.fromkeys(wanted)))

        def done(outcome: Outcome) -> None:
            one = outcome.scenario
            bar.update(task, advance=1, description=f"{one.policy}, seed {one.seed}")

        found = run_all(wanted, processes, done)
    return Report(plan, found, shlex.join(["tlora-fx", *sys.argv[1:]]))


def after(report: Report) -> list[str]:
    """What was left out."""
    rows = report.first.dropped
    if not rows:
        return ["left out  nothing", ""]
    return [
        *(f"left out  {count:,}: {reason} (first: {first})" for _, reason, count, first in rows),
        "",
    ]


def table(report: Report) -> Table:
    """The metrics that matter most, one policy a row; in brackets the spread over the seeds."""
    title = "SYNTHETIC trace; means over seeds" if report.synthetic else "means over seeds"
    made = Table(box=None, pad_edge=False, title=title, title_justify="left")
    made.add_column("policy", no_wrap=True)
    rows = {name: [name] for name in report.policies}
    by_key = {metric.key: cells for metric, cells in report.metric_rows()}
    for head, key, spread in SHOWN:
        made.add_column(head, justify="right", no_wrap=True)
        for name, cell in zip(rows, by_key[key], strict=True):
            rows[name].append(cell if spread else cell.split(" (", maxsplit=1)[0])
    for row in rows.values():
        made.add_row(*row)
    return made


def compared(report: Report) -> list[str]:
    """Ratios beside the paper's, and why they are so."""
    from tlora_fx.simulator.report_reasons import reasons

    told = reasons(report.policies, report.ratios)
    return ["", *(f"- {text}" for text in told)] if told else []
