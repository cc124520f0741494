"""Options of `train` and `prepare`, and all of a start until weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_fx.cli.arguments.options import JobFilePath, PipelineOptions, option
from tlora_fx.host.phases import phase

if TYPE_CHECKING:
    import torch

    from tlora_fx.cli.bars import Bars
    from tlora_fx.config.job import Job
    from tlora_fx.cost.plan import MeshShape, Plan
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.auto_plan import PlanBasis
    from tlora_fx.runtime.clocks import JobClocks
    from tlora_fx.runtime.data.samples import JobData
    from tlora_fx.runtime.distributed import Ranks
    from tlora_fx.runtime.launching.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions(PipelineOptions):
    """Options of the command line that decide what a start does until the first step."""

    jobs: JobFilePath
    device: str | None = option(
        None,
        "Device to run on, such as cpu, cuda or cuda:1; if not given, each process takes a GPU, or "
        "the CPU if there is no GPU.",
    )
    max_row_tokens: int = option(
        16384,
        "Maximum tokens of a row, that is, of one forward pass. A larger micro-batch of a job has "
        "a row of its own.",
        min=2,
    )
    gpus: str | None = option(
        None,
        "Number of GPUs of this machine to train on, or all: starts a process for each. With "
        "--device cpu, a number of processes on the CPU. If not given, one process, or those that "
        "torchrun has started.",
    )
    plan: str | None = option(
        None,
        "How to divide the model among processes: single, replicated, fsdp, tensor, pipeline, auto "
        "(the fastest one that is predicted to fit), or a plan file; if not given, single for one "
        "process and auto for several. Without a profile of the base (`tlora-fx profile`) auto "
        "measures for a few seconds.",
    )
    mesh: str | None = option(
        None,
        "Numbers of pipeline stages (pp), replicas (dp) and tensor-parallel parts (tp), such as "
        "pp=2,dp=2; their product is the number of processes. If not given, the plan chooses.",
    )
    compiled: bool = option(False, "Compile the layers with torch.compile.", "--compile")
    nano_batches: int | None = option(
        None,
        "Number of parts (nano-batches) to cut each row into, so that one computes while another "
        "communicates; if not given, the number in the plan. A --controller other than fixed "
        "chooses the number instead.",
        min=1,
    )
    recompute_budget: float | None = option(
        None,
        "Share of the bytes of the layers' activations to keep for the backward, such as 0.6. What "
        "is cheapest to compute is computed again. 0 keeps only the inputs of the layers.",
        min=0,
        max=0.99,
    )
    shard_base: bool = option(
        False, "With --plan pipeline, divide the base weights of each stage among its replicas."
    )
    cuda_graphs: bool = option(True, "On a GPU, run small rows whose sizes recur as CUDA graphs.")

    @property
    def mesh_shape(self) -> MeshShape | None:
        """The mesh that is asked for; None: any."""
        from tlora_fx.cost.plan import MeshShape

        return None if self.mesh is None else MeshShape.parse(self.mesh)


def plan_name(options: StartOptions, launch: Launch) -> str:
    """The plan that is asked for, or the one that stands for none."""
    return options.plan or ("auto" if launch.size > 1 else "single")


def read_jobs(options: StartOptions) -> Sequence[Job]:
    """The jobs of the file; raises JobFileError, PipelineError."""
    from tlora_fx.config.job_file import load_job_file

    jobs = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code).jobs
    options.require_passes()
    return jobs


def require_start(options: StartOptions, jobs: Sequence[Job]) -> None:
    """Refuse a plan, a mesh or a number of processes that cannot be started, without torch.

    raises    TloraError
    """
    from tlora_fx.runtime.launching import early_checks as early

    early.require_device(options.device)
    if options.plan is not None:
        early.require_planner(options.plan)
    _require_cuts(options, jobs)


def _require_cuts(options: StartOptions, jobs: Sequence[Job]) -> None:
    """Refuse a number of processes, a mesh or a base that cannot be trained on."""
    from tlora_fx.host.gpus import visible_gpus
    from tlora_fx.runtime.launching import early_checks as early
    from tlora_fx.runtime.launching.local_launch import process_count, require_size

    if options.gpus is not None:
        processes = process_count(options.gpus, options.device)
    else:
        processes = early.processes_of_torchrun()
    mesh = early.mesh_of(options.plan, options.mesh, processes)
    under_torchrun = options.gpus is None and processes > 1
    if mesh is not None:
        require_size(mesh, processes, options.plan or "auto", under_torchrun=under_torchrun)
    early.require_cuts(jobs, mesh)
    if options.pipeline is None and not options.add_pass:
        early.require_one_model(jobs)
        on_cpu = options.device == "cpu" or not visible_gpus()
        early.require_base_fits(jobs, options.plan, processes, on_cpu=on_cpu)


def read_base_ahead(jobs: Sequence[Job]) -> None:
    """Begin to read the files of the jobs' base, which is loaded after all imports and checks."""
    from tlora_fx.config.base_files import weight_files
    from tlora_fx.host.read_ahead import read_ahead

    # A thread does not outlive a fork: the processes of `--gpus` come before it.
    if jobs and (files := weight_files(jobs[0].base)):
        read_ahead(files)


def start_processes(gpus: str, options: StartOptions, going_on: Callable[[], str]) -> None:
    """Go on as one of several processes, if so many are asked for; the caller waits for them.

    gpus       of `--gpus`
    going_on   what helps where a process was lost
    """
    from tlora_fx.runtime.launching import local_launch

    count = local_launch.process_count(gpus, options.device)
    if count > 1:
        local_launch.start_processes(count, going_on)


@dataclass(frozen=True, slots=True)
class Arranged:
    """A fused model, its data and its plan, the same on all processes; no weight is loaded yet.

    basis    what `auto` has chosen the plan by; None for other plans
    """

    everyone: Ranks
    device: torch.device
    model: SuperModel
    data: Mapping[str, JobData]
    plan: Plan
    basis: PlanBasis | None


def arrange(
    options: StartOptions,
    launch: Launch,
    bars: Bars,
    jobs: Sequence[Job],
    *,
    resumed: Path | None = None,
    replan: bool = False,
) -> Arranged:
    """Join the other processes, trace and fuse the jobs, read their data, and choose a plan.

    jobs      as the first process has read them; of the others nobody asks
    resumed   folder of the run that goes on
    replan    switch to the plan that it has proposed
    raises    TloraError
    """
    with phase("imports"):
        from tlora_fx.codegen.ahead import ahead
        from tlora_fx.runtime.clocks import JobClocks, clocks_in
        from tlora_fx.runtime.distributed import Ranks
        from tlora_fx.runtime.launching.launch import join, let_segments_grow, memory_bytes

    device = launch.device(options.device)
    let_segments_grow(device, launch)
    # What compiles kernels is ready by the time that it is needed.
    ahead.start(device, launch.per_machine)
    with phase("processes"):
        everyone = Ranks(join(launch, device))
    memory = memory_bytes(device, everyone)
    clocks = everyone.from_leader(JobClocks(kept=clocks_in(resumed) if resumed else {}))
    # A file that is edited meanwhile is read by nobody again: all train the same.
    jobs = everyone.from_leader(tuple(jobs))
    data, model = everyone.together(lambda: compiled_with_data(options, jobs, clocks))
    basis = None
    if options.plan == "auto" and not (model.layer_order() or replan):
        name = "single" if launch.size == 1 else "replicated"
        bars.noted(f"plan {name}: the base was compiled without layers, so none can be timed")
        options = replace(options, plan=name)
    if options.plan == "auto":
        from tlora_fx.runtime.auto_plan import plan_basis

        with phase("plan"):
            basis = plan_basis(
                model,
                data,
                everyone,
                launch,
                device,
                folder=resumed,
                mesh=options.mesh_shape,
                replan=replan,
                max_row_tokens=options.max_row_tokens,
                compiled=options.compiled,
                measuring=lambda: bars.noted("measuring a layer, to choose a plan"),
            )
    plan = everyone.together(lambda: planned(options, launch, memory, model, data, basis))
    bars.read({name: samples.report for name, samples in data.items()})
    if launch.size > 1:
        bars.console.print(f"plan: {plan.planner} on {plan.mesh}")
    return Arranged(everyone, device, model, data, plan, basis)


def compiled_with_data(
    options: StartOptions, jobs: Sequence[Job], clocks: JobClocks | None = None
) -> tuple[Mapping[str, JobData], SuperModel]:
    """The data and the compiled model; no weight is loaded yet.

    clocks    what time it is for each job; None: all start now
    raises    TloraError
    """
    with phase("imports"):
        from tlora_fx.compiler import compile
        from tlora_fx.runtime.checks import load_all_data
        from tlora_fx.tools.replay import keep_replay

    on_failure = partial(keep_replay, Path("tlora-fx-replay"))
    passes = options.passes()
    model = compile(jobs, passes, on_failure=on_failure)
    # What a job asks of the base is wrong more often than a late row of its data.
    return load_all_data(jobs, clocks), model


def planned(
    options: StartOptions,
    launch: Launch,
    memory: int | None,
    model: SuperModel,
    data: Mapping[str, JobData],
    basis: PlanBasis | None,
) -> Plan:
    """The plan, after all checks that need no weights."""
    from tlora_fx.errors import PlanNotRunnable
    from tlora_fx.parallel.prepare import require_fits
    from tlora_fx.runtime.checks import check_memory, longest_row
    from tlora_fx.runtime.data.batching import Cutting
    from tlora_fx.runtime.launching.launch import choose_plan

    assert options.plan is not None
    of_planner: dict[str, object] = {
        "max_row_tokens": options.max_row_tokens,
        "memory_bytes": memory,
    }
    if options.plan == "pipeline":
        of_planner["shard_base"] = options.shard_base
    if options.plan == "fsdp":
        cutting = Cutting.of(model, options.max_row_tokens)
        of_planner["longest_row"] = longest_row(model.jobs, data, cutting, launch.size)
        of_planner["compiled"] = options.compiled
    if basis is not None:
        of_planner |= {"round": basis.work, "longest": basis.longest}
    profile = None if basis is None else basis.profile
    if basis is not None and basis.kept is not None:
        plan = basis.kept
    else:
        plan = choose_plan(options.plan, model, launch, options.mesh_shape, of_planner, profile)
    if options.nano_batches is not None:
        plan = plan.model_copy(update={"nano_batches": options.nano_batches})
    if options.recompute_budget is not None:
        budget = {"recompute": True, "recompute_budget": options.recompute_budget}
        plan = plan.model_copy(update=budget)
    require_fits(model, plan.mesh)
    if options.shard_base and not plan.shard_base:
        raise PlanNotRunnable(
            "this plan holds the base whole on every replica",
            plan=f"{plan.planner} on {plan.mesh}",
            found="--shard-base",
            help="choose fsdp, or pipeline with a mesh that has dp, or leave --shard-base out",
        )
    check_memory(model, plan, data, options.max_row_tokens)
    return plan
