"""Rows as CUDA graphs under plans over several GPUs, in every process of a group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.test_row_graphs import row_of
from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.plan import MeshShape
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.batch import repeating_form
from tlora_fx.parallel.apply import apply, load
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.prepare import prepared
from tlora_fx.parallel.stage_graphs import StageGraphs
from tlora_fx.parallel.stages import StageModule, cut_stages
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SPLITS = [(2, 0, 3), (1, 3, 1), (0, 4, 1), (3, 1, 1), (2, 2, 1)]
Case = dict[str, Any]


def half_jobs(folder: Path, layers: int = 2, *, head: bool = False, **fields: Any) -> list[Job]:
    """Three jobs in bfloat16 with dropout, all of whose operators can be captured.

    head    adapters on the head too; it computes its losses in several chunks
    """
    sizes = {"vocab_size": 64} if head else {}
    base = _half_base(folder / f"half-base{head:d}", layers, sizes)
    targets: Any = ["q_proj", "down_proj", "lm_head"] if head else "all-linear"
    lora = {"r": 8, "lora_dropout": 0.1, "target_modules": targets}
    common = {"learning_rate": 1e-3} | fields
    return [make_job(base, name, seed=n, lora=lora, **common) for n, name in enumerate("abc")]


def _half_base(folder: Path, layers: int, sizes: dict[str, int]) -> BaseSpec:
    """Written by one process while no other reads it."""
    together = dist.is_initialized()
    if together:
        dist.barrier()
    if not together or dist.get_rank() == 0:
        tiny_base(folder, num_hidden_layers=layers, **(WIDE | sizes))
    if together:
        dist.barrier()
    return BaseSpec(config=folder, dtype="bfloat16", seed=7)


def replay_rounds(folder: Path, case: Case) -> dict[str, Any]:
    """Rounds as graphs beside the same rounds launched, with updates of weights in between.

    case      planner, mesh, options of the planner, compiled, layers; micro_batches of a replica;
              how many seeds and splits rows are made of
    returns   what was refused, forms that were captured, rounds in which every row was replayed,
              and the largest differences of losses, and of gradients relative to their norm
    """
    model, runner, mesh = _loaded(folder, case)
    inner: Any = getattr(runner, "inner", runner)
    graphs = inner.graphs
    assert graphs is not None
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad and not leaf.is_meta]
    weights = torch.tensor([0.5, 2.0, 1.0], device=mesh.device)
    parts = mesh.shape.dp * case.get("micro_batches", 1)
    return _beside_launched(runner, graphs, leaves, weights, parts, case)


def _beside_launched(
    runner: Any, graphs: Any, leaves: list[Any], weights: Tensor, parts: int, case: Case
) -> dict[str, Any]:
    replayed, losses, gradients = 0, 0.0, 0.0
    seeds = case.get("seeds", 4)
    splits = itertools.cycle(SPLITS[: case.get("splits")])
    for seed, counts in zip(range(case.get("rounds", 30)), splits, strict=False):
        rows = [row_of(seed % seeds + place % 2, counts) for place in range(parts)]
        known = len(graphs.keys)
        graphs.largest_row = 256
        found = _round(runner, rows, weights, leaves)
        graphs.largest_row = 0
        expected = _round(runner, [repeating_form(row) for row in rows], weights, leaves)
        replayed += len(graphs.keys) == known > 0
        losses = max(losses, float((found[0] - expected[0]).abs().max()))
        for one, two in zip(found[1:], expected[1:], strict=True):
            gradients = max(gradients, float((one - two).norm() / (two.norm() + 1e-6)))
        generator = torch.Generator(weights.device).manual_seed(seed)
        with torch.no_grad():
            for leaf in leaves:
                step = torch.randn(leaf.shape, device=leaf.device, generator=generator)
                leaf.add_(step, alpha=0.02)
    told = {
        "refused": graphs.refused, "forms": len(graphs.keys), "replayed": replayed,
        "losses": losses, "gradients": gradients,
    }  # fmt: skip
    graphs.clear()
    return told


def replay_stages(folder: Path, *, compiled: bool) -> dict[str, Any]:
    """As `replay_rounds`, of two stages in one process, which has two micro-batches under way."""
    case = {"planner": "single", "mesh": "", "layers": 4, "compiled": compiled}
    model, _, mesh = _loaded(folder, case)
    stages = [StageModule(model, graph) for graph in cut_stages(model, (2,))]
    graphs = StageGraphs(model, stages, mesh.device, 256)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad and not leaf.is_meta]
    weights = torch.tensor([0.5, 2.0, 1.0], device=mesh.device)

    class Both:
        """Runs the micro-batches of a round."""

        def run(self, rows: Any, weights: Tensor) -> Tensor:
            graphs.begin(rows, weights)
            with model.weighing(weights):
                losses = [self.forward(number, row) * weights for number, row in enumerate(rows)]
                for number, loss in enumerate(losses):
                    loss.sum().backward()
                    losses[number] = loss.detach()
                    for index in range(len(stages)):
                        graphs.done(index, number)
            # A capture must find no gradient's accumulator of another stream alive.
            del loss
            graphs.end()
            return sum(losses)

        def forward(self, number: int, row: Any) -> Any:
            value, moved = None, row.to(mesh.device)
            for index, stage in enumerate(stages):
                value = graphs.forward(index, number, value, partial(stage, value, moved))
            return value

    return _beside_launched(Both(), graphs, leaves, weights, 2, {"seeds": 3, "splits": 2})


def train_all_graphs(folder: Path, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Case after case, in one group of processes."""
    return {name: train_graphs(folder, case | {"name": name}) for name, case in cases.items()}


def train_graphs(folder: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's last losses with graphs and without, and how many forms were captured."""
    found: dict[str, Any] = {}
    for wanted in (True, False):
        jobs = half_jobs(folder, max_steps=16)
        model = compile(jobs)
        plan = _plan(model, case)
        trainer = Trainer(
            model, output=folder / f"{case['name']} {wanted}", data=make_data(jobs, longest=6),
            plan=plan, device=_device(), options=TrainerOptions(cuda_graphs=wanted),
        )  # fmt: skip
        runs = trainer.run()
        found["graphs" if wanted else "launched"] = [run.loss for run in runs]
        if trainer.graphs is not None:
            found["forms"] = trainer.graphs.captured
    return found


def train_in_turn(folder: Path, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Trainers one after the other on a model that is kept, beside the same on models of their own.

    returns   by case: how many forms had a graph after the first one, and after the second one,
              how many graphs were made in all, and the last losses of the second one, kept and not
    """
    return {name: _train_in_turn(folder / name, case) for name, case in cases.items()}


def _train_in_turn(folder: Path, case: Case) -> dict[str, Any]:
    jobs = half_jobs(folder, max_steps=12)
    data = make_data(jobs, longest=6)
    later = [job.model_copy(update={"name": f"{job.name}2"}) for job in jobs]
    more = {
        new.name: replace(data[old.name], job=new) for old, new in zip(jobs, later, strict=True)
    }

    def train(model: Any, plan: Any, own: list[Job], samples: Any, output: str) -> Trainer:
        trainer = Trainer(
            model, own, output=folder / output, data=samples, plan=plan, device=_device(),
            options=TrainerOptions(keeps=True),
        )  # fmt: skip
        trainer.run()
        return trainer

    model = compile(jobs, open=OpenSlots(jobs=len(jobs)))
    plan = _plan(model, case)
    first = train(model, plan, jobs, data, "first")
    kept, forms = first.model, [len(first.graphs.keys)]
    for name in list(kept.members):
        kept.release(name)
    for job in later:
        kept.admit(job, may_grow=False)
    second = train(kept, plan, later, more, "second")
    assert second.graphs is first.graphs
    forms.append(len(second.graphs.keys))
    made = second.graphs.captured
    fresh = compile(later, open=OpenSlots(jobs=len(jobs)))
    other = train(fresh, _plan(fresh, case), later, more, "fresh")
    # Processes part in peace when no graph is left.
    for each in (second, other):
        each.graphs.clear()
    return {
        "forms": forms, "made": made, "kept": [run.loss for run in second.runs],
        "fresh": [run.loss for run in other.runs],
    }  # fmt: skip


def _loaded(folder: Path, case: Case) -> tuple[Any, Any, Any]:
    model = compile(half_jobs(folder, case.get("layers", 2), head=case.get("head", False)))
    plan = _plan(model, case)
    mesh = open_mesh(plan.mesh, _device())
    model = prepared(model, plan)
    if case.get("head"):
        model._loss().chunk_rows = 16
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    _shake(model)
    if case.get("compiled"):
        model.compile()
    return model, apply(model, plan, mesh, largest_row=256), mesh


def _shake(model: Any) -> None:
    """Make both halves of adapters other than zero; alike on all processes for alike shapes."""
    generator = torch.Generator().manual_seed(5)
    for leaf in model.parameters():
        if leaf.requires_grad and not leaf.is_meta:
            leaf.data.add_(torch.randn(leaf.shape, generator=generator).to(leaf.data) * 0.05)


def _plan(model: Any, case: Case) -> Any:
    shape = MeshShape.parse(case["mesh"])
    return find_planner(case["planner"]).plan(model, shape, options=case.get("options"))


def _round(runner: Any, rows: Any, weights: Any, leaves: Any) -> list[Any]:
    told = [runner.run(rows, weights), *(leaf.grad.clone() for leaf in leaves)]
    torch._foreach_zero_([leaf.grad for leaf in leaves])
    return told


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}"
