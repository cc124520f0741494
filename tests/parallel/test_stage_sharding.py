"""Stages of a pipeline with a sharded base: what is gathered when, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from tests.parallel.processes import run_processes
from tests.parallel.test_fsdp import EMBEDDING, Watched
from tests.parallel.training import write_base
from tests.runtime.groups import VOCABULARY, make_job, tiny_base
from tlora_fx import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import apply, load, part_of
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters

MESH = MeshShape(pp=2, dp=2)
ROUNDS, MICRO_BATCHES = 2, 2
LOWEST = 1


def jobs_of(base: BaseSpec) -> list[Any]:
    """Two jobs with adapters in all layers but the first."""
    upper = {"layers_to_transform": [LOWEST, 2, 3], "init_lora_weights": False}
    return [make_job(base, name, lora={"r": 2, **upper}) for name in ("a", "b")]


def run_both(folder: Path) -> dict[str, dict[str, Any]]:
    """Weights let go of after each use; and kept, below a stage without any backward."""
    model = compile(jobs_of(BaseSpec(config=folder / "base", dtype="float64", seed=7)))
    kept = {"cuts": (LOWEST,), "keep_gathered": True}
    return {"used": run_staged(model, {"cuts": (2,)}), "kept": run_staged(model, kept)}


def run_staged(made: SuperModel, options: dict[str, Any]) -> dict[str, Any]:
    """Two rounds, and what this process gathered when."""
    given = {"shard_base": True, "micro_batches": MICRO_BATCHES} | options
    plan = find_planner("pipeline").plan(made, MESH, options=given)
    model = SuperModel(made.group, made.backbone, made.jobs)
    mesh = open_mesh(plan.mesh, "cpu")
    load(model, plan, mesh, base_tensors(model.backbone))
    start_adapters(model)
    held = part_of(model, plan, mesh).held or frozenset()
    runner = apply(model, plan, mesh)
    found = Watched(model)
    found.paths = [path for path in found.paths if path in held or path == held_table(held)]
    inner: Any = runner.inner  # type: ignore[union-attr]
    gathers = Gathers()
    for module in inner.sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gathers)
    for _ in range(ROUNDS):
        runner.run(rows(), torch.ones(2, dtype=torch.float64))
    noted = inner.sharded._get_fsdp_state()._comm_ctx.post_forward_order
    return {
        "stage": mesh.pp_rank, "forward": found.forward, "backward": found.backward,
        "after": found.gathered(), "gathers": gathers.count, "noted": len(noted),
        "local": sum(map(local_numel, model.net.parameters())),
        "whole": sum(p.numel() for p in model.net.parameters() if shardable(p)),
    }  # fmt: skip


class Gathers(AllGather):
    """Gathers as FSDP2 does, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.count += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def rows() -> list[Any]:
    return [
        pack([JobTokens([tuple(range(n))], [tuple(range(n))]) for n in (size, size + 2)])
        for size in (3, 5, 4, 6)
    ]


def held_table(held: frozenset[str]) -> str:
    return EMBEDDING if f"{EMBEDDING}.weight" in held else ""


def shardable(leaf: torch.Tensor) -> bool:
    return not leaf.requires_grad and leaf.dim() > 1 and not leaf.is_meta


def local_numel(leaf: Any) -> int:
    if not shardable(leaf):
        return 0
    return int(leaf.to_local().numel() if hasattr(leaf, "to_local") else leaf.numel())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both plans, by rank."""
    folder = tmp_path_factory.mktemp("stages")
    write_base(folder)
    return run_processes(4, run_both, folder)


def of_stage(told: list[dict[str, Any]], plan: str, stage: int) -> list[dict[str, Any]]:
    return [rank[plan] for rank in told if rank[plan]["stage"] == stage]


@pytest.mark.parametrize(("stage", "layers"), [(0, [0, 1]), (1, [2, 3])])
def test_one_layer_of_a_stage_is_gathered_at_a_time(
    told: list[dict[str, Any]], stage: int, layers: list[int]
) -> None:
    """In each micro-batch's forward the layer that runs, and no embedding."""
    paths = [f"model.layers.{layer}" for layer in layers]
    for found in of_stage(told, "used", stage):
        assert found["forward"] == [(path, [path]) for path in paths] * MICRO_BATCHES * ROUNDS


def test_backwards_gather_again_and_let_go(told: list[dict[str, Any]]) -> None:
    """Layers with a layer to learn below them one by one; between rounds nothing is gathered."""
    for stage, path in ((0, None), (1, "model.layers.3")):
        for found in of_stage(told, "used", stage):
            assert all(path in gathered for at, gathered in found["backward"] if at == path)
            assert all(len(gathered) <= 2 for _, gathered in found["backward"])
            assert found["after"] == []


def test_nothing_is_gathered_that_is_not_used(told: list[dict[str, Any]]) -> None:
    """Forwards: every layer, and embedding or head; backwards: layers that have one."""
    for stage, forward, backward in ((0, 3, 1), (1, 3, 2)):
        for found in of_stage(told, "used", stage):
            assert found["gathers"] == (forward + backward) * MICRO_BATCHES * ROUNDS


def test_what_is_kept_is_gathered_once_a_round(told: list[dict[str, Any]]) -> None:
    """All layers and the head; embeddings, which are large and read once, by each micro-batch."""
    for stage, once, each in ((0, 1, 1), (1, 4, 0)):
        for found in of_stage(told, "kept", stage):
            assert found["gathers"] == (once + each * MICRO_BATCHES) * ROUNDS
            assert found["after"] == []


def test_a_stage_without_backward_notes_nothing_for_one(told: list[dict[str, Any]]) -> None:
    """FSDP2's list of forwards would grow from round to round."""
    for found in of_stage(told, "kept", 0):
        assert found["backward"] == []
        assert found["noted"] == 0


def test_each_process_holds_its_share_of_its_stage(told: list[dict[str, Any]]) -> None:
    """Half of the stage's matrices, embeddings and head included; nothing of other stages."""
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    for plan, counts in (("used", (2, 2)), ("kept", (1, 3))):
        for stage, layers in enumerate(counts):
            one, other = of_stage(told, plan, stage)
            assert one["whole"] == other["whole"] == one["local"] + other["local"]
            # The vocabulary's rows need not divide.
            assert abs(one["local"] - other["local"]) <= 32
            assert one["whole"] == layers * layer + VOCABULARY * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SuperModel:
    return compile(jobs_of(tiny_base(tmp_path_factory.mktemp("base"), num_hidden_layers=4)))


def test_shards_need_replicas(model: SuperModel) -> None:
    """Nobody would hold the rest."""
    with pytest.raises(PlanNotRunnable, match="dp=1"):
        find_planner("pipeline").plan(model, MeshShape(pp=2), options={"shard_base": True})


def test_a_pipeline_is_sharded_where_that_is_asked_for(model: SuperModel) -> None:
    """Weights are let go of after each use, unless they are to be kept."""
    planner = find_planner("pipeline")
    plain, used = planner.plan(model, MESH), planner.plan(model, MESH, options={"shard_base": True})
    kept = planner.plan(model, MESH, options={"shard_base": True, "keep_gathered": True})

    assert (plain.shard_base, used.shard_base, kept.shard_base) == (False, True, True)
    assert (used.keep_gathered, kept.keep_gathered) == (False, True)
