"""Models of one shape under several plans, in the processes of one run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tlora_fx
from benchmarks.step_mixes import ALPHA, RANKS, SEED, Shape
from tlora_fx.batch import JobTokens, PackedBatch, pack
from tlora_fx.planners.apply import apply, load
from tlora_fx.planners.mesh import Mesh, open_mesh
from tlora_fx.planners.plan import Plan
from tlora_fx.planners.prepared import prepared
from tlora_fx.planners.protocol import StepRunner
from tlora_fx.runtime.adapters import start_adapters
from tlora_fx.runtime.weights import base_tensors
from tlora_fx.supermodel import SuperModel

RATE = 1e-4


@dataclass
class Planned:
    """A model that runs under a plan, with one fused AdamW over all adapters.

    optimizer   None in a stage without adapters
    memory      bytes allocated on this device for it, before any step
    """

    model: SuperModel
    plan: Plan
    mesh: Mesh
    runner: StepRunner
    optimizer: torch.optim.Optimizer | None
    leaves: list[torch.nn.Parameter]
    memory: int

    def step(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round and its update; the loss sums [J]."""
        losses = self.runner.run(rows, weights)
        self.update()
        return losses

    def update(self) -> None:
        """The optimizers' part."""
        if self.optimizer is not None:
            self.optimizer.step()
            torch._foreach_zero_([leaf.grad for leaf in self.leaves if leaf.grad is not None])


def jobs_of(shape: Shape, folder: Path, count: int, targets: Any = "all-linear") -> list[Any]:
    """Jobs on a base of a shape, with the ranks of `step.py` in turn."""
    shape.config(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    dtype: Any = shape.dtype
    base = tlora_fx.BaseSpec(config=folder, dtype=dtype, seed=SEED)
    made = []
    for place in range(count):
        lora = {"r": RANKS[place % len(RANKS)], "lora_alpha": ALPHA, "target_modules": targets}
        lora |= {"lora_dropout": shape.dropout}
        made.append(
            tlora_fx.Job(name=f"job-{place}", base=base, lora=lora, data={"path": "-"}, max_steps=9)
        )
    return made


def planned(
    shape: Shape, plan: Plan, mesh: Mesh, *, jobs: int = 8, compiled: bool = True,
    targets: Any = "all-linear",
) -> Planned:  # fmt: skip
    """Compile, prepare, load and apply; the processes of the mesh do it together."""
    with tempfile.TemporaryDirectory() as folder:
        model = tlora_fx.compile(jobs_of(shape, Path(folder), jobs, targets))
    plan = plan.model_copy(update={"model": ""})
    model = prepared(model, plan)
    before = _allocated(mesh.device)
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    if compiled:
        model.compile()
    runner = apply(model, plan, mesh)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad and not leaf.is_meta]
    fused = mesh.device.type == "cuda"
    optimizer = torch.optim.AdamW(leaves, lr=RATE, fused=fused) if leaves else None
    memory = _allocated(mesh.device) - before
    return Planned(model, plan, mesh, runner, optimizer, leaves, memory)


def rows_of(shape: Shape, tokens: int, length: int, parts: int, jobs: int = 8) -> list[PackedBatch]:
    """Rows of random tokens: `tokens` a row in sequences of one length, dealt to jobs in turn."""
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for part in range(parts):
        own: list[list[list[int]]] = [[] for _ in range(jobs)]
        for place in range(max(1, tokens // length)):
            ids = torch.randint(0, shape.vocabulary, (length,), generator=generator).tolist()
            own[(place + part) % jobs].append(ids)
        given = [JobTokens(ids, ids, seed, 0) for seed, ids in enumerate(own)]
        made.append(pack(given))
    return made


def weights_of(rows: Sequence[PackedBatch], device: torch.device) -> Tensor:
    """One over each job's targets in all rows; 0 for a job without any."""
    counts = sum((row.target_segments.diff().double() for row in rows), torch.zeros(1))
    return torch.where(counts > 0, 1 / counts.clamp(min=1), 0).to(device)


def captured(made: Planned, row: PackedBatch, weights: Tensor) -> Callable[[], object]:
    """Forward, backward and update over one row as a CUDA graph."""
    row = row.to(made.mesh.device)

    def step() -> None:
        (made.model(row) * weights).sum().backward()
        reduce = getattr(made.runner, "buckets", None)
        if reduce is not None:
            reduce.reduce()
        torch._foreach_zero_([leaf.grad for leaf in made.leaves if leaf.grad is not None])

    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> PackedBatch:
        graph.replay()
        if made.optimizer is not None:
            made.optimizer.step()
        # The graph reads the row's tensors, and knows nothing of their owner.
        return row

    return replay


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan over all processes; plans for one process run in each alone."""
    place = torch.cuda.current_device() if torch.cuda.is_available() else None
    device = torch.device("cuda", place) if place is not None else torch.device("cpu")
    return Mesh.alone(device) if plan.mesh.size == 1 else open_mesh(plan.mesh, device)


def slowest(milliseconds: float) -> float:
    """The largest of all processes' figures."""
    if not dist.is_initialized():
        return milliseconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    told = torch.tensor(milliseconds, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
