"""`tlora-fx plan`: choose how a model is cut over GPUs, without any of them at hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tlora_fx.jobfile import JobFile
    from tlora_fx.planners.auto import Candidate, Search
    from tlora_fx.planners.load import Round

GIB = 2**30
#: What the milliseconds of a plan are made of.
PARTS = ("compute", "bubble", "reduce", "rest")


def run(
    jobs: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.")],
    gpu: Annotated[
        str | None, typer.Option(help="h200, a profile's file, roofline:h200; this one.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Over how many nodes; 8 GPUs a node by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File for the best plan.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a round; else by the jobs' batches.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; else each job's max_length.")
    ] = None,
    max_row_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one forward.")] = 16384,
    allow_estimated: Annotated[
        bool, typer.Option("--allow-estimated", help="Plan by a scaled profile or a roofline.")
    ] = False,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Only plans that cut rows along tokens too.")
    ] = False,
    export: Annotated[
        str | None, typer.Option(help="Write the profile for galvatron, metis or sailor.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder for --export.")] = Path("exported"),
    show: Annotated[int, typer.Option(min=1, help="How many plans to print.")] = 10,
) -> None:
    """Find the fastest plan that fits into memory, and print those that come next.

    Times and memory come from a measured profile of the model's layers (`tlora-fx profile`). Where
    there is none for this model on this GPU, --allow-estimated takes the nearest one, scaled, or
    the GPU's data sheet; the table then says so.
    """
    from tlora_fx.jobfile import load_job_file

    given = load_job_file(jobs)
    with Console(stderr=True).status("compiling the jobs"):
        from tlora_fx.driver import compile
        from tlora_fx.planners.auto import demand_memory, device_name, search
        from tlora_fx.planners.cost import GPUS_PER_NODE, Cluster
        from tlora_fx.planners.facts import facts_of
        from tlora_fx.planners.known_profiles import profile_for
        from tlora_fx.planners.load import round_of_jobs

        model = compile(given)
    profile = profile_for(facts_of(model), gpu or device_name(), allow_estimated=allow_estimated)
    work = round_of_jobs(given.jobs, length=length, tokens=tokens, max_row_tokens=max_row_tokens)
    per_node = -(-gpus // nodes) if nodes else min(gpus, GPUS_PER_NODE)
    found = search(
        model, profile, work, gpus, Cluster(per_node), sequence_parallel=sequence_parallel
    )
    demand_memory(found, work)
    console = Console(highlight=False, soft_wrap=True)
    _print(console, head(given, work, found, gpus, per_node), found, show)
    if export is not None:
        length = length or max(job.max_length for job in given.jobs)
        _written(console, exported(found, export, folder, length, gpus, per_node))
    if output is not None:
        found.best().save(output)
        _written(console, [f"{output}: tlora-fx train {jobs} --plan {output}"])


def _written(console: Console, files: Iterable[object]) -> None:
    for file in files:
        console.print(f"written   {file}", markup=False)


def _print(console: Console, lines: list[str], found: Search, show: int) -> None:
    for line in lines:
        console.print(line, markup=False)
    console.print(table(found, show))
    for line in dropped(found):
        console.print(line, markup=False)


def exported(
    found: Search, format: str, folder: Path, length: int, gpus: int, per_node: int
) -> list[Path]:
    """Write the profile in another planner's format, for sequences of one length."""
    from tlora_fx.planners.galvatron import write_galvatron
    from tlora_fx.planners.metis import write_metis
    from tlora_fx.planners.sailor import write_sailor

    nodes = -(-gpus // per_node)
    if format == "galvatron":
        return write_galvatron(
            found.cost, folder, length=length, nodes=nodes, gpus_per_node=per_node
        )
    if format == "metis":
        return write_metis(found.cost, folder, length=length, nodes=nodes, gpus_per_node=per_node)
    if format == "sailor":
        return write_sailor(found.cost, folder, length=length)
    raise typer.BadParameter(f"--export is galvatron, metis or sailor; not {format!r}")


def head(given: JobFile, work: Round, found: Search, gpus: int, per_node: int) -> list[str]:
    """What was planned for, in a few lines."""
    profile, load = found.cost.profile, work.load
    told = {
        "measured": "measured",
        "scaled": "ESTIMATED: scaled",
        "roofline": "ESTIMATED: roofline",
    }
    source = told[profile.source]
    talk = found.cost.collectives
    if talk.estimated and not profile.estimated:
        source += "; links by data sheet"
    a_round = f"{load.total:,} tokens in {load.sequences:,} sequences a round"
    return [
        f"jobs      {len(given.jobs)}, {a_round}",
        f"mesh      {gpus} GPUs, {per_node} a node, {profile.hardware.gpu}",
        f"profile   {profile.name} ({source})",
        "",
    ]


def table(found: Search, count: int) -> Table:
    """The best plans, one a row; `rows` are the micro-batches of a replica."""
    made = Table(box=None, pad_edge=False)
    for name in ("pp", "dp", "tp", "rows", "ms", "tokens/s", "GiB", *PARTS):
        made.add_column(name, justify="right")
    made.add_column("plan")
    for one in found.running[:count]:
        made.add_row(*_cells(one, found.tokens))
    return made


def dropped(found: Search) -> list[str]:
    """What cannot run, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for one in found.dropped:
        kind = "does not fit into memory" if one.memory is not None else one.reason
        reasons.setdefault(kind, []).append(f"({one.plan.mesh})")
    lines = [f"{len(found.running)} plans run; {len(found.dropped)} do not"]
    for reason, meshes in reasons.items():
        named = list(dict.fromkeys(meshes))
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        lines.append(f"  {reason}: {' '.join(named[:4])}{more}")
    return lines


def _cells(one: Candidate, tokens: int) -> list[str]:
    plan, time, memory = one.plan, one.time, one.memory
    assert time is not None
    assert memory is not None
    words: list[str] = [plan.schedule] if plan.mesh.pp > 1 else []
    words += ["shard-base"] if plan.shard_base else []
    words += ["keep-gathered"] if plan.keep_gathered else []
    words += ["recompute"] if plan.recompute else []
    words += ["sequence-parallel"] if plan.sequence_parallel else []
    return [
        str(plan.mesh.pp),
        str(plan.mesh.dp),
        str(plan.mesh.tp),
        str(plan.micro_batches),
        f"{time.seconds * 1e3:,.1f}",
        f"{tokens / time.seconds:,.0f}",
        f"{memory.total / GIB:.1f}",
        *(f"{ms:.1f}" for ms in (time.compute, time.bubble, time.reduce)),
        f"{time.optimizer + time.host:.1f}",
        " ".join(words) or "plain",
    ]
