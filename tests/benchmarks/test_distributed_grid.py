"""The case `grid` of `benchmarks.distributed` predicts what it measures, of plans that run."""

from __future__ import annotations

import math
from argparse import Namespace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributed_grid import JOBS, choices, parts_of, round_of, summary
from benchmarks.distributed_models import (
    mesh_of,
    planned,
    replanned,
    rows_of,
    traced_model,
    wants_same_weights,
    weights_of,
)
from benchmarks.distributed_plans import plans_of
from benchmarks.grid_again import again
from benchmarks.step_mixes import Shape
from tests.parallel.processes import run_processes
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Load
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.cost.step_time import CostModel
from tlora_fx.parallel.stages import legal_cuts

SHAPE = Shape(
    layers=9, hidden=32, intermediate=48, heads=4, key_value_heads=4, vocabulary=97, dtype="float32"
)
FSDP = Plan(planner="fsdp", mesh=MeshShape(dp=2), shard_base=True)
KEPT = FSDP.model_copy(update={"keep_gathered": True})
SINGLE, REPLICATED = Plan(planner="single"), Plan(planner="replicated", mesh=MeshShape(dp=2))


@pytest.fixture(scope="module")
def model():
    return traced_model(SHAPE, JOBS)


def plans(model, world, tokens=640, length=16):
    facts = facts_of(model)
    profile = profile_for(facts, "roofline:h200", allow_estimated=True)
    work = round_of(world, tokens, length)
    return plans_of(model, CostModel(facts, profile), work, world)


@given(
    tokens=st.integers(1, 500),
    length=st.integers(2, 40),
    world=st.sampled_from([1, 2, 4]),
    micro_batches=st.integers(1, 6),
)
def test_what_is_predicted_is_the_load_that_is_measured(tokens, length, world, micro_batches):
    """The lengths that predictions take are those of the packed rows."""
    plan = Plan(planner="replicated", mesh=MeshShape(dp=world), micro_batches=micro_batches)
    parts, each = parts_of(plan, tokens, length)

    told = [Load.of_lengths(row) for row in round_of(parts, each, length).rows]

    measured = [Load.of_row(row) for row in rows_of(SHAPE, each, length, parts, JOBS)]
    assert [(one.tokens, one.squares, one.sequences) for one in told] == [
        (one.tokens, one.squares, one.sequences) for one in measured
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_every_plan_is_whole_and_takes_all_processes(model, world):
    """Its fields hold together, and stages begin where they may."""
    found = plans(model, world)
    legal = set(legal_cuts(model))

    assert len(found) >= 8
    for name, plan in found.items():
        assert Plan.model_validate(plan.model_dump()) == plan
        assert plan.mesh.size == (1 if name == "single" else world)
        assert set(plan.cuts) <= legal
        assert len(plan.cuts) == plan.stages - 1
        if plan.mesh.pp > 1:
            assert plan.stages >= plan.mesh.pp


def test_four_processes_mix_dimensions(model):
    """Pieces beside replicas, stages beside replicas, sharded or not, and stages of pieces."""
    meshes = {
        (plan.mesh.pp, plan.mesh.dp, plan.mesh.tp, plan.shard_base)
        for plan in plans(model, 4).values()
    }

    assert {(1, 2, 2, False), (2, 2, 1, False), (2, 2, 1, True), (2, 1, 2, False)} <= meshes


def test_plans_that_share_weights_stand_side_by_side(model):
    """Each model is built once: what shares its weights with any plan follows that one."""
    for world in (2, 4):
        every = list(plans(model, world).values())
        builds = 1 + sum(not wants_same_weights(one, other) for one, other in pairwise(every))
        kinds: list[Plan] = []
        for plan in every:
            if not any(wants_same_weights(plan, other) for other in kinds):
                kinds.append(plan)

        assert builds == len(kinds) < len(every)


@pytest.mark.parametrize(
    ("plan", "other", "same"),
    [
        (SINGLE, REPLICATED, True),
        (FSDP, KEPT, True),
        (REPLICATED, FSDP, False),
        (FSDP, FSDP.model_copy(update={"recompute": True}), False),
        (FSDP, FSDP.model_copy(update={"mesh": MeshShape(dp=4)}), False),
        (SINGLE, Plan(planner="tensor", mesh=MeshShape(tp=2)), False),
        (
            Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(3,), micro_batches=4),
            Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(3,), micro_batches=8),
            True,
        ),
        (
            Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(3,)),
            Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(4,)),
            False,
        ),
        (
            Plan(planner="pipeline", mesh=MeshShape(pp=2, dp=2), cuts=(3,)),
            Plan(planner="pipeline", mesh=MeshShape(pp=2, dp=2), cuts=(3,), shard_base=True),
            False,
        ),
    ],
)
def test_plans_share_weights_where_each_process_holds_the_same(plan, other, same):
    """Both ways."""
    assert wants_same_weights(plan, other) is same
    assert wants_same_weights(other, plan) is same


def rows(measured, share=1.0):
    """Rows of a grid; the device works for `share` of what was predicted."""
    return [
        {"plan": plan, "tokens_per_gpu": tokens, "predicted_ms": told, "device_ms": share * told,
         "ms": ms, "predicted_bytes": 3.0, "peak_bytes": 2.0}
        for plan, tokens, told, ms in measured
    ]  # fmt: skip


def test_a_choice_is_compared_with_the_fastest_that_was_measured():
    """A single process does less than the others, and what did not run counts for nothing."""
    found = rows([
        ("single", 9, 1.0, 1.0), ("fsdp", 9, 2.0, 6.0), ("tensor", 9, 3.0, 4.0),
        ("fsdp", 5, 2.0, 2.0), ("tensor", 5, 1.0, None),
    ])  # fmt: skip

    told = summary(found)

    assert told["choice over the best measured"] == {"9 tokens: fsdp": 1.5, "5 tokens: fsdp": 1.0}
    assert told["configurations"] == 4
    assert told["worst error"] == pytest.approx(2 / 3)
    assert told["memory over measured"] == [0.5, 0.5]
    assert choices(rows([("single", 9, 1.0, 1.0)])) == {}


def test_rows_that_wait_for_the_host_are_told_apart():
    """What a host takes differs from machine to machine."""
    found = rows([("tensor", 9, 1.1, 1.0)]) + rows([("pipeline", 9, 3.0, 2.0)], share=0.5)

    told = summary(found)

    assert told["configurations"] == 2
    assert told["worst error"] == pytest.approx(0.5)
    assert told["all others"]["worst error"] == pytest.approx(0.1)
    assert told["those that wait for the host"] == {
        "configurations": 1, "mean error": 0.5, "worst error": 0.5,
    }  # fmt: skip


def losses_of(made):
    """Each job's losses of a round of two rows, and the norm of all gradients."""
    given = rows_of(SHAPE, 64, 8, 2)
    weights = weights_of(given, made.mesh.device)
    losses = made.runner.run(given, weights).tolist()
    grads = [leaf.grad for leaf in made.leaves if leaf.grad is not None]
    norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads))
    torch._foreach_zero_(grads)
    return losses, norm


def built(plan):
    return planned(SHAPE, plan, mesh_of(plan), compiled=False)


def run_plans():
    """Plans over one model, beside the same plans over models of their own."""
    alone = built(SINGLE)
    single = losses_of(alone)
    replicated = losses_of(replanned(alone, REPLICATED))
    sharded = built(FSDP)
    fsdp = losses_of(sharded)
    gathered = []
    layers = [sharded.model.net.get_submodule(path) for path in sharded.model.layer_order()]

    def note(*_):
        frozen = [p for p in layers[0].parameters() if not p.requires_grad and p.dim() > 1]
        gathered.append(not any(hasattr(p, "full_tensor") for p in frozen))

    layers[-1].register_forward_hook(note)
    losses_of(sharded)
    kept = losses_of(replanned(sharded, KEPT))
    losses_of(replanned(sharded, FSDP))
    return {"single": single, "replicated": replicated, "fsdp": fsdp, "kept": kept,
            "expected": losses_of(built(REPLICATED)), "gathered": gathered}  # fmt: skip


def test_a_model_under_another_plan_trains_as_one_that_was_built_for_it():
    """Losses and gradients are equal, and weights stay gathered exactly where the plan says so."""
    found = run_processes(2, run_plans)[0]

    for name in ("single", "replicated", "fsdp", "kept"):
        assert found[name][0] == pytest.approx(found["expected"][0], rel=1e-5), name
        assert found[name][1] == pytest.approx(found["expected"][1], rel=1e-4), name
    assert found["expected"][1] > 0
    assert found["gathered"] == [False, True, False]


@pytest.mark.slow
def test_a_measured_grid_is_predicted_again():
    """By today's profile of the GPU that the file names; what was measured stays."""
    measured = {"ms": 20.0, "peak_bytes": 1e10, "predicted_ms": 1.0, "predicted_bytes": 1.0}
    names = ("single", "fsdp", "tensor")
    rows = [{"plan": name, "tokens_per_gpu": 1280} | measured for name in names]
    left = {"plan": "fsdp, kept", "tokens_per_gpu": 1280, "ms": None}
    file = {
        "hardware": {"gpu": "NVIDIA H200"}, "processes": 2,
        "cases": {"grid": {"rows": [*rows, left]}, "controllers": {"rows": [{"tokens": 1280}]}},
    }  # fmt: skip

    found = again(file, Namespace(layers=4, length=160))

    assert [row["plan"] for row in found] == list(names)
    assert all((row["ms"], row["then"]) == (20.0, 1.0) for row in found)
    assert all(5 < row["predicted_ms"] < 60 and row["predicted_bytes"] > 2e9 for row in found)
    assert found[0]["predicted_ms"] < found[1]["predicted_ms"]
