"""On several GPUs: rows that run as CUDA graphs under a plan train as rows that do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.parallel.graph_cases import replay_rounds, train_all_graphs
from tests.parallel.processes import run_processes

pytestmark = pytest.mark.gpu

KEPT = {"keep_gathered": True}
ON_TWO: dict[str, dict[str, Any]] = {
    "replicated": {"planner": "replicated", "mesh": "dp=2"},
    "sharded": {"planner": "fsdp", "mesh": "dp=2"},
    "compiled shards": {"planner": "fsdp", "mesh": "dp=2", "compiled": True},
    "kept": {"planner": "fsdp", "mesh": "dp=2", "options": KEPT},
    "recomputed": {"planner": "fsdp", "mesh": "dp=2", "options": {"recompute": True}},
    "tensor": {"planner": "tensor", "mesh": "tp=2"},
    "compiled tensor": {"planner": "tensor", "mesh": "tp=2", "compiled": True},
}
TRAINED = ["sharded", "kept", "tensor"]


def _needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


@pytest.mark.parametrize("name", list(ON_TWO))
def test_rows_are_replayed_under_plans(tmp_path, name):
    """Losses and gradients are those of the same rows launched, whose gathers and sums are real."""
    _needs(2)
    told = run_processes(2, replay_rounds, tmp_path, ON_TWO[name], gpus=True)
    _require_replayed(told)


def test_rows_are_replayed_on_a_mesh_of_two_dimensions(tmp_path):
    """Replicas of models that are cut: sums over tp are in graphs, those over dp behind them."""
    _needs(4)
    case = {"planner": "tensor", "mesh": "dp=2,tp=2"}
    _require_replayed(run_processes(4, replay_rounds, tmp_path, case, gpus=True))


def _require_replayed(told: list[dict[str, Any]]) -> None:
    for one in told:
        assert one["refused"] == ""
        assert one["forms"] > 0
        assert one["replayed"] > 8
        assert one["losses"] <= 5e-3, one
        assert one["gradients"] <= 3e-2, one


def test_a_trainer_captures_rows_under_plans(tmp_path):
    """Processes part in peace when their graphs are let go of; losses stay near."""
    _needs(2)
    cases = {name: ON_TWO[name] for name in TRAINED}
    for told in run_processes(2, train_all_graphs, tmp_path, cases, gpus=True):
        for name, one in told.items():
            assert one["forms"] > 0, name
            for loss, other in zip(one["graphs"], one["launched"], strict=True):
                assert math.isclose(loss, other, rel_tol=3e-2), name
