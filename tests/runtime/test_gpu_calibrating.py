"""A calibration on a GPU: times of CUDA graphs beside those of launched kernels, links by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.cost.facts import LINEARS, small_round
from tests.models import base_of, job
from tests.parallel.processes import run_processes
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.plan import MeshShape
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.auto import search
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.profiling.calibrating import calibrate, layer_points

pytestmark = pytest.mark.gpu

WORK = small_round(32, 64)


def model_of(folder: Path) -> SuperModel:
    base = base_of(
        folder, "llama", dtype="bfloat16", hidden_size=1024, intermediate_size=2816,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    ranks = {"one": 8, "two": 16}
    return compile([job(name, base, r=r, target_modules=LINEARS) for name, r in ranks.items()])


def test_layers_are_timed_as_graphs_too_and_give_their_memory_back(tmp_path: Path) -> None:
    """The model that will train stays without weights."""
    device, model = torch.device("cuda", 0), model_of(tmp_path)
    layer_points(model, facts_of(model), WORK, 2, device)
    before = torch.cuda.memory_allocated(device)
    [points] = layer_points(model, facts_of(model), WORK, 2, device).values()

    assert [point.tokens for point in points] == [2048, 4096]
    assert all(point.captured is not None and point.saved_bytes > 0 for point in points)
    # Copies of the jobs' tables, some KB, are kept for others of the same content.
    assert torch.cuda.memory_allocated(device) < before + 2**20
    assert all(parameter.is_meta for parameter in model.net.parameters())


def test_a_plan_is_found_by_a_calibration(tmp_path: Path) -> None:
    """With the memory of the card."""
    device, model = torch.device("cuda", 0), model_of(tmp_path)
    profile = calibrate(model, Ranks(Mesh.alone(device)), Launch(), WORK, device)

    assert profile.knows_graphs
    assert profile.hardware.memory_gib > 0
    assert search(model, profile, WORK, 4).running


def together(folder: Path) -> tuple[str, list[str]]:
    """The profile of a process, and the links that were measured."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    mesh = Mesh(MeshShape(dp=size), device, rank, dp_rank=rank, world=dist.group.WORLD)
    model = model_of(folder / str(rank))
    profile = calibrate(model, Ranks(mesh), Launch(rank, size, rank, size), WORK, device)
    links = {f"{one.operation} {one.tier}" for one in profile.collectives}
    return profile.model_dump_json(), sorted(links)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_gpus_have_one_profile(tmp_path: Path) -> None:
    """With links that were measured over NCCL."""
    (one, links), (two, _) = run_processes(2, together, tmp_path, gpus=True)

    assert one == two
    assert links == ["all-gather node", "all-reduce node", "send node"]
