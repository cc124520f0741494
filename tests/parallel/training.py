"""Train small jobs under a plan, in every process of a group; what comes out lies in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist

from tests.runtime.groups import evaluations_of, losses_of, make_data, make_job, tiny_base
from tests.runtime.update_by_torch import updates_on_the_cpu
from tlora_fx import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import TloraError
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import StepRunner, apply, load
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.prepare import prepared
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.runtime.controllers import NanoBatches, find_controller
from tlora_fx.runtime.job_run import StepReport
from tlora_fx.runtime.round_end import RoundEnd
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Case = Mapping[str, Any]


def write_base(folder: Path, layers: int = 4) -> None:
    """A base of so many layers, in float64."""
    tiny_base(folder / "base", num_hidden_layers=layers)


def mixed_jobs(folder: Path, dtype: Any = "float64", **fields: Any) -> list[Job]:
    """Jobs that differ in tokens, rank, dropout, accumulation, length and kind; one ends early."""
    base = BaseSpec(config=folder / "base", dtype=dtype, seed=7)
    common: dict[str, Any] = {"lr_scheduler_type": "constant", "max_grad_norm": 0.05} | fields
    steps = common.setdefault("max_steps", 3)
    layers = json.loads((folder / "base" / "config.json").read_text())["num_hidden_layers"]
    upper = {"layers_to_transform": [*range(layers // 2, layers)]}
    evaluated: dict[str, Any] = {"eval_data": {"path": "unused.jsonl"}}
    best = evaluated | {"eval_steps": 1, "load_best_model_at_end": True}
    return [
        make_job(
            base, "wide", **best, per_device_train_batch_size=5, seed=1,
            lora={"r": 4, "lora_dropout": 0.2, "target_modules": EVERYWHERE}, **common,
        ),
        make_job(
            base, "slow", per_device_train_batch_size=1, gradient_accumulation_steps=3,
            per_device_eval_batch_size=2, **evaluated,
            lora={"r": 2, "target_modules": ["q_proj", "down_proj"], **upper}, **common,
        ),
        make_job(
            base, "short", lora={"r": 3, "modules_to_save": ["norm"]},
            **{**common, "max_steps": min(2, steps)},
        ),
        make_job(
            base, "norms", eval_steps=2, lora={"r": 2, "use_dora": True, **upper},
            **evaluated, **common,
        ),
    ]  # fmt: skip


def sampled_jobs(folder: Path, dtype: Any = "float64") -> list[Job]:
    """Jobs whose samples say what their losses read, beside a plain one."""
    base = BaseSpec(config=folder / "base", dtype=dtype, seed=7)
    common: dict[str, Any] = {"max_steps": 3, "eval_data": {"path": "unused.jsonl"}}
    return [
        make_job(base, "ppo", loss="ppo", gradient_accumulation_steps=2, **common),
        make_job(base, "gspo", loss="gspo", per_device_train_batch_size=3, seed=2, **common),
        make_job(base, "plain", seed=3, **common),
    ]


def quiet_jobs(folder: Path, dtype: Any = "float64") -> list[Job]:
    """Jobs with nothing to do between their steps, of which one breaks itself at its second."""
    base = BaseSpec(config=folder / "base", dtype=dtype, seed=7)
    common: dict[str, Any] = {"lr_scheduler_type": "constant", "max_steps": 6, "save_steps": 100}
    lora = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
    return [
        make_job(base, "calm", lora=lora, seed=3, **common),
        make_job(base, "wild", lora=lora | {"lora_alpha": 10**120}, **common),
        make_job(base, "steady", lora=lora | {"r": 4}, weight_decay=0.1, **common),
    ]


def sharded(
    folder: Path, processes: int, options: Mapping[str, Any]
) -> tuple[SuperModel, StepRunner]:
    """Two jobs on a base that is sharded over so many processes, of which this is one.

    options   of the planner `fsdp`
    """
    base = BaseSpec(config=folder / "base", dtype="float64", seed=7)
    lora = {"r": 2, "layers_to_transform": [1, 2, 3], "init_lora_weights": False}
    model = compile([make_job(base, name, lora=lora) for name in ("a", "b")])
    plan = find_planner("fsdp").plan(model, MeshShape(dp=processes), options=options)
    model, mesh = prepared(model, plan), open_mesh(plan.mesh, "cpu")
    load(model, plan, mesh, base_tensors(model.backbone))
    start_adapters(model)
    return model, apply(model, plan, mesh)


class Breaking(TrainerCallback):
    """Raises after a job's first step; only the leader hears of steps."""

    def __init__(self, job: str) -> None:
        self.job = job

    def stepped(self, report: StepReport) -> None:
        if report.job == self.job:
            raise ValueError("a callback that is broken")


def train(folder: Path, name: str, case: Case) -> list[tuple[str, float]]:
    """Train in this process, as one of its group.

    case      planner, mesh, options of the planner, fields of the jobs, resume, row_tokens; jobs,
              a function that makes others than `mixed_jobs`; fault, a job that breaks on the
              leader; at_once, whether jobs are updated as on a GPU; later, whether most rounds
              are looked at when the next one is on its way
    returns   each job's last loss as text, and a sum over the parameters that this process holds
    """
    make = case.get("jobs", mixed_jobs)
    jobs = make(folder, case.get("dtype", "float64"), **case.get("fields", {}))
    data = make_data(jobs)
    if case.get("other_data") and dist.get_rank() == dist.get_world_size() - 1:
        data = make_data(jobs, longest=7)
    model = compile(jobs)
    shape = MeshShape.parse(case.get("mesh", ""))
    plan = find_planner(case["planner"]).plan(model, shape, options=case.get("options"))
    trainer = Trainer(
        model, output=folder / name, data=data, plan=plan, device=_device(),
        resume=case.get("resume", False), callback=Breaking(case.get("fault", "")),
        options=TrainerOptions(
            max_row_tokens=case.get("row_tokens", 60),
            nano_batches=_deciding(case.get("controller")),
        ),
    )  # fmt: skip
    if case.get("compiled"):
        # True: as Dynamo sees it, without compiling.
        backend = "eager" if case["compiled"] is True else case["compiled"]
        trainer.model.compile(backend=backend)
    with (
        updates_on_the_cpu() if case.get("at_once") else nullcontext([1]) as launched,
        _ahead() as ahead,
    ):
        runs = trainer.run()
    assert launched, "nobody was updated at once"
    assert not case.get("later") or sum(ahead) > len(ahead) / 2, ahead
    return [
        (repr(run.loss), sum(float(p.detach().sum()) for p in run.parameters.values()))
        for run in runs
    ]


@contextmanager
def _ahead() -> Iterator[list[bool]]:
    """Yields of each round whether its update was launched and not looked at."""
    found: list[bool] = []
    step = RoundEnd.step

    def recorded(self: RoundEnd, *arguments: Any, **options: Any) -> Any:
        outside = step(self, *arguments, **options)
        found.append(bool(self.ahead))
        return outside

    with mock.patch.object(RoundEnd, "step", recorded):
        yield found


def train_all(folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Train case after case; an error of ours is what comes out of its case."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = train(folder, case.get("folder", name), case)
        except TloraError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def parting(folder: Path, one: str, two: str, jobs: Sequence[Job]) -> tuple[float, float]:
    """How far losses, and adapters relative to their norm, of two runs lie apart."""
    losses, adapters = 0.0, 0.0
    first, second = losses_of(folder / one, jobs), losses_of(folder / two, jobs)
    for job in jobs:
        mine, theirs = first[job.name], second[job.name]
        assert len(mine) == len(theirs) > 0, (job.name, len(mine), len(theirs))
        losses = max(losses, *(abs(a - b) for a, b in zip(mine, theirs, strict=True)))
        a, b = (_adapter(folder / run / job.name) for run in (one, two))
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            apart = torch.linalg.norm(tensor - b[name]) / torch.linalg.norm(tensor)
            adapters = max(adapters, float(apart))
    return losses, adapters


def evaluations_part(folder: Path, one: str, two: str, jobs: Sequence[Job]) -> float:
    """How far what two runs measured lies apart; they evaluated at the same steps."""
    first, second = (evaluations_of(folder / run, jobs) for run in (one, two))
    apart = 0.0
    for job in jobs:
        for mine, theirs in zip(first[job.name], second[job.name], strict=True):
            assert mine.keys() == theirs.keys()
            apart = max(apart, *(abs(mine[name] - theirs[name]) for name in mine))
    return apart


def _deciding(controller: str | None) -> NanoBatches | None:
    return NanoBatches(find_controller(controller)) if controller else None


def _device() -> str:
    """The GPU that this process of a group took, where groups are made on GPUs."""
    backend = str(dist.get_backend()) if dist.is_initialized() else ""
    return f"cuda:{torch.cuda.current_device()}" if "nccl" in backend else "cpu"


def _adapter(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")
