"""One process of a group: trains what its order says, and tells how it goes.

It runs `Trainer` as `tlora-fx train` does. SIGTERM drains it: the round is finished, a checkpoint
written, and the process ends.
"""

from __future__ import annotations

import json
import pkgutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

import tlora_fx.passes
import tlora_fx.planners
from tlora_fx.compiler import compile, find_passes
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.durable import replace_file
from tlora_fx.errors import TloraError
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.checkpoint import ResumeSources
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launch import Launch, exits_at_once, join
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions
from tlora_fx.scheduler.requests import quiet_import

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.job_run import JobRun, StepReport


# What a worker is asked to train: a file, written before the worker is started.


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One formation of a group, for its worker.

    epoch            of the formation
    jobs             `Job.model_dump(mode="json")` of each, in the group's order
    sources          by job, the run folder whose newest checkpoint it goes on from
    output           run folder of the group: its checkpoints
    job_folders      folder of the jobs' own folders
    told             file that the worker appends its lines to
    device           "cpu" or "cuda"
    gpus             that the processes have, one each
    mesh             such as "dp=2"
    shard_base       the base is sharded over dp
    save_seconds     a checkpoint is due so long after the last one
    max_row_tokens   of one forward
    compiled         layers are compiled by torch.compile
    """

    epoch: int
    jobs: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, str]
    output: str
    job_folders: str
    told: str
    device: str = "cpu"
    gpus: tuple[int, ...] = (0,)
    mesh: str = ""
    shard_base: bool = False
    save_seconds: float = 60.0
    max_row_tokens: int = 16384
    compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Leave the order where its worker finds it."""
        replace_file(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The order in a file."""
        fields = json.loads(path.read_bytes())
        return cls(**{**fields, "jobs": tuple(fields["jobs"]), "gpus": tuple(fields["gpus"])})


# The lines that a worker tells: appended to a file, read while it grows.
#
# A file outlives both ends: a worker whose parent is gone writes on undisturbed, and a line that a
# kill has torn has no end and is never read.


class EventWriter:
    """Appends lines, for a worker.

    every_seconds   progress is told at most so often
    """

    def __init__(self, path: Path | str, every_seconds: float = 0.2) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (open while it trains)
        self._every = every_seconds
        self._told_at = 0.0

    def tell(self, kind: str, **facts: Any) -> None:
        """Append one line, with the time of day."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts})
        self._file.write(line.encode() + b"\n")

    def progress(self, steps: Mapping[str, int]) -> None:
        """Tell the steps done, unless that was told a moment ago."""
        now = time.monotonic()
        if now - self._told_at >= self._every:
            self._told_at = now
            self.tell("progress", steps=dict(steps))


class EventReader:
    """Reads the lines of a file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def lines(self) -> list[dict[str, Any]]:
        """What was told since the last call; a line without its end waits."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def warm() -> None:
    """Import what training will import."""
    quiet_import("peft", "transformers", "transformers.models.llama.modeling_llama")
    find_passes()
    for module in pkgutil.iter_modules(tlora_fx.planners.__path__):
        import_module(f"tlora_fx.planners.{module.name}")


def main(path: Path) -> bool:
    """Train the jobs of an order until they are done or somebody asks to stop.

    returns   whether that was possible: a fork of a process that has asked the driver for GPUs
              cannot use any
    """
    order = WorkerConfig.read(path)
    if order.device == "cuda" and torch.cuda._is_in_bad_fork():
        return False
    launch = Launch.found()
    exits_at_once(lambda: _train(order, launch), launch)
    return True


def _train(order: WorkerConfig, launch: Launch) -> None:
    """What each process does; the first one tells."""
    teller = EventWriter(order.told) if launch.rank == 0 else None
    try:
        with suppress(KeyboardInterrupt):
            _trainer(order, launch, teller).run()
    except TloraError as error:
        if teller is not None:
            job = error.facts.get("job")
            teller.tell("failed", reason=str(error), job=job)
        raise SystemExit(str(error)) from error
    if teller is not None:
        teller.tell("ended")


def _trainer(order: WorkerConfig, launch: Launch, teller: EventWriter | None) -> Trainer:
    jobs = [Job.model_validate(job) for job in order.jobs]
    device = _device(order, launch)
    everyone = Ranks(join(launch, device))
    data = everyone.together(lambda: load_all_data(jobs))
    model = everyone.together(lambda: compile(jobs))
    plan = everyone.together(lambda: _plan(order, model, launch))
    sources = {job: Path(folder) for job, folder in order.sources.items()}
    return Trainer(
        model,
        jobs,
        output=order.output,
        device=device,
        data=data,
        resume=ResumeSources(Path(order.job_folders), sources, order.save_seconds),
        plan=plan,
        callback=None if teller is None else _Telling(teller),
        options=TrainerOptions(max_row_tokens=order.max_row_tokens, compiled=order.compiled),
    )


def _device(order: WorkerConfig, launch: Launch) -> torch.device:
    if order.device != "cuda":
        return launch.device(order.device)
    device = torch.device("cuda", order.gpus[launch.rank])
    torch.cuda.set_device(device)
    return device


def _plan(order: WorkerConfig, model: SuperModel, launch: Launch) -> Plan:
    """The plan of a layout: its mesh says which planner made it."""
    shape = MeshShape.parse(order.mesh) if order.mesh else MeshShape(dp=launch.size)
    name = "replicated"
    if shape.pp > 1:
        name = "pipeline"
    elif order.shard_base:
        name = "fsdp"
    elif shape.tp > 1:
        name = "tensor"
    elif shape.size == 1:
        name = "single"
    options = {"max_row_tokens": order.max_row_tokens, "processes": launch.size}
    return find_planner(name).plan(model, shape, options=options)


class _Telling(TrainerCallback):
    """Tells the parent."""

    def __init__(self, teller: EventWriter) -> None:
        self.teller = teller
        self.steps: dict[str, int] = {}

    def started(self, runs: Sequence[JobRun]) -> None:
        """The first step begins."""
        self.steps = {run.job.name: run.step for run in runs}
        self.teller.tell("started", steps=self.steps)

    def stepped(self, report: StepReport) -> None:
        """A step is done; it is not safe yet."""
        self.steps[report.job] = report.step
        self.teller.progress(self.steps)

    def saved(self, path: Path, runs: Sequence[JobRun]) -> None:
        """All that is done is safe."""
        self.teller.tell(
            "saved",
            steps={run.job.name: run.step for run in runs},
            ended={run.job.name: [run.status, run.reason] for run in runs if _ended(run)},
        )

    def warned(self, text: str) -> None:
        """Something went wrong, and training goes on."""
        self.teller.tell("warned", text=text)


def _ended(run: JobRun) -> bool:
    return run.status != "running"
