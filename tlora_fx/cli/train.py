"""`tlora-fx train`: train all jobs of a file together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tlora_fx.cli.bars import Bars
from tlora_fx.cli.whole_tables import print_whole
from tlora_fx.cli.working import Working

if TYPE_CHECKING:
    from tlora_fx.cost.plan import Plan
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.controllers import NanoBatches
    from tlora_fx.runtime.data import JobData
    from tlora_fx.runtime.job_run import JobRun
    from tlora_fx.runtime.launch import Launch


def run(
    jobs: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what comes out.")],
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Passes instead of the default.")] = None,
    max_row_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one forward.")] = 16384,
    plan: Annotated[
        str | None, typer.Option(help="auto, fsdp, pipeline, tensor, ... or a plan file.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="Processes, such as pp=2,dp=2.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers; the first rounds take longer.")
    ] = False,
    nano_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of a row that overlap, unless a controller chooses."),
    ] = None,
    controller: Annotated[
        str | None, typer.Option(help="Changes their number: keep-best, aimd or fixed.")
    ] = None,
    shard_base: Annotated[
        bool, typer.Option("--shard-base", help="pipeline: shard each stage over its replicas.")
    ] = False,
    cuda_graphs: Annotated[
        bool, typer.Option(help="On a GPU, run small rows of sizes that come again as CUDA graphs.")
    ] = True,
    collective_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that processes wait for another, after a round.")
    ] = 300,
) -> None:
    """Train all jobs of a file together, each to its own last step.

    Leaves one PEFT adapter folder, metrics.jsonl and status.json a job, and checkpoints. Started by
    torchrun, all processes train one model under a plan:
    torchrun --nproc-per-node 4 -m tlora_fx train jobs.yaml -o runs/a --plan auto
    """
    from tlora_fx.runtime.launch import Launch, exits_at_once, require_plan_file
    from tlora_fx.runtime.run_folder import how_to_go_on, require_new

    launch = Launch.found()
    if launch.rank == 0 and not resume and not launch.again:
        require_new(output)
    asked = _TrainOptions(
        jobs, output, resume or launch.again, device, pipeline, max_row_tokens,
        plan or ("auto" if launch.size > 1 else "single"), mesh,
        timedelta(seconds=collective_timeout), compiled, nano_batches, controller,
        shard_base, cuda_graphs,
    )  # fmt: skip
    require_plan_file(asked.plan)
    exits_at_once(lambda: _train(asked, launch), launch, lambda: how_to_go_on(output))


@dataclass(frozen=True, slots=True)
class _TrainOptions:
    """What the command line says."""

    jobs: Path
    output: Path
    resume: bool
    device: str | None
    pipeline: str | None
    max_row_tokens: int
    plan: str
    mesh: str | None
    longest_wait: timedelta
    compiled: bool = False
    nano_batches: int | None = None
    controller: str | None = None
    shard_base: bool = False
    cuda_graphs: bool = True


def _train(asked: _TrainOptions, launch: Launch) -> None:
    """What each process does."""
    from tlora_fx.parallel.mesh import open_mesh
    from tlora_fx.runtime.distributed import Ranks
    from tlora_fx.runtime.launch import join, memory_bytes

    # One process speaks for all.
    console = Console(stderr=True, quiet=launch.rank > 0)
    device = launch.device(asked.device)
    everyone = Ranks(join(launch, device))
    memory = memory_bytes(device, everyone)
    with Working(console, "compiling and loading the data"):
        data, model, plan = everyone.together(lambda: _prepared(asked, launch, memory))
    for name, own in data.items():
        for line in own.report.lines():
            console.print(f"{name}: {line}", highlight=False, markup=False)
    if launch.size > 1:
        console.print(f"plan: {plan.planner} on {plan.mesh}", highlight=False)
    with Bars(console) as bars:
        for text in _warnings(asked, plan):
            bars.warned(text)
        from tlora_fx.runtime.trainer import Trainer

        trainer = everyone.together(
            lambda: Trainer(
                model,
                output=asked.output,
                resume=asked.resume,
                data=data,
                max_row_tokens=asked.max_row_tokens,
                watch=bars,
                plan=plan,
                mesh=open_mesh(plan.mesh, device),
                longest_wait=asked.longest_wait,
                compiled=asked.compiled,
                cuda_graphs=asked.cuda_graphs,
                nano_batches=_deciding(asked),
            )
        )
        runs = trainer.run()
    if launch.rank == 0:
        _tell(runs, asked.output)
        if trainer.rows.padding:
            part = trainer.rows.padding / (trainer.rows.padding + trainer.rows.tokens)
            told = f"rows: {part:.1%} padding, so that their lengths come again"
            console.print(told, highlight=False)
        graphs = trainer.graphs
        if graphs is not None and graphs.refused:
            told = f"rows did not run as CUDA graphs: {graphs.refused.splitlines()[0]}"
            console.print(told, highlight=False, markup=False)
        elif graphs is not None and graphs.roomless:
            told = f"rows: {graphs.roomless} times there was no memory for a CUDA graph"
            console.print(told, highlight=False)
    if any(job.status == "failed" for job in runs):
        sys.exit(1)


def _prepared(
    asked: _TrainOptions, launch: Launch, memory: int | None
) -> tuple[Mapping[str, JobData], SuperModel, Plan]:
    """The data, the compiled model and the plan; no weight is loaded yet."""
    from tlora_fx.compiler import compile
    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.cost.plan import MeshShape
    from tlora_fx.errors import PlanNotRunnable
    from tlora_fx.parallel.prepare import require_fits
    from tlora_fx.runtime.checks import check_memory, load_all_data
    from tlora_fx.runtime.launch import choose_plan
    from tlora_fx.tools.replay import keep_replay

    shape = None if asked.mesh is None else MeshShape.parse(asked.mesh)
    given = load_job_file(asked.jobs)
    data = load_all_data(given.jobs)
    model = compile(given, asked.pipeline, on_failure=partial(keep_replay, Path("tlora-fx-replay")))
    options: dict[str, object] = {"max_row_tokens": asked.max_row_tokens, "memory_bytes": memory}
    if asked.plan == "pipeline":
        options["shard_base"] = asked.shard_base
    plan = choose_plan(asked.plan, model, launch, shape, options)
    if asked.nano_batches is not None:
        plan = plan.model_copy(update={"nano_batches": asked.nano_batches})
    require_fits(model, plan.mesh)
    if asked.shard_base and not plan.shard_base:
        raise PlanNotRunnable(
            "this plan holds the base whole on every replica",
            plan=f"{plan.planner} on {plan.mesh}",
            found="--shard-base",
            help="choose fsdp, or pipeline with a mesh that has dp, or leave --shard-base out",
        )
    check_memory(model, plan, data, asked.max_row_tokens)
    return data, model, plan


def _warnings(asked: _TrainOptions, plan: Plan) -> Iterator[str]:
    """What a user should know of a plan before it runs."""
    estimate = plan.estimate
    if estimate is not None and estimate.estimated:
        yield (
            f"the plan rests on estimated times ({estimate.profile}): `tlora-fx profile` measures "
            "them, then plan again"
        )
    if not asked.compiled and (asked.controller is not None or plan.nano_batches > 1):
        yield "nothing overlaps between nano-batches without --compile"


def _deciding(asked: _TrainOptions) -> NanoBatches | None:
    """What chooses the number of nano-batches, where that was asked for."""
    from tlora_fx.runtime.controllers import NanoBatches, find_controller

    if asked.controller is None:
        return None
    options = {"count": asked.nano_batches or 1} if asked.controller == "fixed" else {}
    return NanoBatches(find_controller(asked.controller, **options))


def _tell(runs: Sequence[JobRun], output: Path) -> None:
    """Where everything lies."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("job", "status", "steps", "tokens", "last loss", "adapter"):
        table.add_column(title, justify="right" if title in ("steps", "tokens") else "left")
    for job in runs:
        table.add_row(
            job.job.name,
            job.status,
            str(job.step),
            str(job.tokens),
            f"{job.loss:.4f}",
            str(output / job.job.name),
        )
    print_whole(Console(), table)
