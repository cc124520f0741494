"""Prices of recompute budgets: beside what an H200 measured, and where plans take one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cost.facts import small_model, small_round
from tests.models import base_of, job
from tlora_fx.cli.plan import recomputing
from tlora_fx.compiler import DEFAULT_PIPELINE, run_passes
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GIB, GPUS
from tlora_fx.cost.load import Round
from tlora_fx.cost.memory import memory_of, usable_bytes
from tlora_fx.cost.model_facts import find_base
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile_sources import profile_for, roofline_profile
from tlora_fx.cost.step_time import CostModel, clock_of, step_time
from tlora_fx.inspect.joint import joint_nodes
from tlora_fx.pipeline.joint_stage import JointStage
from tlora_fx.planners.auto import search
from tlora_fx.planners.recompute_budgets import BUDGETS, BudgetPrices, price_budget

MEASURED = Path(__file__).parents[2] / "benchmarks/results/recompute-2026-11-29.json"
#: How far a predicted ratio may be from the measured one.
TIME, PEAK = 0.02, 0.03
ONE_PROCESS = MeshShape()
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
#: It cannot be cut into micro-batches, and runs as a CUDA graph.
ONE_SEQUENCE = Round((((4096,), ()),))


def eight_jobs(folder, layers=2):
    """Eight jobs on layers of Llama-3-8B's shape, as the benchmark has them; no weights."""
    shape = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024,
    }  # fmt: skip
    base = base_of(folder, "llama", "bfloat16", num_hidden_layers=layers, **shape)
    ranks = (2, 4, 8, 16) * 2
    jobs = [job(f"j{n}", base, r=r, target_modules="all-linear") for n, r in enumerate(ranks)]
    return {one.name: rank for one, rank in zip(jobs, ranks, strict=True)}, jobs


def test_prices_are_near_what_an_h200_measured(tmp_path):
    """Time and peak over keeping all, at both budgets that were measured, and of whole layers."""
    ranks, jobs = eight_jobs(tmp_path)
    facts = find_base("llama-3-8b").facts(ranks)
    cost = CostModel(facts, profile_for(facts, "h200", allow_estimated=False))
    work, group = Round((((1024,),) * 8,)), run_passes(jobs, DEFAULT_PIPELINE)
    arms = json.loads(MEASURED.read_text(encoding="utf-8"))["arms"]

    def costs(**fields):
        plan = Plan(planner="single", **fields)
        price_budget(cost, group, plan, work)
        return step_time(cost, plan, work).seconds, memory_of(cost, plan, work).total

    plain = costs()
    for name, budget in (("budget 0.7", 0.7), ("budget 0.5", 0.5), ("layers", 0.0)):
        time, peak = costs(recompute=True, recompute_budget=budget)
        arm = arms[name]
        assert time / plain[0] == pytest.approx(arm["time_ratio"]["median"], abs=TIME), name
        assert peak / plain[1] == pytest.approx(arm["peak_ratio"], abs=PEAK), name
    assert plain[1] / GIB == pytest.approx(arms["none"]["peak_gib"], rel=PEAK)


@pytest.fixture(scope="module", autouse=True)
def traced_and_priced_once():
    """Tests ask for prices of the same graphs: joint ones take seconds to trace."""
    plain = {name: getattr(BudgetPrices, name) for name in ("_traced", "_price")}
    known = {}

    def once(name):
        def method(self, *given):
            key = name, id(self.group), self.length, self.compiled, given
            if key not in known:
                # With its group, whose place in memory no other one may have.
                known[key] = plain[name](self, *given), self.group
            return known[key][0]

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(BudgetPrices, name, once(name))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_smaller_a_budget_the_less_is_kept_and_the_more_is_computed(model, compiled):
    """Compiled, gated activations are never kept."""
    prices = BudgetPrices(model.group, small_round(), compiled=compiled)
    found = [prices.price(budget) for budget in BUDGETS[::2]]

    assert [one.kept_bytes for one in found] == sorted((f.kept_bytes for f in found), reverse=True)
    assert [one.again for one in found] == sorted(one.again for one in found)
    assert 0 <= found[0].again < found[-1].again < 1


def test_a_shard_keeps_less_and_never_sums_again(model):
    """Its share of what is cut; what processes summed is kept at any budget."""
    prices = BudgetPrices(model.group, small_round(), compiled=True)
    whole, cut = (prices.price(0.5, tp) for tp in (1, 2))

    assert whole.kept_bytes / 2 <= cut.kept_bytes < whole.kept_bytes
    for block, joint in prices._graphs(2):
        nodes = list(joint_nodes(joint, JointStage(block.name, BUDGETS[-1], ())))
        summed = [node for node in nodes if "_c10d_functional" in node.target]
        assert summed
        assert not any(node.fate == "again" for node in summed)
    assert not any(
        node.target is ALL_REDUCE for each in model.group.graphs() for node in each.nodes
    )


def test_a_budget_sums_over_processes_no_more_than_keeping_all(model):
    """Whole layers that are computed again do."""
    cost = CostModel(facts_of(model), roofline_profile(GPUS["h100"], facts_of(model)))
    plan, work = Plan(planner="tensor", mesh=MeshShape(tp=2), recompute=True), small_round()

    def sums(**fields):
        return clock_of(cost, plan.model_copy(update=fields)).sums

    budget = {"recompute_budget": 0.5}
    price_budget(cost, model.group, plan.model_copy(update=budget), work)
    assert sums(**budget) == sums(recompute=False) < sums()


def short_of(model, share, mesh=ONE_PROCESS, cuts=(), *, shard_base=False):
    """What is found with this share of the memory that activations take beside the rest."""
    profile = roofline_profile(GPUS["h100"], facts_of(model))
    cost, work = CostModel(facts_of(model), profile), ONE_SEQUENCE
    plan = Plan(planner="auto", mesh=mesh, cuts=cuts, micro_batches=mesh.pp, shard_base=shard_base)
    plain, whole = (
        memory_of(cost, plan.model_copy(update={"recompute": again}), work).total
        for again in (False, True)
    )
    gib = (whole + share * (plain - whole)) / 0.96 / GIB + 1.5
    hardware = profile.hardware.model_copy(update={"memory_gib": gib})
    small = profile.model_copy(update={"hardware": hardware})
    return search(model, small, work, mesh.size, meshes=[mesh])


def test_what_does_not_fit_gets_the_cheapest_budget_that_does(model):
    """Between keeping all and whole layers, in time and memory; both stand beside it."""
    found = short_of(model, 0.5)
    best = found.running[0]
    whole = next(one for one in found.running if one.plan.recompute and not best.plan.shard_base
                 and not one.plan.recompute_budget)  # fmt: skip

    assert best.plan.recompute_budget in BUDGETS
    assert best.time.seconds < whole.time.seconds
    assert best.memory.total > whole.memory.total
    (note,) = recomputing(found)
    assert f"--recompute-budget {best.plan.recompute_budget:g}: +" in note
    assert "needs" in note
    assert "Whole layers computed again: +" in note


@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        (MeshShape(tp=2), ()),
        (MeshShape(pp=2), (2,)),
        (MeshShape(pp=2, tp=2), (2,)),
        (MeshShape(dp=2), ()),
    ],
)
def test_stages_and_shards_get_a_budget_too(model, mesh, cuts):
    """It fits, is faster than whole layers computed again, and the note tells of both."""
    found = short_of(model, 0.5, mesh, cuts, shard_base=mesh.dp > 1)
    budgeted = [one for one in found.running if one.plan.recompute_budget]
    whole = [one for one in found.running if one.plan.recompute and not one.plan.recompute_budget]

    assert budgeted
    assert any(one.plan.shard_base for one in budgeted) == (mesh.dp > 1)
    assert budgeted[0].time.seconds < whole[0].time.seconds
    assert budgeted[0].memory.total <= usable_bytes(found.cost.profile)
    assert found.best().recompute_budget in BUDGETS
    assert f"--recompute-budget {found.best().recompute_budget:g}: +" in recomputing(found)[0]


def test_what_fits_keeps_all_and_asks_for_no_price(model, monkeypatch):
    """Joint graphs take seconds to trace."""
    monkeypatch.setattr(BudgetPrices, "_price", lambda self, *given: pytest.fail("priced"))
    found = short_of(model, 1.1)

    assert not found.running[0].plan.recompute
    assert recomputing(found) == []
