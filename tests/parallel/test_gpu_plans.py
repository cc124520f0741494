"""Plans over GPUs: in float64 they train what one GPU trains."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.processes import run_processes
from tests.parallel.training import mixed_jobs, parting, quiet_jobs, train_all, write_base
from tests.runtime.asked_kernels import noted_kernels
from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.cost.plan import MeshShape
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu

PIPES: dict[str, Any] = {"planner": "pipeline", "mesh": "pp=2"}
ON_TWO: dict[str, dict[str, Any]] = {
    "replicated": {"planner": "replicated", "mesh": "dp=2"},
    "sharded": {"planner": "fsdp", "mesh": "dp=2"},
    "recomputed": {"planner": "fsdp", "mesh": "dp=2", "options": {"recompute": True}},
    "tensor": {"planner": "tensor", "mesh": "tp=2"},
    "pipeline": PIPES,
    "gpipe": PIPES | {"options": {"schedule": "gpipe"}},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "tensor, replicated": {"planner": "tensor", "mesh": "dp=2,tp=2"},
    "pipeline, replicated": {"planner": "pipeline", "mesh": "pp=2,dp=2"},
    "pipeline, sharded": {
        "planner": "pipeline",
        "mesh": "pp=2,dp=2",
        "options": {"shard_base": True},
    },
    "pipeline, kept": {
        "planner": "pipeline",
        "mesh": "pp=2,dp=2",
        "options": {"shard_base": True, "keep_gathered": True, "recompute": True},
    },
    "pipeline, tensor": {"planner": "pipeline", "mesh": "pp=2,tp=2"},
}
HALF: dict[str, dict[str, Any]] = {
    name: case | {"dtype": "bfloat16", "compiled": compiled}
    for name, case, compiled in (
        ("half", ON_TWO["replicated"], ""),
        ("half, compiled shards", ON_TWO["sharded"], "inductor"),
        ("half, tensor", ON_TWO["tensor"], ""),
        ("half, compiled tensor", ON_TWO["tensor"], "inductor"),
        ("half, pipeline", PIPES, ""),
    )
}


def _needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plans")
    write_base(made)
    alone: dict[str, Any] = {"planner": "single"}
    cases = {"alone": alone, "quiet alone": alone | {"jobs": quiet_jobs, "later": True}}
    run_processes(1, train_all, made, cases, gpus=True)
    return made


@pytest.mark.parametrize("name", list(ON_TWO))
def test_two_gpus_train_what_one_trains(folder: Path, name: str) -> None:
    """With dropout, accumulation, an early end, and a branch that runs as it is."""
    _trains(folder, 2, name, ON_TWO[name])


@pytest.mark.parametrize("name", ["replicated", "sharded", "tensor", "pipeline"])
def test_two_gpus_look_at_rounds_later(folder: Path, name: str) -> None:
    """A job that breaks itself ends at the same step, and the others train on as alone."""
    _needs(2)
    case = ON_TWO[name] | {"jobs": quiet_jobs, "later": True}
    found = run_processes(2, train_all, folder, {f"quiet {name}": case}, gpus=True)
    assert not isinstance(found[0][f"quiet {name}"], str), found[0]
    assert max(parting(folder, "quiet alone", f"quiet {name}", quiet_jobs(folder))) <= 1e-7


@pytest.mark.parametrize("name", list(ON_FOUR))
def test_four_gpus_train_what_one_trains(folder: Path, name: str) -> None:
    """Two dimensions of a mesh at once."""
    _trains(folder, 4, name, ON_FOUR[name])


def _trains(folder: Path, count: int, name: str, case: Any) -> None:
    _needs(count)
    found = run_processes(count, train_all, folder, {name: case}, gpus=True)
    assert not isinstance(found[0][name], str), found[0][name]
    losses, adapters = parting(folder, "alone", name, mixed_jobs(folder))
    assert losses <= 1e-9
    assert adapters <= 1e-7


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and norms of jobs in bfloat16 under each plan, on generated kernels."""
    _needs(2)
    made = tmp_path_factory.mktemp("halves")
    write_base(made)
    # One pair of processes trains all: importing takes as long as compiling.
    found: dict[str, Any] = run_processes(2, train_all, made, HALF, gpus=True)[0]
    return found


@pytest.mark.parametrize("name", [name for name in HALF if name != "half"])
def test_kernels_and_compiled_layers_train_under_plans(halves: Any, name: str) -> None:
    """In bfloat16, on generated kernels, losses stay near those of two replicas."""
    assert not isinstance(halves[name], str), halves[name]
    for (loss, _), (other, _) in zip(halves[name], halves["half"], strict=True):
        assert math.isclose(float(loss), float(other), rel_tol=2e-2)


def test_replicas_ask_for_all_kernels_of_ours_that_a_round_starts(tmp_path: Path) -> None:
    """Each of two processes that have started none of them, in the forms in which rows run."""
    _needs(2)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 512}
    base = tiny_base(tmp_path, "bfloat16", **sizes)

    for kernels in run_processes(2, kernels_of_a_replica, tmp_path, base, gpus=True):
        assert kernels["asked for"]
        assert not kernels["not asked for"]


def kernels_of_a_replica(folder: Path, base: BaseSpec) -> dict[str, list[Any]]:
    """Train two jobs as one of two replicas; what was asked for, and what was not."""
    rank = dist.get_rank()
    # A note of the other one's would say that there is nothing to ask for.
    os.environ["TRITON_CACHE_DIR"] = str(folder / f"triton {rank}")
    more: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 6}
    jobs = [make_job(base, name, seed=1, lora={"r": 3}, **more) for name in "ab"]
    model = compile(jobs)
    plan = find_planner("replicated").plan(model, MeshShape(dp=2))
    with noted_kernels() as found:
        Trainer(
            model, output=folder / "run", device=f"cuda:{rank}", plan=plan,
            data=make_data(jobs, longest=300),
        ).run()  # fmt: skip
    return found
