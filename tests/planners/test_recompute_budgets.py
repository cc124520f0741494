"""Prices of recompute budgets: beside what an H200 measured, and where plans take one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cost.facts import small_model, small_round
from tests.models import base_of, job
from tlora_fx.cli.plan import recomputing
from tlora_fx.compiler import DEFAULT_PIPELINE, run_passes
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GIB, GPUS
from tlora_fx.cost.load import Round
from tlora_fx.cost.memory import memory_of
from tlora_fx.cost.model_facts import find_base
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile_sources import profile_for, roofline_profile
from tlora_fx.cost.step_time import CostModel, step_time
from tlora_fx.planners.auto import search
from tlora_fx.planners.recompute_budgets import BUDGETS, BudgetPrices, price_budget

MEASURED = Path(__file__).parents[2] / "benchmarks/results/recompute-2026-11-29.json"
#: How far a predicted ratio may be from the measured one.
TIME, PEAK = 0.02, 0.03
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


def short_of(model, share):
    """What is found with this share of the memory that activations take beside the rest."""
    profile = roofline_profile(GPUS["h100"], facts_of(model))
    cost, work = CostModel(facts_of(model), profile), ONE_SEQUENCE
    plain, whole = (
        memory_of(cost, Plan(planner="auto", recompute=again), work).total
        for again in (False, True)
    )
    gib = (whole + share * (plain - whole)) / 0.96 / GIB + 1.5
    hardware = profile.hardware.model_copy(update={"memory_gib": gib})
    small = profile.model_copy(update={"hardware": hardware})
    return search(model, small, work, 1, meshes=[MeshShape()])


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


def test_what_fits_keeps_all_and_asks_for_no_price(model, monkeypatch):
    """Joint graphs take seconds to trace."""
    monkeypatch.setattr(BudgetPrices, "_traced", lambda self: pytest.fail("traced"))
    found = short_of(model, 1.1)

    assert not found.running[0].plan.recompute
    assert recomputing(found) == []
