"""One process of a group: trains what its order says, and tells how it goes.

It runs `Trainer` as `tlora-fx train` does. SIGTERM drains it: the round is finished, a checkpoint
written, and the process ends.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tlora_fx.passes
import tlora_fx.planners
from tlora_fx.compiler import compile, find_passes
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import TloraError
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.carrying import Carried
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launch import Launch, exits_at_once, join
from tlora_fx.runtime.trainer import Silent, Trainer
from tlora_fx.scheduler.local.order import Order
from tlora_fx.scheduler.local.told import Teller
from tlora_fx.scheduler.quiet_import import quiet_import

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.job_run import JobRun, StepReport


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
    order = Order.read(path)
    if order.device == "cuda" and torch.cuda._is_in_bad_fork():
        return False
    launch = Launch.found()
    exits_at_once(lambda: _train(order, launch), launch)
    return True


def _train(order: Order, launch: Launch) -> None:
    """What each process does; the first one tells."""
    teller = Teller(order.told) if launch.rank == 0 else None
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


def _trainer(order: Order, launch: Launch, teller: Teller | None) -> Trainer:
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
        max_row_tokens=order.max_row_tokens,
        watch=None if teller is None else _Telling(teller),
        plan=plan,
        mesh=open_mesh(plan.mesh, device),
        compiled=order.compiled,
        carried=Carried(Path(order.job_folders), sources, order.save_seconds),
    )


def _device(order: Order, launch: Launch) -> torch.device:
    if order.device != "cuda":
        return launch.device(order.device)
    device = torch.device("cuda", order.gpus[launch.rank])
    torch.cuda.set_device(device)
    return device


def _plan(order: Order, model: SuperModel, launch: Launch) -> Plan:
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
    return find_planner(name).plan(model, shape, None, **options)


class _Telling(Silent):
    """A watcher that tells the parent."""

    def __init__(self, teller: Teller) -> None:
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
