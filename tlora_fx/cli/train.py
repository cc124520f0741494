"""`tlora-fx train`: train all jobs of a file together."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_fx.cli.arguments.options import option, takes_options
from tlora_fx.cli.arguments.start_options import (
    StartOptions,
    arrange,
    plan_name,
    read_base_ahead,
    read_jobs,
    require_start,
    start_processes,
)
from tlora_fx.cli.terminal import Console, bare_table, print_whole
from tlora_fx.host import phases
from tlora_fx.host.phases import phase

if TYPE_CHECKING:
    from tlora_fx.cli.bars import Bars
    from tlora_fx.config.job import Job
    from tlora_fx.cost.plan import Estimate, Plan
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.auto_plan import PlanBasis
    from tlora_fx.runtime.callbacks import TrainerCallback
    from tlora_fx.runtime.controllers import NanoBatches
    from tlora_fx.runtime.job_run import JobRun
    from tlora_fx.runtime.launching.launch import Launch
    from tlora_fx.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(StartOptions):
    """Options of the command line."""

    output: Path = option(
        ..., "Output folder for adapters, metrics and checkpoints.", "-o", "--output"
    )
    resume: bool = option(
        False, "Continue from the newest checkpoint in the output folder.", "--resume/--no-resume"
    )
    accept_changes: bool = option(
        False, "Resume even if data, base model or settings have changed."
    )
    whole_base: bool = option(
        False,
        "When resuming, check that no byte of the base weights has changed; if not given, some "
        "blocks of each tensor are checked.",
    )
    replan: bool = option(
        False,
        "When resuming, switch to the plan that the run has proposed (proposed-plan.json in the "
        "output folder).",
    )
    wait_for_compile: bool = option(
        True,
        "With --compile: compile the layers before the first round, or in another process while "
        "the first rounds run.",
    )
    controller: str | None = option(
        None,
        "How to choose the number of nano-batches while training: keep-best (the fastest one that "
        "was measured), aimd (the rule of the paper) or fixed; if not given, the number stays as "
        "it is.",
    )
    callback: list[str] | None = option(
        None,
        "Class of your own to call at events of the run: a subclass of tlora_fx.TrainerCallback, "
        "as FILE.py:CLASS; repeatable.",
    )
    push_to_hub: str | None = option(
        None,
        "Upload the adapters of finished jobs to the Hugging Face Hub as USER/JOB, for this USER; "
        "new repositories are private.",
    )
    collective_timeout: float = option(
        300,
        "Seconds that a process waits for the others before it gives up. The first round, which "
        "compiles, has more time.",
        min=1,
    )


@takes_options
def run(options: TrainOptions) -> None:
    """Train all jobs of a file together on one frozen base, each for its own number of steps.

    Writes a folder for each job, with its PEFT adapter, metrics.jsonl and status.json, and
    checkpoints. A round is one optimizer step of every job. A row is the packed tokens of all jobs
    that one forward pass takes; a round has one or more rows.

    --gpus 4, or --gpus all, trains on several GPUs of this machine: one process for each, and all
    train one model, which a plan divides among them. On several machines torchrun starts the
    processes:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m tlora_fx train jobs.yaml -o runs/a
    """
    # What Python and the command line have imported until now.
    phases.begin(began := phases.process_began()).add("imports", began)

    from tlora_fx.runtime.run_folder import hold_early, require_begun, require_free, require_new

    # Importing torch takes seconds; what can be said before them is. One process says it for all.
    leads, again = os.environ.get("RANK", "0") == "0", "TORCHELASTIC_RESTART_COUNT"
    if leads and os.environ.get(again, "0") == "0":
        require_free(options.output)
        (require_begun if options.resume else require_new)(options.output)
    with phase("checks"):
        jobs = _require_right(options) if leads else ()
    resumes = options.resume or os.environ.get(again, "0") != "0"
    with hold_early(options.output, resumes) if leads else nullcontext():
        _run(options, jobs, leads=leads)


def _run(options: TrainOptions, jobs: Sequence[Job], *, leads: bool) -> None:
    """Train jobs that were checked, in a folder that is held.

    leads   whether this process speaks for all
    """
    from tlora_fx.runtime.run_folder import how_to_go_on

    if options.gpus is not None:
        start_processes(options.gpus, options, lambda: how_to_go_on(options.output))
        leads = os.environ.get("RANK", "0") == "0"
        jobs = jobs if leads else ()
    read_base_ahead(jobs)

    from tlora_fx.cli.bars import Bars

    # One process speaks for all.
    with Bars(Console(stderr=True, quiet=not leads, highlight=False)) as bars:
        with phase("imports"):
            from tlora_fx.runtime.launching.launch import Launch, exits_at_once

        launch = Launch.found()
        plan = plan_name(options, launch)
        options = replace(options, plan=plan, resume=options.resume or launch.again)

        def work() -> None:
            # Whoever meets an error says it, and may end the process at once.
            with bars, _starting(options.output, () if options.resume else jobs):
                runs = _train(options, launch, bars, jobs)
            if any(job.status == "failed" for job in runs):
                sys.exit(1)

        exits_at_once(work, launch, lambda: how_to_go_on(options.output))


def _require_right(options: TrainOptions) -> Sequence[Job]:
    """The jobs, after all checks that need no torch."""
    from tlora_fx.runtime.launching import early_checks as early

    jobs = read_jobs(options)
    early.require_job_folders(jobs, options.output)
    early.require_controller(options.controller)
    early.require_callbacks(options.callback or ())
    if options.replan:
        early.require_replannable(resume=options.resume, plan=options.plan)
    require_start(options, jobs)
    early.require_data_and_base(jobs)
    return jobs


@contextmanager
def _starting(output: Path, jobs: Sequence[Job]) -> Iterator[None]:
    """Say in each job's folder that it starts; a run that came to no step leaves nothing behind."""
    from tlora_fx.runtime.run_folder import RunFolder

    folder, names = RunFolder(output), [job.name for job in jobs]
    try:
        folder.announce(names)
        yield
    except BaseException:  # Ctrl-C, too
        folder.withdraw(names)
        raise


def _train(
    options: TrainOptions, launch: Launch, bars: Bars, jobs: Sequence[Job]
) -> Sequence[JobRun]:
    with phase("imports"):
        from tlora_fx.runtime.callbacks import Callbacks, callback_named
        from tlora_fx.runtime.checks import unusual
        from tlora_fx.runtime.trainer import Trainer, TrainerOptions

    callbacks = [callback_named(name) for name in options.callback or ()]
    resumed = options.output if options.resume else None
    arranged = arrange(options, launch, bars, jobs, resumed=resumed, replan=options.replan)
    model, data, plan = arranged.model, arranged.data, arranged.plan
    for text in _warnings(options, plan, launch.size):
        bars.warned(text)
    for text in unusual(model.jobs, data, options.max_row_tokens):
        bars.warned(text)
    keepers = _keepers(options, launch, model, plan, arranged.basis, bars)
    trainer = arranged.everyone.together(
        lambda: Trainer(
            model,
            output=options.output,
            device=arranged.device,
            resume=options.resume,
            data=data,
            plan=plan,
            callback=Callbacks([bars, *callbacks, *keepers]),
            options=TrainerOptions(
                max_row_tokens=options.max_row_tokens,
                compiled=options.compiled,
                cuda_graphs=options.cuda_graphs,
                nano_batches=_controlled(options),
                longest_wait=timedelta(seconds=options.collective_timeout),
                accept_changes=options.accept_changes,
                whole_base=options.whole_base,
                wait_for_compile=options.wait_for_compile,
            ),
        )
    )
    try:
        runs = trainer.run()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_stopped(str(stop), options.output, launch)) from None
    bars.stop()
    if launch.rank == 0:
        _show(runs, options.output)
        for line in _notes(trainer):
            bars.console.print(line, markup=False)
        _push(runs, options.output, options.push_to_hub)
    return runs


def _push(runs: Sequence[JobRun], output: Path, user: str | None) -> None:
    """Push the adapters of all jobs that are done; raises HubError at the first that is not taken.

    What is trained stays in the run's folder, and `train --resume` pushes it again.

    user    of the hub; None: nothing is pushed
    """
    from tlora_fx.runtime.adapters.hub import ADAPTER_FILES, push

    for run in runs:
        if run.status == "done" and user is not None:
            name = run.job.name
            url = push(output / name, f"{user}/{name}", ADAPTER_FILES)
            Console(soft_wrap=True, highlight=False).print(url, markup=False)


def _stopped(how: str, output: Path, launch: Launch) -> str:
    """What is said after Ctrl-C: where the run stands, and the command that goes on with it."""
    from tlora_fx.runtime.run_folder import how_to_go_on

    if not how:
        return how_to_go_on(output)
    words = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
    command = "tlora-fx"
    if launch.size > 1 and launch.folder is None:
        command = f"torchrun --nproc-per-node {launch.per_machine} -m tlora_fx"
    return f"{how}\ngo on with: {command} {shlex.join(words)}"


def _keepers(
    options: TrainOptions,
    launch: Launch,
    model: SuperModel,
    plan: Plan,
    basis: PlanBasis | None,
    bars: Bars,
) -> list[TrainerCallback]:
    """What keeps a plan of `auto`; nothing for other plans."""
    if basis is None:
        return []
    from tlora_fx.runtime.auto_plan import NANO_BATCHES, PlanKeeper

    mesh = options.mesh_shape
    meshes = None if mesh is None else [mesh]
    per_node = launch.per_machine
    # Eager layers hide nothing, and a controller finds the number itself.
    counts = NANO_BATCHES if options.compiled and options.controller is None else ()
    return [PlanKeeper(options.output, model, plan, basis, per_node, meshes, bars.noted, counts)]


def _warnings(options: TrainOptions, plan: Plan, processes: int) -> Iterator[str]:
    # A plan that was made for one process is a file.
    if processes == 1 and options.plan == plan.planner != "single":
        yield f"plan {options.plan}: there is one process, which has the base whole; use --gpus"
    estimate = plan.estimate
    if estimate is not None and estimate.estimated:
        yield _estimated(options, estimate)
    if not options.compiled and (options.controller is not None or plan.nano_batches > 1):
        yield "nothing overlaps between nano-batches without --compile"
    if not options.wait_for_compile and not options.compiled:
        yield "--no-wait-for-compile does nothing without --compile"


def _estimated(options: TrainOptions, estimate: Estimate) -> str:
    """Warning of a plan whose times were not all measured."""
    if options.plan == "auto":
        return (
            "nobody has profiled this base here: the plan rests on a few seconds of measurements, "
            f"which predict {estimate.step_seconds:.2g} s a round; `tlora-fx profile` measures more"
        )
    return (
        f"the plan rests on estimated times ({estimate.profile}): `tlora-fx profile` measures "
        "them, then plan again"
    )


def _controlled(options: TrainOptions) -> NanoBatches | None:
    from tlora_fx.runtime.controllers import NanoBatches, find_controller

    if options.controller is None:
        return None
    fixed = {"count": options.nano_batches or 1} if options.controller == "fixed" else {}
    return NanoBatches(find_controller(options.controller, **fixed))


def _notes(trainer: Trainer) -> Iterator[str]:
    rows, graphs = trainer.group.bucketer, trainer.graphs
    if rows.padding:
        part = rows.padding / (rows.padding + rows.tokens)
        yield f"rows: {part:.1%} padding, so that their lengths come again"
    if graphs is not None and graphs.refused:
        yield f"rows did not run as CUDA graphs: {graphs.refused.splitlines()[0]}"
    elif graphs is not None and graphs.skipped_no_memory:
        yield f"rows: {graphs.skipped_no_memory} times there was no memory for a CUDA graph"


def _show(runs: Sequence[JobRun], output: Path) -> None:
    evaluated = any(job.evaluation.last for job in runs)
    titles = ["job", "status", "steps", "tokens", "last loss"]
    titles += ["last evaluation", "best step"] * evaluated
    table = bare_table(*titles, "adapter", right=("steps", "tokens"))
    for job in runs:
        evaluation = (_metrics(job), _best(job)) if evaluated else ()
        table.add_row(
            job.job.name,
            job.status,
            str(job.step),
            str(job.tokens),
            f"{job.loss:.4f}",
            *evaluation,
            str(output / job.job.name),
        )
    print_whole(Console(), table)


def _metrics(run: JobRun) -> str:
    """The last values of what the job was evaluated for."""
    last = run.evaluation.last
    names = [name for name in last if name not in ("eval_runtime", "train_loss")]
    return ", ".join(f"{name} {last[name]:.4f}" for name in names or last)


def _best(run: JobRun) -> str:
    evaluation = run.evaluation
    if evaluation.best_step is None:
        return ""
    return f"{evaluation.best_step}: {run.job.best_metric} {evaluation.best_value:.4f}"
