"""One process of a group: trains what its config says, and writes how it goes into an event log.

It runs `Trainer` as `tlora-fx train` does. SIGTERM drains it: the round is finished, a checkpoint
written, and the process ends.
"""

from __future__ import annotations

import gc
import os
import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tlora_fx.passes
import tlora_fx.planners
from tlora_fx.compiler import compile, find_passes, prepare
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import JobsDiffer, NotAdmitted, TloraError
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.slots import rounded
from tlora_fx.pipeline import load_extension
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.callbacks import Callbacks, EachInTurn, TrainerCallback, callback_named
from tlora_fx.runtime.checkpoint import ResumeSources
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launch import Launch, exits_at_once, join
from tlora_fx.runtime.trainer import Trainer, TrainerOptions
from tlora_fx.scheduler.local.protocol import EventWriter, WorkerConfig
from tlora_fx.scheduler.requests import quiet_import

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.job_evaluation import EvaluationReport
    from tlora_fx.runtime.job_run import JobRun, SampleReport, StepReport


def warm() -> None:
    """Import what training will import."""
    quiet_import("peft", "transformers", "transformers.models.llama.modeling_llama")
    find_passes()
    for module in pkgutil.iter_modules(tlora_fx.planners.__path__):
        import_module(f"tlora_fx.planners.{module.name}")


def main(path: Path) -> bool:
    """Train the jobs of a config until they are done or somebody asks to stop.

    returns   whether that was possible: a fork of a process that has asked the driver for GPUs
              cannot use any
    """
    config = WorkerConfig.read(path)
    if config.device == "cuda" and torch.cuda._is_in_bad_fork():
        return False
    launch = Launch.found()
    exits_at_once(lambda: _train(config, launch), launch)
    return True


def _train(config: WorkerConfig, launch: Launch) -> None:
    """What each process does; the first one writes events."""
    writer = EventWriter(config.event_log) if launch.rank == 0 else None
    try:
        with suppress(KeyboardInterrupt):
            _trainer(config, launch, writer).run()
    except TloraError as error:
        if writer is not None:
            job = error.facts.get("job")
            writer.write("failed", reason=str(error), job=job)
        raise SystemExit(str(error)) from error
    if writer is not None:
        writer.write("ended")


# The model that this process keeps between orders, with weights, compiled code and graphs.
#
# It is open at the sites of the jobs that it was compiled for. Jobs of the next order that fit join
# it as data; for others it is compiled again. A base has one model at a time in a process.

#: Slots, and rows for a job, of a model that stays.
SLOTS = 16
#: The least rank that it has room for: what kernels pad ranks to.
LEAST_RANK = 16
_kept: list[SuperModel] = []


def stays() -> bool:
    """Whether this process is worth keeping for another order."""
    gc.collect()
    return bool(_kept)


def _model(jobs: list[Job], config: WorkerConfig, launch: Launch) -> SuperModel:
    for extension in config.extensions:
        load_extension(extension)
    if not config.stays or launch.size > 1:
        return compile(jobs, config.pipeline)
    if _kept and _joined(_kept[0], jobs):
        return _kept[0]
    _kept.clear()
    gc.collect()
    try:
        _kept.append(compile(jobs, config.pipeline, open=_slots_for(jobs)))
    except NotAdmitted:
        # Such as DoRA: what one job alone has keeps its own structure.
        return compile(jobs, config.pipeline)
    return _kept[0]


def _joined(model: SuperModel, jobs: Sequence[Job]) -> bool:
    """Whether these jobs, and nobody else, are in a model now."""
    for name in list(model.members):
        model.release(name)
    try:
        for job in jobs:
            model.admit(job, may_grow=False)
    except (NotAdmitted, JobsDiffer):
        return False
    return True


def _slots_for(jobs: Sequence[Job]) -> OpenSlots:
    """Room for these jobs and for others like them.

    raises    NotAdmitted where one of them is of another structure
    """
    given = prepare(jobs)
    sites = [site for own in given.sites for site in own.values()]
    if any(site.kind != "lora" for site in sites):
        raise NotAdmitted("these jobs stay as they are", help="they train without a model to keep")
    rank = max(LEAST_RANK, rounded(max(site.rank for site in sites)))
    targets = tuple(sorted({site.path for site in sites}))
    dropout = any(site.dropout for site in sites)
    slots = max(SLOTS, len(jobs))
    return OpenSlots(targets, rows=slots * rank // 2, jobs=slots, rank=rank, dropout=dropout)


def _trainer(config: WorkerConfig, launch: Launch, writer: EventWriter | None) -> Trainer:
    jobs = [Job.model_validate(job) for job in config.jobs]
    device = _device(config, launch)
    everyone = Ranks(join(launch, device))
    data = everyone.together(lambda: load_all_data(jobs))
    model = everyone.together(lambda: _model(jobs, config, launch))
    plan = everyone.together(lambda: _plan(config, model, launch))
    sources = {job: Path(folder) for job, folder in config.sources.items()}
    return Trainer(
        model,
        jobs,
        output=config.output,
        device=device,
        data=data,
        resume=ResumeSources(Path(config.job_folders), sources, config.save_seconds),
        plan=plan,
        callback=None if writer is None else _callback(config, writer),
        options=TrainerOptions(
            max_row_tokens=config.max_row_tokens,
            compiled=config.compiled,
            accept_changes=config.accept_changes,
        ),
    )


def _callback(config: WorkerConfig, writer: EventWriter) -> TrainerCallback:
    """What writes the event log, and behind it the user's own; these hear as under `train`."""
    events = EventCallback(writer)
    own = [callback_named(name) for name in config.callbacks]
    return EachInTurn(events, Callbacks(own, events.warned)) if own else events


def _device(config: WorkerConfig, launch: Launch) -> torch.device:
    if config.device != "cuda":
        return launch.device(config.device)
    device = torch.device("cuda", config.gpus[launch.rank])
    torch.cuda.set_device(device)
    return device


def _plan(config: WorkerConfig, model: SuperModel, launch: Launch) -> Plan:
    """The plan of a layout: its mesh says which planner made it."""
    shape = MeshShape.parse(config.mesh) if config.mesh else MeshShape(dp=launch.size)
    name = "replicated"
    if shape.pp > 1:
        name = "pipeline"
    elif config.shard_base:
        name = "fsdp"
    elif shape.tp > 1:
        name = "tensor"
    elif shape.size == 1:
        name = "single"
    options = {"max_row_tokens": config.max_row_tokens, "processes": launch.size}
    return find_planner(name).plan(model, shape, options=options)


class EventCallback(TrainerCallback):
    """Writes what the trainer does into the event log."""

    def __init__(self, writer: EventWriter) -> None:
        self.writer = writer
        self.steps: dict[str, int] = {}

    def started(self, runs: Sequence[JobRun]) -> None:
        self.steps = {run.job.name: run.step for run in runs}
        self.writer.write("started", steps=self.steps, process=os.getpid())

    def stepped(self, report: StepReport) -> None:
        self.steps[report.job] = report.step
        self.writer.progress(self.steps)

    def evaluating(self) -> None:
        self.writer.write("evaluating")

    def evaluated(self, report: EvaluationReport) -> None:
        self.writer.write("evaluated")

    def sampled(self, report: SampleReport) -> None:
        self.writer.write("evaluated")

    def saving(self) -> None:
        self.writer.write("saving")

    def saved(self, path: Path, runs: Sequence[JobRun]) -> None:
        self.writer.write(
            "saved",
            steps={run.job.name: run.step for run in runs},
            ended={run.job.name: [run.status, run.reason] for run in runs if _ended(run)},
        )

    def warned(self, text: str) -> None:
        self.writer.write("warned", text=text)

    def noted(self, text: str) -> None:
        self.warned(text)


def _ended(run: JobRun) -> bool:
    return run.status != "running"
