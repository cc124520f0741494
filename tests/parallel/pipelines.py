"""Small models to be cut into stages, and rounds of rows that differ in everything."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from tests.runtime.groups import VOCABULARY, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.batch import JobTokens, PackedBatch, pack
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel import stage_graphs
from tlora_fx.parallel.apply import apply, part_of
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.prepare import prepared
from tlora_fx.parallel.stage_graphs import CapturedStage, StageGraphs
from tlora_fx.runtime.adapters.files import base_tensors

WEIGHTS = torch.tensor([0.1, 0.07, 0.02], dtype=torch.float64)
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Lengths of the sequences of each of three jobs, a micro-batch a line: jobs without tokens, a
# micro-batch without any, one sequence of one token.
LENGTHS = (
    ((5, 3), (4,), (6, 2)),
    ((2,), (), (3, 3, 3)),
    ((), (), ()),
    ((1,), (2, 2), (9, 9)),
)


@dataclass(frozen=True)
class Case:
    """A plan on a model.

    tp         cuts the model's graphs: no case on the same model runs after it, nor after a budget
    upper      the first layer with adapters
    compiled   layers are compiled
    sharded    the base is, over replicas; "kept": gathered weights are, to the end of a round
    replayed   rounds come again, with micro-batches that stand-ins for graphs run
    budget     share that layers keep for their backward; 0: all
    """

    pp: int
    cuts: tuple[int, ...]
    schedule: str = "1f1b"
    dp: int = 1
    tp: int = 1
    layers: int = 4
    upper: int = 0
    tied: bool = False
    compiled: bool = False
    sharded: str = ""
    replayed: bool = False
    budget: float = 0.0

    @property
    def plan(self) -> Plan:
        return Plan(
            planner="pipeline",
            mesh=MeshShape(pp=self.pp, dp=self.dp, tp=self.tp),
            cuts=self.cuts,
            schedule=self.schedule,
            shard_base=bool(self.sharded),
            keep_gathered=self.sharded == "kept",
            recompute=bool(self.budget),
            recompute_budget=self.budget,
        )

    def rounds(self) -> list[list[PackedBatch]]:
        """One round; under 1F1B also one of more micro-batches."""
        longer = self.schedule == "1f1b" and not self.compiled and self.tp == 1
        rounds = [rows_of(LENGTHS * self.dp), *([rows_of(LENGTHS * 2)] if longer else [])]
        return rounds * (4 if self.replayed else 1)


@dataclass
class Differences:
    """Of one rank from one process; losses and gradients relative, the largest of all.

    missing   halves of adapters without any gradient
    held      sites with adapters in this process
    sites     all sites
    replays   forwards and backwards that stand-ins for graphs ran
    """

    losses: float = 0.0
    gradients: float = 0.0
    missing: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    sites: set[str] = field(default_factory=set)
    replays: tuple[int, int] = (0, 0)


class Recomputed(CapturedStage):
    """Stands for a stage's graphs without a GPU: computes anew what they would replay.

    Like theirs, its tensors are overwritten by whatever comes to its slot.
    """

    replays: ClassVar[list[int]] = [0, 0]

    def first(self, hidden: Tensor | None) -> Tensor:
        return self.stage(hidden, self.row).contiguous()

    def capture(self, pool: Any, stream: Any) -> None:
        self._forward = cast(Any, "captured")

    def release(self) -> None:
        self._forward = None

    def replay(self, hidden: Tensor | None) -> Tensor:
        assert self._forward is not None
        self.replays[0] += 1
        needs = self.stage.needs_grad
        self._hidden = None if hidden is None else hidden.detach().clone().requires_grad_(needs)
        with torch.enable_grad(), self.model.weighing(self.weights):
            self._out = self.stage(self._hidden, self.row)
        return self._out.detach().clone()

    def replay_backward(self, dy: Tensor) -> Tensor | None:
        self.replays[1] += 1
        self._out.backward(dy)
        if self._hidden is None or not self.stage.needs_grad:
            return None
        assert self._hidden.grad is not None
        return self._hidden.grad.clone()


def replay(model: SuperModel, runner: Any) -> None:
    """Let a pipeline's stages run as stand-ins for graphs from the second time on."""
    stage_graphs.CapturedStage = Recomputed  # type: ignore[misc]
    StageGraphs._fits_memory = lambda *_: True  # type: ignore[method-assign]
    fakes: dict[str, Any] = {
        "graph_pool_handle": object, "current_stream": lambda device: None, "Stream": object,
        "device": lambda device: nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    Recomputed.replays[:] = [0, 0]
    pipeline = runner.inner
    pipeline.graphs = StageGraphs(model, pipeline.stages, torch.device("cpu"), 4096)


def compiled(folder: Path, layers: int, upper: int = 0, **base: Any) -> SuperModel:
    """Three jobs on a tiny Llama, with dropout.

    upper   the first layer with adapters
    """
    spec = tiny_base(folder, num_hidden_layers=layers, **base)
    where = {"layers_to_transform": list(range(upper, layers))} if upper else {}
    jobs = [
        make_job(spec, "a", lora={"r": 4, "lora_dropout": 0.2, **where}),
        make_job(spec, "b", lora={"r": 2, "target_modules": EVERY, **where}),
        make_job(spec, "c", lora={"r": 8, "lora_dropout": 0.1, **where}),
    ]
    return compile(jobs)


@cache
def compiled_once(folder: Path, layers: int, upper: int, tied: bool) -> SuperModel:
    return compiled(folder, layers, upper, tie_word_embeddings=tied)


def rows_of(lengths: Any = LENGTHS) -> list[PackedBatch]:
    """One row a micro-batch; each token counts on in its job's step."""
    draw = random.Random(5)
    offsets = [0, 0, 0]
    rows = []
    for line in lengths:
        tokens = []
        for job, sizes in enumerate(line):
            ids = [[draw.randrange(1, VOCABULARY) for _ in range(size)] for size in sizes]
            tokens.append(JobTokens(ids, ids, seed=job, step=3, offset=offsets[job]))
            offsets[job] += sum(sizes)
        rows.append(pack(tokens))
    return rows


def load(model: SuperModel, part: LocalShard | None = None) -> None:
    """Give a model weights, and adapters drawn from a seed, whatever part is held."""
    model.materialize(base_tensors(model.backbone), "cpu", part)
    for place, (_, bank) in enumerate(sorted(model.banks.items())):
        draw = torch.Generator().manual_seed(place)
        for leaf, cut in zip((bank.a, bank.b), bank.shards, strict=True):
            shard = model.part.shard(cut)
            shape = leaf.shape if shard is None else shard.full_shape(tuple(leaf.shape))
            values = torch.randn(shape, generator=draw, dtype=leaf.dtype) * 0.2
            if not leaf.is_meta:
                leaf.data.copy_(values if shard is None else shard.of(values))


def gradients(model: SuperModel) -> dict[str, torch.Tensor]:
    """The gradients of every bank that is held."""
    return {
        f"{path}.{half}": getattr(bank, half).grad
        for path, bank in model.banks.items()
        for half in "ab"
        if not getattr(bank, half).is_meta
    }


def pieces(model: SuperModel, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of all gradients those, or the pieces of those, that a model holds."""
    found = {}
    for name in gradients(model):
        path, _, half = name.rpartition(".")
        shard = model.part.shard(model.banks[path].shards["ab".index(half)])
        found[name] = whole[name] if shard is None else shard.of(whole[name])
    return found


@cache
def alone(
    folder: Path, layers: int, upper: int, tied: bool, count: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A round of so many rows in one process: losses and gradients."""
    made = compiled_once(folder, layers, upper, tied)
    model = SuperModel(made.group, made.backbone, made.jobs)
    load(model)
    total = torch.zeros_like(WEIGHTS)
    for row in rows_of(LENGTHS * (count // len(LENGTHS))):
        losses = model(row) * WEIGHTS
        losses.sum().backward()
        total += losses.detach()
    return total, gradients(model)


def references(folder: Path, case: Case) -> None:
    """Compute the rounds of a case in one process, before a plan changes the model's graphs."""
    for rows in case.rounds():
        alone(folder, case.layers, case.upper, case.tied, len(rows))


def differences(folder: Path, case: Case, uncut: Path | None = None) -> Differences:
    """How far rounds under a plan are from one process, by this rank.

    folder   of a model that the plan may change
    uncut    of the model of one process, which no plan changes; by default the same
    """
    plan = case.plan
    mesh = open_mesh(plan.mesh, "cpu")
    folder /= str(mesh.rank)
    whole = uncut / str(mesh.rank) if uncut else folder
    made = compiled_once(folder, case.layers, case.upper, case.tied)
    references(whole, case)
    own = prepared(SuperModel(made.group, made.backbone, made.jobs), plan)
    load(own, part_of(own, plan, mesh))
    if case.compiled:
        own.compile(backend="eager")
    runner = apply(own, plan, mesh)
    if case.replayed:
        replay(own, runner)
    found = Differences(sites=set(own.banks))
    for rows in case.rounds():
        for grad in gradients(own).values():
            grad.zero_()
        losses, given = runner.run(rows, WEIGHTS), gradients(own)
        expected, every = alone(whole, case.layers, case.upper, case.tied, len(rows))
        wanted = pieces(own, every)
        found.losses = max(found.losses, _apart(losses, expected))
        found.gradients = max([found.gradients, *(_apart(given[n], wanted[n]) for n in given)])
        found.missing = [name for name in given if not given[name].any()]
        found.held = {name.rpartition(".")[0] for name in given}
    found.replays = (Recomputed.replays[0], Recomputed.replays[1])
    return found


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
