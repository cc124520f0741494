"""Models of one shape under several plans, in the processes of one run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tlora_fx
from benchmarks.interleaved import seconds_of, synchronize, turns
from benchmarks.step_mixes import ALPHA, RANKS, SEED, Shape
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.model.batch import JobTokens, PackedBatch, pack
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import StepRunner, apply, load, shards
from tlora_fx.parallel.mesh import Mesh, open_mesh
from tlora_fx.parallel.prepare import planned_passes, prepared
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters

RATE = 1e-4
Work = Callable[[], object]


@dataclass
class Planned:
    """A model that runs under a plan, with one fused AdamW over all adapters.

    optimizer   None in a stage without adapters
    before      bytes that were allocated on this device before it was made
    memory      bytes allocated on this device for it, before any step
    """

    model: SuperModel
    plan: Plan
    mesh: Mesh
    runner: StepRunner
    optimizer: torch.optim.Optimizer | None
    leaves: list[torch.nn.Parameter]
    before: int
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

    @property
    def graphs(self) -> Any:
        """Rows as CUDA graphs; None where none runs so."""
        return getattr(getattr(self.runner, "inner", self.runner), "graphs", None)


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
    targets: Any = "all-linear", largest_row: int = 0, traced: SuperModel | None = None,
) -> Planned:  # fmt: skip
    """Compile, prepare, load and apply; the processes of the mesh do it together.

    largest_row   tokens; where it is given, small rows run as CUDA graphs under plans that can
    traced        the same jobs as compiled; a plan that rewrites no graph runs over its graphs
    """
    if traced is None or planned_passes(plan):
        model = traced_model(shape, jobs, targets)
    else:
        model = SuperModel(traced.group, traced.backbone, traced.jobs)
    plan = plan.model_copy(update={"model": ""})
    model = prepared(model, plan)
    before = _allocated(mesh.device)
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    if compiled:
        model.compile()
    runner = apply(model, plan, mesh, largest_row=largest_row)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad and not leaf.is_meta]
    fused = mesh.device.type == "cuda"
    optimizer = torch.optim.AdamW(leaves, lr=RATE, fused=fused) if leaves else None
    memory = _allocated(mesh.device) - before
    return Planned(model, plan, mesh, runner, optimizer, leaves, before, memory)


def planned_for(
    shape: Shape, plan: Plan, given: Any, targets: Any = "all-linear", largest_row: int = 0
) -> Planned:
    """The same over all processes, compiled unless the command line says no."""
    return planned(
        shape, plan, mesh_of(plan), compiled=not given.eager, targets=targets,
        largest_row=largest_row,
    )  # fmt: skip


def traced_model(shape: Shape, jobs: int = 8, targets: Any = "all-linear") -> SuperModel:
    """The jobs compiled, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        return tlora_fx.compile(jobs_of(shape, Path(folder), jobs, targets))


def replanned(made: Planned, plan: Plan, *, largest_row: int = 0) -> Planned:
    """The same model with its weights under another plan that wants them so.

    made   not to be used any more
    plan   see `wants_same_weights`
    """
    let_go(made)
    plan = plan.model_copy(update={"model": ""})
    if shards(plan):
        for path in made.model.layer_order():
            layer: Any = made.model.net.get_submodule(path)
            layer.set_reshard_after_forward(not plan.keep_gathered, recurse=False)
        return replace(made, plan=plan)
    mesh = mesh_of(plan)
    runner = apply(made.model, plan, mesh, largest_row=largest_row)
    return replace(made, plan=plan, mesh=mesh, runner=runner)


def wants_same_weights(plan: Plan, other: Plan) -> bool:
    """Whether a model that was loaded and compiled for one plan can run under another as it is."""
    if plan.mesh.pp > 1 and shards(plan):
        return False
    free = {"planner": "", "micro_batches": 1, "keep_gathered": False, "estimate": None}
    alike = []
    for one in (plan, other):
        mesh = one.mesh if shards(one) else one.mesh.model_copy(update={"dp": 1})
        alike.append(one.model_copy(update=free | {"mesh": mesh}))
    return alike[0] == alike[1]


def let_go(made: Planned) -> None:
    """Free what graphs of rows hold."""
    if made.graphs is not None:
        made.graphs.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def held_bytes() -> int:
    """Allocated on this process's device now; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def rows_of(shape: Shape, tokens: int, length: int, parts: int, jobs: int = 8) -> list[PackedBatch]:
    """Rows of random tokens: `tokens` a row in sequences of one length, dealt to jobs in turn."""
    return [pack(row) for row in tokens_of(shape, tokens, length, parts, jobs)]


def tokens_of(
    shape: Shape, tokens: int, length: int, parts: int, jobs: int = 8
) -> list[list[JobTokens]]:
    """The same, before they are packed."""
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for part in range(parts):
        own: list[list[list[int]]] = [[] for _ in range(jobs)]
        for place in range(max(1, tokens // length)):
            ids = torch.randint(0, shape.vocabulary, (length,), generator=generator).tolist()
            own[(place + part) % jobs].append(ids)
        made.append([JobTokens(ids, ids, seed, 0) for seed, ids in enumerate(own)])
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
    return _opened(plan.mesh, device)


@cache
def _opened(shape: MeshShape, device: torch.device) -> Mesh:
    """One mesh for all plans on it: its groups are not made again."""
    return Mesh.alone(device) if shape.size == 1 else open_mesh(shape, device)


def timed(arms: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm, a figure a round: that of the slowest process."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _, name in turns(arms, rounds):
        found[name].append(once(arms[name]))
    return found


def once(work: Work) -> float:
    """Milliseconds of one call, from when all processes begin to when the last one ends."""
    synchronize()
    dist.barrier()
    return slowest(1e3 * seconds_of(work))


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
