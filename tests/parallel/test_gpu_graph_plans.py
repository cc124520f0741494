"""On several GPUs: rows that run as CUDA graphs under a plan train as rows that do not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.graph_cases import replay_rounds, replay_stages, train_all_graphs, train_in_turn
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
    "replicated, head": {"planner": "replicated", "mesh": "dp=2", "head": True},
    "tensor, head": {"planner": "tensor", "mesh": "tp=2", "head": True},
}


def _staged(**options: Any) -> dict[str, Any]:
    """A pipeline of two processes, and four micro-batches a round."""
    given = {"micro_batches": 4, **options}
    return {
        "planner": "pipeline", "mesh": "pp=2", "options": given, "micro_batches": 4, "layers": 4,
        "seeds": 3, "splits": 2,
    }  # fmt: skip


STAGED = {
    "1f1b": _staged(),
    "gpipe": _staged(schedule="gpipe"),
    "interleaved": _staged(schedule="interleaved") | {"seeds": 1, "splits": 1},
    "compiled stages": _staged() | {"compiled": True},
    "stages, head": _staged() | {"head": True},
}
ON_TWO |= STAGED
TRAINED = ["sharded", "kept", "tensor", "1f1b"]


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


@pytest.mark.parametrize("compiled", [False, True])
def test_stages_are_replayed_in_one_process(tmp_path, compiled):
    """Without a pipeline around them: two micro-batches are under way, each in its slot."""
    _needs(1)
    _require_replayed([replay_stages(tmp_path, compiled=compiled)])


def test_a_trainer_captures_rows_under_plans(tmp_path):
    """Processes part in peace when their graphs are let go of; losses stay near."""
    _needs(2)
    _require_near(tmp_path, 2, {name: ON_TWO[name] for name in TRAINED})


def test_a_trainer_captures_stages_that_are_cut(tmp_path):
    """Of a pipeline over a tensor plan's pieces, and rows of replicas of such pieces."""
    _needs(4)
    cut = {"planner": "tensor", "mesh": "dp=2,tp=2"}
    _require_near(tmp_path, 4, {"stages": _staged() | {"mesh": "pp=2,tp=2"}, "replicas": cut})


def _require_near(folder: Path, processes: int, cases: dict[str, dict[str, Any]]) -> None:
    for told in run_processes(processes, train_all_graphs, folder, cases, gpus=True):
        for name, one in told.items():
            assert one["forms"] > 0, name
            for loss, other in zip(one["graphs"], one["launched"], strict=True):
                assert math.isclose(loss, other, rel_tol=3e-2), name


def test_the_next_trainer_of_a_model_replays_rows_that_the_last_one_captured(tmp_path):
    """No form is captured twice, and other jobs learn as on a model of their own."""
    _needs(1)
    _require_kept(train_in_turn(tmp_path, {"alone": {"planner": "single", "mesh": ""}}))


def test_processes_that_stay_together_replay_what_they_captured(tmp_path):
    """Under plans, too: gradients stay in their buffers, communicators as they are."""
    _needs(2)
    cases = {name: ON_TWO[name] for name in TRAINED}
    for told in run_processes(2, train_in_turn, tmp_path, cases, gpus=True):
        _require_kept(told)


def _require_kept(told: dict[str, dict[str, Any]]) -> None:
    for name, one in told.items():
        first, second = one["forms"]
        assert 0 < first <= second == one["made"], name
        for loss, other in zip(one["kept"], one["fresh"], strict=True):
            assert math.isclose(loss, other, rel_tol=3e-2), name
