"""What the scheduler expects of a group is what planners expect of the same plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.estimators import estimator, shipped
from tlora_fx.compiler import compile
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost import model_facts
from tlora_fx.cost.estimator import Base
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.layouts import Pairs
from tlora_fx.cost.load import Demand, Round, demand_of
from tlora_fx.cost.memory import memory_of
from tlora_fx.cost.model_facts import BASES
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.step_time import CostModel, step_time, total
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.ops.kernels import packed

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
RANKS = (2, 4, 8, 16, 2, 4, 8, 16)
TP = (1, 2, 4, 8)


@cache
def known(base: str, nano_batches: tuple[int, ...] = (1,)) -> Base:
    cluster = Cluster(64, nodes_per_rack=8)
    return estimator(base, cluster=cluster, tp=TP, nano_batches=nano_batches).base(base)


def both(base, facts, layout, sharded, length, batch, launched=0, nano_batches=(1,)):
    """(milliseconds, bytes) of the estimator, and of planners, of jobs with equal samples."""
    of, jobs = known(base, nano_batches), len(facts.jobs)
    group = Demand.total(demand_of(base, rank, batch, length) for rank in RANKS[:jobs])
    row = group._replace(launched=float(launched)).row()[None]
    plan = of.layouts.plans[layout]
    groups = of.groups(row, np.array([plan.mesh.size]), ["node" if plan.mesh.size <= 8 else "rack"])
    pairs = Pairs.of(groups, of.layouts, np.array([0]), np.array([layout]))
    mine = (
        float(total(of.terms(pairs, sharded=sharded))[0]),
        float(total(of.memory(pairs, sharded=sharded))[0]),
    )
    cost = CostModel(facts, shipped(base))
    plan = plan.model_copy(update={"shard_base": sharded})
    if plan.mesh.pp > 1:
        plan = plan.model_copy(update={"micro_batches": int(pairs.count[0])})
    work = Round((((length,) * batch,) * jobs,))
    plans = [plan.model_copy(update={"nano_batches": count}) for count in nano_batches]
    times = [step_time(cost, one, work).seconds * 1e3 for one in plans]
    return mine, (min(times), memory_of(cost, plan, work).total)


@pytest.mark.parametrize("base", BASES)
@given(
    layout=st.sampled_from(range(len(known("llama-3-8b").layouts.plans))),
    sharded=st.booleans(),
    length=st.sampled_from([64, 512, 1024]),
    batch=st.sampled_from([1, 2, 4, 8, 16, 64]),
    launched=st.integers(0, 1),
)
def test_both_expect_the_same_of_one_job(base, layout, sharded, length, batch, launched):
    """Replicas, tensor parallelism, sharded bases, pipelines: wherever both cut alike.

    Planners see each sample, so that rows of jobs that differ are not equal. Here they are.
    """
    mesh = known(base).layouts.plans[layout].mesh
    several = batch * length > 16384
    if batch % mesh.dp or (mesh.pp > 1 and batch // mesh.dp < mesh.pp) or several:
        return
    facts = BASES[base].facts({"job": RANKS[0]})
    facts = replace(facts, launched=("segment_read",) * launched)
    sharded = sharded and mesh.dp > 1 and mesh.pp == 1
    mine, theirs = both(base, facts, layout, sharded, length, batch, launched)

    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("length", [128, 1024])
@pytest.mark.parametrize("launched", [0, 1])
def test_both_take_the_same_number_of_nano_batches(length, launched):
    """Each is launched anew, which takes the host as long as the whole row does."""
    base = "llama-3-8b"
    facts = BASES[base].facts({f"job-{place}": rank for place, rank in enumerate(RANKS)})
    facts = replace(facts, launched=("segment_read",) * launched)
    layout = next(
        place for place, plan in enumerate(known(base).layouts.plans)
        if (plan.mesh.tp, plan.mesh.size) == (2, 2)
    )  # fmt: skip
    mine, theirs = both(base, facts, layout, False, length, 2, launched, (1, 2))

    assert mine == pytest.approx(theirs, rel=1e-9)


def test_room_behind_weights_is_that_of_the_operators():
    """The rule is written twice, since operators are behind torch."""
    assert model_facts.WIDEST_TAIL == packed.WIDEST_TAIL
    assert [model_facts.tail_of(n) for n in range(200)] == [
        packed.tail_columns_of(n) for n in range(200)
    ]


@pytest.mark.parametrize("vocabulary", [11, 32_000, 128_256, 151_936, 11_000_000])
def test_chunks_of_logits_are_those_of_the_loss(vocabulary):
    """That rule is written twice, too."""
    loss = ChunkedLoss(torch.nn.Identity(), vocabulary, ())

    assert model_facts.chunk_rows(vocabulary) == loss.chunk_rows


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_known_bases_are_as_their_models_compile(base):
    """Facts by name are facts by compiling, but for the few bytes of rotary frequencies."""
    compiled = facts_of(compile(load_job_file(SHAPES / base / "jobs.yaml")))
    named = BASES[base].facts({f"job-{place}": rank for place, rank in enumerate(RANKS)})

    assert named.base_bytes == pytest.approx(compiled.base_bytes, rel=1e-6)
    for name in ("hidden", "vocabulary", "tensors", "trained", "states", "trained_bytes", "jobs"):
        assert getattr(named, name) == getattr(compiled, name)
    for name in ("structure", "weight_bytes", "tail_bytes", "matrices", "attention", "trained"):
        assert getattr(named.layers[0], name) == getattr(compiled.layers[0], name)


@pytest.mark.slow
def test_a_compiled_model_is_costed_as_its_base_by_name():
    """The facts of llama-3-8b's own jobs give the same times and memory."""
    base, work = "llama-3-8b", Round((((160,) * 4,) * len(RANKS),))
    compiled = facts_of(compile(load_job_file(SHAPES / base / "jobs.yaml")))
    named = BASES[base].facts({f"job-{index}": rank for index, rank in enumerate(RANKS)})
    for fields in ({}, {"mesh": MeshShape(dp=4), "shard_base": True}, {"mesh": MeshShape(tp=2)}):
        plan = Plan(planner="auto", **fields)
        models = [CostModel(facts, shipped(base)) for facts in (compiled, named)]
        times = [step_time(model, plan, work).seconds for model in models]
        sizes = [memory_of(model, plan, work).total for model in models]

        assert times[0] == pytest.approx(times[1], rel=1e-6)
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-6)
