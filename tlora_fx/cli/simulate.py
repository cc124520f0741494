"""`tlora-fx simulate`: replay a trace under policies, on a simulated clock."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tlora_fx.cli.options import seconds

if TYPE_CHECKING:
    from tlora_fx.simulator.report import Report
    from tlora_fx.simulator.sweep import Choices, Scenario, ScenarioResult, SweepPlan


# The options of `tlora-fx simulate`; what each chooses is told in `Choices` and `Scenario`.


Option = typer.Option

Trace = Annotated[str, Option(help="File, or 'synthetic'.")]
Format = Annotated[str | None, Option(help="acme, pollux, kalos, own; by its columns.")]
BadRows = Annotated[str, Option(help="drop: leave wrong rows out and count them; refuse.")]
Jobs = Annotated[
    int | None,
    Option(min=1, help="The first so many jobs; 1,000 if synthetic, else all."),
]
Month = Annotated[int | None, Option("--month", "--months", min=1, help="One month.")]
Intensity = Annotated[float, Option(help="Synthetic arrivals, times the trace's rate.")]
Burstiness = Annotated[float, Option(help="Variation of synthetic arrivals; 1: Poisson.")]
Marginals = Annotated[Path | None, Option(help="Fit the synthetic trace to this file.")]

Scale = Annotated[float, Option(help="Arrivals so many times sooner.")]
Rebase = Annotated[bool, Option(help="The first job comes at second 0.")]
States = Annotated[str, Option(help="Such as COMPLETED; all.")]
Types = Annotated[str, Option(help="Such as SFT,Eval; all.")]
CpuJobs = Annotated[str, Option(help="Jobs without GPUs: drop, one-gpu.")]
TooLarge = Annotated[str, Option(help="Jobs larger than the cluster: drop, clip.")]
Steps = Annotated[int | None, Option(min=1, help="Of every job; else duration / T_solo.")]
Bases = Annotated[str, Option(help="Drawn uniformly.")]
Ranks = Annotated[str, Option(help="Drawn uniformly.")]
Batches = Annotated[str, Option(help="Sequences of a step.")]
BatchRule = Annotated[str, Option(help="independent, or gpus: by the job's GPUs.")]
MeanTokens = Annotated[float, Option(help="Of a sample.")]
Spread = Annotated[float, Option(help="Of the logarithm of a sample's tokens.")]
MostTokens = Annotated[int, Option(min=2, help="Of a sample.")]
Lengths = Annotated[str, Option(help="typical: alike for jobs of a batch; drawn.")]
MaxSlowdown = Annotated[float, Option(help="Of every job, in a group.")]

Gpus = Annotated[int, Option(min=1, help="How many there are.")]
Gpu = Annotated[str, Option(help="Their kind.")]
GpusPerNode = Annotated[int, Option(min=1, help="In one node.")]
NodesPerRack = Annotated[int, Option(min=1, help="In one rack.")]
AllowEstimated = Annotated[bool, Option("--allow-estimated", help="Take scaled profiles.")]

Policies = Annotated[str, Option(help="all, or names, such as tlora,megatron:backfill=true.")]
Seeds = Annotated[int, Option(min=1, help="How many.")]
Seed = Annotated[int, Option(min=0, help="The first one.")]
Runnable = Annotated[int, Option(min=1, help="Jobs that a policy sees.")]
Horizon = Annotated[str, Option(help="Between decisions, such as 60s or 5m.")]
SwitchSeconds = Annotated[float, Option(help="What forming a group costs it.")]
Sweeps = Annotated[str, Option(help="all, none, or some of scale, cluster, months, nano.")]
SweepSeeds = Annotated[int, Option(min=1, help="Of each point of a sweep.")]
ClusterSizes = Annotated[str, Option(help="Of the sweep over them.")]
Processes = Annotated[int | None, Option(min=1, help="At once; else one a core.")]

Output = Annotated[Path | None, Option("-o", "--output", help="Folder of the report.")]
SaveTrace = Annotated[
    Path | None,
    Option(help="Write the first seed's jobs: JSON lines, or .csv."),
]


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
    trace: Trace = "synthetic",
    gpus: Gpus = 128,
    policies: Policies = "all",
    seeds: Seeds = 5,
    output: Output = None,
    jobs: Jobs = None,
    month: Month = None,
    format: Format = None,
    bad_rows: BadRows = "drop",
    intensity: Intensity = 1.0,
    burstiness: Burstiness = 1.0,
    marginals: Marginals = None,
    scale: Scale = 1.0,
    rebase: Rebase = True,
    states: States = "",
    types: Types = "",
    cpu_jobs: CpuJobs = "drop",
    too_large: TooLarge = "drop",
    steps: Steps = None,
    bases: Bases = "llama-3-8b,qwen3-8b",
    ranks: Ranks = "2,4,8,16",
    batches: Batches = "1,2,4,8",
    batch_rule: BatchRule = "independent",
    mean_tokens: MeanTokens = 130.0,
    spread: Spread = 0.387,
    most_tokens: MostTokens = 422,
    lengths: Lengths = "typical",
    max_slowdown: MaxSlowdown = 1.5,
    gpu: Gpu = "h200",
    gpus_per_node: GpusPerNode = 8,
    nodes_per_rack: NodesPerRack = 4,
    allow_estimated: AllowEstimated = False,
    runnable: Runnable = 128,
    horizon: Horizon = "60s",
    switch_seconds: SwitchSeconds = 20.0,
    seed: Seed = 0,
    sweeps: Sweeps = "none",
    sweep_seeds: SweepSeeds = 1,
    cluster_sizes: ClusterSizes = "32,64,128,256",
    processes: Processes = None,
    save_trace: SaveTrace = None,
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


def _ready(plan: SweepPlan, output: Path | None) -> None:
    """Find mistakes before anything is said or replayed."""
    from tlora_fx.simulator.report import require_folder
    from tlora_fx.simulator.sweep import require_ready

    require_ready(plan)
    if output is not None:
        require_folder(output)


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
    from tlora_fx.simulator.sweep import SYNTHETIC, JobSource, Scenario, require_choices

    synthetic = given["trace"] == SYNTHETIC
    marginals = given["marginals"]
    source = JobSource(
        trace=given["trace"],
        format=given["format"],
        bad_rows=_one_of(given, "bad_rows", ("drop", "refuse")),
        jobs=given["jobs"] or SYNTHETIC_JOBS,
        intensity=given["intensity"],
        burstiness=given["burstiness"],
        marginals=str(marginals) if marginals else None,
    )
    choices = _choices(given, None if synthetic else given["jobs"])
    require_choices(choices)
    return Scenario(
        policy="tlora",
        seed=given["seed"],
        source=source,
        choices=choices,
        cluster=Cluster(
            given["gpus"], given["gpus_per_node"], given["nodes_per_rack"], given["gpu"]
        ),
        month=given["month"],
        horizon=seconds(given["horizon"], "--horizon"),
        switch_seconds=given["switch_seconds"],
        runnable=given["runnable"],
        allow_estimated=given["allow_estimated"],
    )


def _choices(given: Mapping[str, Any], jobs: int | None) -> Choices:
    from tlora_fx.simulator.sweep import Choices

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


def plan_for(base: Scenario, given: Mapping[str, Any]) -> SweepPlan:
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


def before(base: Scenario, plan: SweepPlan) -> list[str]:
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
    from tlora_fx.simulator.sweep import load, workload_in
    from tlora_fx.simulator.traces import write_own

    trace = load(scenario.source, scenario.seed)
    if scenario.month is not None:
        trace = trace.month(scenario.month)
    found = workload_in(scenario, trace)
    origin = f"{'synthetic: ' if trace.synthetic else ''}{trace.source}"
    write_own(path, found.requests, found.jobs, origin)
    return f"written   {path}: {len(found.requests):,} jobs, as they are replayed"


def replayed(plan: SweepPlan, processes: int) -> Report:
    """Replay all, with a bar that shows how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tlora_fx.simulator.report import Report
    from tlora_fx.simulator.sweep import run_all

    wanted = plan.scenarios()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=len(dict.fromkeys(wanted)))

        def done(outcome: ScenarioResult) -> None:
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
    from tlora_fx.simulator.report import reasons

    told = reasons(report.policies, report.ratios)
    return ["", *(f"- {text}" for text in told)] if told else []
