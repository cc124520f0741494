"""One process of a group: trains what its config says, and writes how it goes into an event log.

It runs `Trainer` as `tlora-fx train` does. SIGTERM drains it: the round is finished, a checkpoint
written, and the process ends.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import time
import traceback
from collections.abc import Container, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

import tlora_fx.passes
import tlora_fx.planners
from tlora_fx.compiler import compile, prepare
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import JobsDiffer, NotAdmitted, OutOfMemory, TloraError
from tlora_fx.host.quiet_import import quiet_import
from tlora_fx.host.storage import is_full, waits_for_room
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.slots import rounded
from tlora_fx.parallel.apply import let_go
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import load_extension
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.callbacks import Callbacks, EachInTurn, TrainerCallback, callback_named
from tlora_fx.runtime.checkpoints.store import Checkpoint, ResumeSources
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.clocks import JobClocks, kept_clocks
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.isolation import is_out_of_memory
from tlora_fx.runtime.launching.launch import (
    Launch,
    exits_at_once,
    join,
    let_segments_grow,
)
from tlora_fx.runtime.optim.trainable import require_trainable
from tlora_fx.runtime.trainer import Trainer, TrainerOptions
from tlora_fx.runtime.workers.job_files import absent_files, is_about_files
from tlora_fx.runtime.workers.protocol import (
    DISK_FULL,
    FILES_ABSENT,
    NEEDS_NEW_PROCESS,
    OUT_OF_MEMORY,
    SUCCESSOR,
    EventWriter,
    WorkerConfig,
)

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.data.samples import JobData
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
    if launch.size > 1 and _kept and not _fits(_kept[0], config):
        # What processes share is made anew by new ones.
        raise SystemExit(NEEDS_NEW_PROCESS)
    exits_at_once(lambda: _train(config, launch), launch, stay=lambda: bool(_kept))
    return True


@waits_for_room()
def _train(config: WorkerConfig, launch: Launch) -> None:
    """What each process does; the first one writes events."""
    events = EventCallback(config) if launch.rank == 0 else None
    try:
        with suppress(KeyboardInterrupt):
            trainer = _trainer(config, launch, events)
            with suppress(KeyboardInterrupt):
                trainer.run()
            keep(trainer)
    except (TloraError, OSError) as error:
        if is_full(error):
            traceback.print_exc()
            raise SystemExit(DISK_FULL) from error
        if is_about_files(error) and (absent := absent_files(config.jobs)):
            # No job is at fault: they go on once their files are back.
            if events is not None:
                events.writer.write("failed", reason=str(error), job=None, absent=absent)
            traceback.print_exc()
            raise SystemExit(FILES_ABSENT) from error
        if isinstance(error, OSError):
            raise
        if events is not None:
            job = error.facts.get("job")
            events.writer.write("failed", reason=str(error), job=job)
        raise SystemExit(OUT_OF_MEMORY if isinstance(error, OutOfMemory) else str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise SystemExit(OUT_OF_MEMORY) from error
    if events is not None:
        events.writer.write("ended")


# The model that this process keeps between orders, with weights, compiled code and graphs.
#
# It is open at the sites of the jobs that it was compiled for. Jobs of the next order that fit join
# it as data; for others it is compiled again, by new processes where the group has several. A base
# has one model at a time in a process. The processes of a group stay together, each with its part
# of the model, and joined as they are.

#: Slots, and rows for a job, of a model that stays.
SLOTS = 16
#: The least rank that its slots can hold: what kernels pad ranks to.
MIN_RANK = 16
_kept: list[SuperModel] = []


def keep(trainer: Trainer) -> None:
    """Keep a trainer's model for the next order, if it is open and ran."""
    _kept[:] = [trainer.model] if trainer.model.applied is not None else []


def stays() -> bool:
    """Whether this process is worth keeping for another order.

    What is alive after one is not looked through again after the next: that is some .4 s.
    """
    gc.collect()
    gc.freeze()
    return bool(_kept)


def memory() -> tuple[int, int]:
    """Bytes that this process holds on its GPU, and that are free there.

    On a CPU those of main memory that no other process shares; nobody asks it what is free.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    with Path("/proc/self/smaps_rollup").open(encoding="ascii") as file:
        sizes = [int(line.split()[1]) for line in file if line.startswith("Private_")]
    return sum(sizes) << 10, 0


def _jobs(config: WorkerConfig) -> list[Job]:
    return [Job.model_validate(job) for job in config.jobs]


def _fits(model: SuperModel, config: WorkerConfig) -> bool:
    """Whether an order's jobs can join a model; whoever carries it out tells what is wrong."""
    try:
        for extension in config.extensions:
            load_extension(extension)
        return _joined(model, _jobs(config))
    except TloraError:
        return False


def _model(jobs: list[Job], config: WorkerConfig) -> SuperModel:
    """The model that is kept, or a new one."""
    for extension in config.extensions:
        load_extension(extension)
    if _kept and _joined(_kept[0], jobs):
        return _kept[0]
    if _kept:
        let_go(_kept.pop())
        gc.unfreeze()
        gc.collect()
    if not config.stays:
        return compile(jobs, config.pipeline)
    try:
        return compile(jobs, config.pipeline, open=_slots_for(jobs))
    except NotAdmitted:
        # Such as DoRA: what one job alone has keeps its own structure.
        return compile(jobs, config.pipeline)


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
    """Slots for these jobs and for others like them.

    raises    NotAdmitted where one of them is of another structure
    """
    given = prepare(jobs)
    sites = [site for own in given.sites for site in own.values()]
    if any(site.kind != "lora" for site in sites):
        raise NotAdmitted("these jobs stay as they are", help="they train without a model to keep")
    rank = max(MIN_RANK, rounded(max(site.rank for site in sites)))
    targets = tuple(sorted({site.path for site in sites}))
    dropout = any(site.dropout for site in sites)
    slots = max(SLOTS, len(jobs))
    return OpenSlots(targets, rows=slots * rank // 2, jobs=slots, rank=rank, dropout=dropout)


def _trainer(config: WorkerConfig, launch: Launch, events: EventCallback | None) -> Trainer:
    jobs = _jobs(config)
    device = _device(config, launch)
    everyone = Ranks(join(launch, device, Path(config.event_log).parent))
    clocks = _clocks(config)
    data = everyone.together(lambda: load_all_data(jobs, clocks))
    model = everyone.together(lambda: _model(jobs, config))
    plan = everyone.together(lambda: _plan(config, model, launch))
    sources = {job: Path(folder) for job, folder in config.sources.items()}
    trainer = Trainer(
        model,
        jobs,
        output=config.output,
        device=device,
        data=data,
        resume=ResumeSources(Path(config.job_folders), sources, config.save_seconds),
        plan=plan,
        callback=None if events is None else _callback(config, events),
        options=TrainerOptions(
            max_row_tokens=config.max_row_tokens,
            compiled=config.compiled,
            accept_changes=config.accept_changes,
            keeps=True,
            wait_for_compile=True,
        ),
    )
    if events is not None:
        events.trainer, trainer.looks = trainer, events.look
    return trainer


def _callback(config: WorkerConfig, events: EventCallback) -> TrainerCallback:
    """What writes the event log, and behind it the user's own; these hear as under `train`."""
    own = [callback_named(name) for name in config.callbacks]
    return EachInTurn(events, Callbacks(own, events.warned)) if own else events


def _device(config: WorkerConfig, launch: Launch) -> torch.device:
    if config.device != "cuda":
        return launch.device(config.device)
    device = torch.device("cuda", config.gpus[launch.rank])
    torch.cuda.set_device(device)
    # A process that stays alone on its GPU carries out such orders only, which shard nothing.
    let_segments_grow(device, launch)
    return device


def _plan(config: WorkerConfig, model: SuperModel, launch: Launch) -> Plan:
    """The plan of a layout, whose mesh says which planner made it; a kept model's is its own."""
    if model.applied is not None:
        plan: Plan = model.applied.plan
        return plan
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


class Arrivals(NamedTuple):
    """Samples of jobs that join, and the checkpoints that they go on from.

    absent   jobs that cannot join since their files cannot be read now, each with the reason
    """

    data: Mapping[str, JobData]
    states: Mapping[str, Checkpoint]
    absent: Mapping[str, str]


@dataclass(slots=True)
class Takeover:
    """The group that a running one shall become, as far as that is.

    config     its order
    joining    jobs that join
    arrivals   what is read of them while others train
    asked      the trainer knows
    seconds    that its jobs stood still for it
    """

    config: WorkerConfig
    joining: tuple[Job, ...]
    arrivals: Future[Arrivals]
    asked: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, path: Path, jobs: Container[str]) -> Self:
        """Takeover by an order; jobs are those that train."""
        config = WorkerConfig.read(path)
        every = [Job.model_validate(job) for job in config.jobs]
        joining = tuple(job for job in every if job.name not in jobs)
        # Of those that were here before, the trainer has the state itself.
        elsewhere = {
            job.name: Path(config.sources[job.name])
            for job in joining
            if config.sources.get(job.name, config.output) != config.output
        }
        sources = ResumeSources(Path(config.job_folders), elsewhere)
        arrivals: Future[Arrivals] = Future()
        if joining:
            arrivals = _reader.submit(_read_those_there, joining, sources, _clocks(config))
        else:
            # Who only leaves need not wait for another round.
            arrivals.set_result(Arrivals({}, {}, {}))
        return cls(config, joining, arrivals)

    def drop_absent(self) -> None:
        """Go on without jobs whose files cannot be read; raises what reading the others raised."""
        absent = self.arrivals.result().absent
        there = tuple(job for job in self.config.jobs if job["name"] not in absent)
        self.config = replace(self.config, jobs=there)
        self.joining = tuple(job for job in self.joining if job.name not in absent)


def _read_those_there(jobs: Sequence[Job], sources: ResumeSources, clocks: JobClocks) -> Arrivals:
    """Read what those jobs need whose files are there."""
    try:
        return Arrivals(*_read(jobs, sources, clocks), {})
    except (TloraError, OSError) as error:
        if not is_about_files(error):
            raise
        absent = absent_files(job.model_dump(mode="json") for job in jobs)
    if not absent:
        # What was gone is back, or the next error says what is wrong with it.
        return Arrivals(*_read(jobs, sources, clocks), {})
    there = [job for job in jobs if job.name not in absent]
    if not there:
        return Arrivals({}, {}, absent)
    others = _read_those_there(there, sources, clocks)
    return others._replace(absent={**absent, **others.absent})


def _read(
    jobs: Sequence[Job], sources: ResumeSources, clocks: JobClocks
) -> tuple[Mapping[str, JobData], Mapping[str, Checkpoint]]:
    """All that takes long of those who come: data, and beside it where they go on from."""
    beside = ThreadPoolExecutor(1, "checkpoints")
    states = beside.submit(sources.checkpoints)
    beside.shutdown(wait=False)
    data = load_all_data(jobs, clocks)
    for job in jobs:
        require_trainable(job, data[job.name].steps)
    return data, states.result()


def _clocks(config: WorkerConfig) -> JobClocks:
    """What time it is for the jobs of an order."""
    kept = kept_clocks({job: Path(folder) for job, folder in config.sources.items()})
    return (
        JobClocks(datetime.fromisoformat(config.now), kept) if config.now else JobClocks(kept=kept)
    )


_reader = ThreadPoolExecutor(1, "data")


class _Held(NamedTuple):
    """How a job stands in its newest checkpoint; `rung` is its evaluation loss at a rung."""

    step: int
    status: str
    reason: str
    rung: float | None


class EventCallback(TrainerCallback):
    """Writes what the trainer does into the event log, and hears whom its group shall become.

    config    the order that is carried out now
    trainer   that calls it
    """

    trainer: Trainer

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.writer = EventWriter(config.event_log)
        self.steps: dict[str, int] = {}
        self.names = {str(job["name"]) for job in config.jobs}
        self._next: Takeover | None = None
        self._declined = False
        self._committed: dict[str, _Held] = {}

    def started(self, runs: Sequence[JobRun]) -> None:
        self.steps = {run.job.name: run.step for run in runs}
        self.writer.write("started", steps=self.steps, process=os.getpid())

    def stepped(self, report: StepReport) -> None:
        self.steps[report.job] = report.step
        self.writer.progress(self._steps_of_mine())
        self.look()

    def evaluating(self) -> None:
        self.writer.write("evaluating")

    def evaluated(self, report: EvaluationReport) -> None:
        self.writer.write("evaluated")

    def sampled(self, report: SampleReport) -> None:
        self.writer.write("evaluated")

    def saving(self) -> None:
        self.writer.write("saving")

    def saved(self, path: Path, runs: Sequence[JobRun]) -> None:
        self._committed |= {
            run.job.name: _Held(
                run.step, run.status, run.reason, run.evaluation.rung_losses.get(run.step)
            )
            for run in runs
        }
        self._write_saved({run.job.name for run in runs})
        if self._next is not None and self._next.asked:
            self._next.seconds += self.trainer.checkpoints.save_seconds
            self._hand_over(self._next)

    def warned(self, text: str) -> None:
        self.writer.write("warned", text=text)

    def noted(self, text: str) -> None:
        self.warned(text)

    def _write_saved(self, names: Set[str]) -> None:
        mine = {name: self._committed[name] for name in sorted(names & self.names)}
        self.writer.write(
            "saved",
            steps={name: held.step for name, held in mine.items()},
            ended={
                name: [held.status, held.reason]
                for name, held in mine.items()
                if held.status not in ("running", "paused")
            },
            rungs={name: held.rung for name, held in mine.items() if held.rung is not None},
        )

    def _steps_of_mine(self) -> dict[str, int]:
        return {name: step for name, step in self.steps.items() if name in self.names}

    def look(self) -> None:
        """See whether the group shall become another one, and begin that."""
        if self._declined:
            return
        try:
            if self._next is None:
                pointer = Path(self.config.event_log).with_name(SUCCESSOR)
                if not pointer.exists():
                    return
                self._next = Takeover.of(Path(pointer.read_text()), self.names)
            if not self._next.asked and self._next.arrivals.done():
                self._next.drop_absent()
                self._ask(self._next)
        except Exception as error:  # noqa: BLE001  (those who train go on, whoever should come)
            self._decline(str(error))

    def _ask(self, takeover: Takeover) -> None:
        """Let jobs join and leave before the next round; all of them, or none."""
        begun, trainer = time.perf_counter(), self.trainer
        if not trainer.model.is_open:
            raise NotAdmitted("the running model has no slots for others", help="it is formed anew")
        config, arrivals = takeover.config, takeover.arrivals.result()
        try:
            for job in takeover.joining:
                source = config.sources.get(job.name)
                here = source == config.output and job.name in trainer.roster.states()
                resume = None if here else arrivals.states.get(job.name, source)
                trainer.admit(job, arrivals.data[job.name], resume=resume)
        except Exception:
            trainer.roster.cancel_join([job.name for job in takeover.joining])
            raise
        stay = {job["name"] for job in config.jobs}
        for run in trainer.runs:
            if run.status == "running" and run.job.name in self.names - stay:
                trainer.pause(run.job.name)
        takeover.asked, takeover.seconds = True, time.perf_counter() - begun
        # A checkpoint that is being written already hands nobody over.
        trainer.checkpoints.save_seconds = 0.0
        if not trainer.roster.changes:
            # Who leaves has paused by itself.
            self._hand_over(takeover)

    def _hand_over(self, takeover: Takeover) -> None:
        """Write into the other group's log from now on, once a checkpoint holds who is in it."""
        names = {str(job["name"]) for job in takeover.config.jobs}
        # What they have done since is in no checkpoint.
        status = {name: held.status for name, held in self._committed.items()}
        joining = {job.name for job in takeover.joining}
        if joining & set(self.trainer.roster.without_free_slots()):
            self.trainer.roster.cancel_join(joining)
            self._decline("the running model has no free slots for all of them")
            return
        left = all(status.get(name, "running") != "running" for name in self.names - names)
        if not left or any(status.get(name, "paused") == "paused" for name in joining):
            return
        seconds = takeover.seconds + self.trainer.change_seconds
        kept = {*takeover.config.keeps, *names}
        self.trainer.roster.forget(
            [run.job.name for run in self.trainer.runs if run.job.name not in kept]
        )
        self.writer.write("handed_over", absent=dict(takeover.arrivals.result().absent))
        self.config, self.names, self._next = takeover.config, names, None
        self.writer = EventWriter(self.config.event_log)
        for name in names & self._committed.keys():
            self.steps[name] = max(self.steps.get(name, 0), self._committed[name].step)
        steps = self._steps_of_mine()
        self.writer.write("started", steps=steps, process=os.getpid(), paused=seconds)
        self._write_saved(self._committed.keys())

    def _decline(self, reason: str) -> None:
        """The group stays as it is; whoever asked will form the other one anew."""
        self._next, self._declined = None, True
        self.writer.write("declined", reason=reason)
