"""`tlora-fx plan`: choose how a model is cut over GPUs, without any of them at hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from tlora_fx.cli.arguments.options import (
    JobFilePath,
    MaxRowTokens,
    TrustRemoteCode,
    option,
    takes_options,
)
from tlora_fx.cli.terminal import Console, Working, bare_table, print_whole
from tlora_fx.config.job_file import JobFile, load_job_file
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.load import Round, round_of_jobs
from tlora_fx.cost.plan import Plan, require_free
from tlora_fx.cost.profile import Profile
from tlora_fx.errors import ProfileMissing, first_of

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.planners.auto import Candidate, PlanSearch

#: What the milliseconds of a plan are made of.
PARTS = ("compute", "bubble", "reduce", "rest")
LEGEND = """\
pp stages, dp replicas, tp pieces of each matrix; rows: micro-batches of a replica; GiB: the fullest
GPU; ms: a round, of which compute, bubble (waiting between stages), reduce (gradients), and rest:
the optimizer, and Python on the host"""
#: Columns of text of a line.
WIDE = 100
FORMATS = ("metis", "sailor")
MAX_ROW_TOKENS = 16384
#: What the node default of `Cluster` is, which takes torch to import.
NODE = 8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line."""

    jobs: JobFilePath
    gpus: int = option(..., "Number of GPUs to plan for, on all nodes together.", min=1)
    gpu: str | None = option(
        None,
        "GPU to plan for: a name such as h200, a profile file, or roofline:h200 for its data "
        "sheet. This machine's GPU if not given.",
    )
    nodes: int | None = option(
        None, "Number of nodes, each with equally many GPUs; if not given, nodes of 8 GPUs.", min=1
    )
    output: Path | None = option(None, "File to write the best plan to.", "-o", "--output")
    tokens: int | None = option(
        None,
        "Tokens in one round, a step of all jobs; if not given, from the jobs' batch sizes.",
        min=2,
    )
    length: int | None = option(
        None, "Length of a sequence, in tokens; if not given, each job's max_length.", min=2
    )
    max_row_tokens: MaxRowTokens = MAX_ROW_TOKENS
    allow_estimated: bool = option(
        False,
        "Allow planning with a scaled profile or a data sheet if there is no measured profile.",
    )
    export: str | None = option(None, "Also write the profile in the format of metis or sailor.")
    folder: Path = option(Path("exported"), "Folder for the files of --export.")
    show: int = option(10, "Number of plans to print.", min=1)
    trust_remote_code: TrustRemoteCode = False


@takes_options
def run(options: PlanOptions) -> None:
    """Find the fastest way to split a model over GPUs that fits into memory; print the best plans.

    Times and memory come from a measured profile of the model's layers (`tlora-fx profile`). If
    there is no profile of this model on this GPU, --allow-estimated scales the nearest one, or uses
    the data sheet of the GPU. The output then says so.
    """
    per_node = per_node_of(options.gpus, options.nodes)
    if options.export not in (None, *FORMATS):
        raise typer.BadParameter(f"--export is metis or sailor; not {options.export!r}")
    job_file, model = _compiled(options)
    from tlora_fx.planners.auto import require_memory, search

    profile = _profile(model, options.gpu, options.allow_estimated)
    work = round_of_jobs(
        job_file.jobs,
        length=options.length,
        tokens=options.tokens,
        max_row_tokens=options.max_row_tokens,
    )
    plans = search(model, profile, work, options.gpus, per_node)
    require_memory(plans, work)
    console = Console(highlight=False, soft_wrap=True)
    _print(console, head(job_file, work, plans, options.gpus, per_node), plans, options.show)
    if options.export is not None:
        length = options.length or max(job.max_length for job in job_file.jobs)
        nodes = -(-options.gpus // per_node)
        files = exported(plans, options.export, options.folder, length, nodes, per_node)
        _print_written(console, files)
    best, train = plans.best(), _as_predicted(profile, options.max_row_tokens)
    if options.output is not None:
        best.save(options.output)
        _print_written(console, [options.output])
    line = command(best, options.jobs, options.output or Path("plan.json"), per_node, train)
    saving = "" if options.output is not None else ", once it is saved by -o plan.json"
    console.print(f"train by the first plan{saving}:\n  {line}", markup=False)


def per_node_of(gpus: int, nodes: int | None) -> int:
    """GPUs of each node; all nodes have as many. Raises typer.BadParameter where they cannot."""
    if nodes is None and gpus <= NODE:
        return gpus
    if nodes is None and gpus % NODE == 0:
        return NODE
    count = nodes or -(-gpus // NODE)
    if gpus % count == 0 and nodes is not None:
        return gpus // count
    fitting = [n for n in range(1, gpus + 1) if gpus % n == 0]
    spread = f"over {nodes} nodes" if nodes else f"over nodes of {NODE}"
    raise typer.BadParameter(
        f"{gpus} GPUs cannot be spread evenly {spread}: a plan wants as many on each. "
        f"--nodes may be {', '.join(map(str, fitting))}"
    )


def command(plan: Plan, jobs: Path, output: Path, per_node: int, options: list[str]) -> str:
    """Command that trains by a plan's file, as it is typed."""
    size = plan.mesh.size
    train = ["train", str(jobs), "-o", f"runs/{jobs.stem}", "--plan", str(output), *options]
    if size <= per_node:
        return shlex.join(["tlora-fx", *train, *(["--gpus", str(size)] if size > 1 else [])])
    started = ["torchrun", "--nproc-per-node", str(per_node), "--nnodes", str(size // per_node)]
    started += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST-NODE:29500"]
    return shlex.join([*started, "-m", "tlora_fx", *train])


def _compiled(options: PlanOptions) -> tuple[JobFile, SuperModel]:
    """The jobs of a file, and their model; nothing is compiled for a profile that is none."""
    from tlora_fx.runtime.launching import early_checks as early

    job_file = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
    early.require_gpu(options.gpu, job_file.jobs)
    if options.output is not None:
        require_free(options.output)
    early.require_trainable(job_file.jobs)
    early.require_hub(job_file.jobs)
    with Working(Console(stderr=True), "compiling the jobs"):
        from tlora_fx.compiler import compile

        return job_file, compile(job_file)


def _as_predicted(profile: Profile, max_row_tokens: int) -> list[str]:
    """Options of `train` with which it runs what was predicted."""
    compiled = ["--compile"] if profile.compiled else []
    other = max_row_tokens != MAX_ROW_TOKENS
    return compiled + (["--max-row-tokens", str(max_row_tokens)] if other else [])


def _profile(model: SuperModel, gpu: str | None, allow_estimated: bool) -> Profile:
    """The profile of a GPU that was named, or of the one at hand."""
    from tlora_fx.cost.facts import facts_of
    from tlora_fx.cost.profile_sources import no_gpu_to_plan_for, profile_for
    from tlora_fx.planners.auto import CPU, device_name, profile_here

    facts = facts_of(model)
    if gpu is not None:
        return profile_for(facts, gpu, allow_estimated=allow_estimated)
    try:
        return profile_here(facts, allow_estimated=allow_estimated)
    except ProfileMissing as error:
        if device_name() != CPU:
            raise
        raise no_gpu_to_plan_for(error.facts.get("base")) from error


def _print_written(console: Console, files: Iterable[object]) -> None:
    for file in files:
        console.print(f"written   {file}", markup=False)


def _print(console: Console, lines: list[str], plans: PlanSearch, show: int) -> None:
    for line in lines:
        console.print(line, markup=False)
    print_whole(console, table(plans, show))
    for line in [*LEGEND.splitlines(), *dropped(plans), *idle(plans), *recomputing(plans)]:
        for part in wrap(line, WIDE, subsequent_indent="    ", break_long_words=False):
            console.print(part, markup=False)


def exported(
    plans: PlanSearch, format: str, folder: Path, length: int, nodes: int, per_node: int
) -> list[Path]:
    """Write the profile in another planner's format, for sequences of one length."""
    from tlora_fx.planners.export import write_metis, write_sailor

    if format == "metis":
        return write_metis(plans.cost, folder, length=length, nodes=nodes, gpus_per_node=per_node)
    assert format in FORMATS
    return write_sailor(plans.cost, folder, length=length)


def head(job_file: JobFile, work: Round, plans: PlanSearch, gpus: int, per_node: int) -> list[str]:
    """Subject of the plans (jobs, GPUs), in a few lines."""
    profile, load = plans.cost.profile, work.load
    source = profile.source if profile.source == "measured" else f"ESTIMATED: {profile.source}"
    if plans.cost.collectives.estimated and not profile.estimated:
        source += "; links by data sheet"
    a_round = f"{load.total:,} tokens in {load.sequences:,} sequences a round"
    launched = plans.cost.facts.launched if profile.knows_graphs else ()
    return [
        f"jobs      {len(job_file.jobs)}, {a_round}",
        f"mesh      {gpus} GPUs, {per_node} a node, {profile.hardware.gpu}",
        f"profile   {profile.name} ({source})",
        *([f"graphs    none, because of {', '.join(launched)}"] if launched else []),
        "",
    ]


def table(plans: PlanSearch, count: int) -> Table:
    """The best plans, one a row; `rows` are the micro-batches of a replica."""
    numbers = ("pp", "dp", "tp", "rows", "ms", "tokens/s", "GiB", *PARTS)
    rows = bare_table(*numbers, "plan", right=numbers)
    for candidate in plans.running[:count]:
        rows.add_row(*_cells(candidate, plans.tokens))
    return rows


def dropped(plans: PlanSearch) -> list[str]:
    """Plans that cannot run, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for candidate in plans.dropped:
        reason = "does not fit into memory" if candidate.memory is not None else candidate.reason
        reasons.setdefault(reason, []).append(f"({candidate.plan.mesh})")
    lines = [f"{len(plans.running)} plans run; {len(plans.dropped)} do not"]
    for reason, meshes in reasons.items():
        lines.append(f"  {reason}: {first_of(list(dict.fromkeys(meshes)), 4, ' ')}")
    return lines


def idle(plans: PlanSearch) -> list[str]:
    """A note where the best plan has replicas for which a round has no sequence."""
    if not plans.running:
        return []
    mesh = plans.running[0].plan.mesh
    without = mesh.dp - plans.sequences
    if without <= 0:
        return []
    count = without * mesh.tp * mesh.pp
    note = (
        f"note: a round has {plans.sequences} sequences for the {mesh.dp} replicas of the first "
        f"plan, so {count} of {mesh.size} GPUs have nothing to do: larger batches would use them, "
        "or fewer GPUs do"
    )
    return [note]


def recomputing(plans: PlanSearch) -> list[str]:
    """A note where the best plan keeps a share of what layers keep: its price, and what else is."""
    best = plans.running[0] if plans.running else None
    if best is None or not best.plan.recompute_budget:
        return []
    # Cuts follow what is computed again.
    without = {"recompute": False, "recompute_budget": 0.0, "estimate": None, "cuts": ()}
    alike = {
        one.plan.recompute_budget if one.plan.recompute else None: one
        for one in plans.candidates
        if one.plan.model_copy(update=without) == best.plan.model_copy(update=without)
    }

    def told(candidate: Candidate) -> str:
        time, memory, whole = candidate.time, candidate.memory, alike[None].time
        assert time is not None
        assert memory is not None
        assert whole is not None
        more = time.seconds / whole.seconds - 1
        return f"{more:+.1%} time, {memory.total / GIB:.1f} GiB"

    budget = best.plan.recompute_budget
    note = (
        f"note: layers keep too much for their backward, {alike[None].reason}. The first plan has "
        f"--recompute-budget {budget:g}: {told(best)}. Whole layers computed again: "
        f"{told(alike[0.0])}. Prices of budgets are counted from operations, not measured"
    )
    return [note]


def _cells(candidate: Candidate, tokens: int) -> list[str]:
    plan, time, memory = candidate.plan, candidate.time, candidate.memory
    assert time is not None
    assert memory is not None
    words: list[str] = [plan.schedule] if plan.mesh.pp > 1 else []
    words += ["shard-base"] if plan.shard_base else []
    words += ["keep-gathered"] if plan.keep_gathered else []
    budget = f" {plan.recompute_budget:g}" if plan.recompute_budget else ""
    words += [f"recompute{budget}"] if plan.recompute else []
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
