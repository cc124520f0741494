"""Jobs that come and go: a few that differ, a script of changes, and what each makes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.runtime.groups import VOCABULARY, make_data, make_job
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import JobsDiffer, NotAdmitted
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.data.samples import JobData, Sample
from tlora_fx.runtime.job_run import StepReport
from tlora_fx.runtime.trainer import Trainer

SLOTS = OpenSlots(rows=40, jobs=4, rank=16)
#: When (rounds done), what a trainer is asked for, and its arguments.
Event = tuple[Any, ...]


def coming_jobs(base: BaseSpec) -> dict[str, Job]:
    """Four jobs that differ in all that a running model may take."""
    drops = {"lora_dropout": 0.2}
    jobs = [
        make_job(base, "a", seed=1, lora={"r": 8, **drops}, max_steps=5),
        make_job(base, "b", seed=2, gradient_accumulation_steps=2, max_steps=4),
        make_job(
            base, "c", seed=3, optim="sgd", lora={"r": 3, "target_modules": "all-linear", **drops}
        ),
        make_job(
            base, "d", seed=4, max_grad_norm=0.1,
            lora={"r": 16, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]},
        ),
    ]  # fmt: skip
    return {job.name: job for job in jobs}


class Watch(TrainerCallback):
    """Keeps each job's adapter after each step, and asks for what its script says."""

    def __init__(self, script: Iterable[Event] = ()) -> None:
        self.script, self.trainer = list(script), None
        self.adapters: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.refused: list[Exception] = []
        self.warnings: list[str] = []

    def warned(self, text: str) -> None:
        self.warnings.append(text)

    def stepped(self, report: StepReport) -> None:
        run = next(run for run in self.trainer.runs if run.job.name == report.job)
        self.adapters[report.job, report.step] = adapter_tensors(run.parameters)
        while self.script and self.script[0][0] <= self.trainer.rounds:
            _, do, *arguments = self.script.pop(0)
            try:
                getattr(self.trainer, do)(*arguments)
            except (NotAdmitted, JobsDiffer) as error:
                self.refused.append(error)


def train(
    model: SuperModel,
    folder: Path,
    data: Mapping[str, JobData],
    script: Iterable[Event] = (),
    plan: Plan | None = None,
    device: str = "cpu",
) -> tuple[Trainer, Watch]:
    """Train the jobs of a model, and those who come."""
    watch = Watch(script)
    trainer = Trainer(model, output=folder, device=device, data=data, callback=watch, plan=plan)
    watch.trainer = trainer
    trainer.run()
    return trainer, watch


def empty(model: SuperModel, *jobs: Job) -> SuperModel:
    """The model with these jobs and nobody else."""
    for name in list(model.members):
        model.release(name)
    for job in jobs:
        model.admit(job)
    return model


def train_under(folder: Path, shapes: Mapping[str, str]) -> None:
    """Train under planner after planner, in every process of a group; jobs come and go.

    shapes   of the mesh, by planner
    """
    jobs = coming_jobs(BaseSpec(config=folder / "base", dtype="float64", seed=7))
    data = make_data(list(jobs.values()))
    for name, shape in shapes.items():
        model = compile([jobs["a"], jobs["b"]], open=SLOTS)
        plan = find_planner(name).plan(model, MeshShape.parse(shape))
        train(model, folder / name, data, coming_and_going(jobs, data), plan)


def coming_and_going(jobs: Mapping[str, Job], data: Mapping[str, JobData]) -> list[Event]:
    """A pause, whose rows another job takes, and a return that finds rows elsewhere."""
    return [
        (1, "pause", "a"),
        (1, "admit", jobs["d"], data["d"]),
        (2, "admit", jobs["c"], data["c"]),
        (3, "release", "b"),
        (3, "admit", jobs["a"], data["a"]),
    ]


def other_words(data: JobData) -> JobData:
    """As many samples of the same lengths, with other words."""
    samples = [
        Sample(
            tuple(1 + word % (VOCABULARY - 1) for word in sample.input_ids),
            tuple(label if label < 0 else 1 + label % (VOCABULARY - 1) for label in sample.labels),
        )
        for sample in data.samples
    ]
    return JobData(data.job, samples, data.report)


def unused(model: SuperModel) -> Tensor:
    """All numbers of banks that no job owns."""
    parts = []
    for bank in model.banks.values():
        assert bank.table is not None
        free = torch.ones(len(bank.a), dtype=torch.bool)
        for start, rank in zip(bank.table.offsets, bank.table.ranks, strict=False):
            free[start : start + rank] = False
        parts += [bank.a.detach()[free].flatten(), bank.b.detach()[free].flatten()]
    return torch.cat(parts)
