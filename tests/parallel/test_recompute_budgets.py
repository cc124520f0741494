"""Recompute budgets of stages, cut matrices and sharded bases: right, and less is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.pipelines import Case, compiled_once, differences, references
from tests.parallel.processes import run_processes

BUDGETS = (0.8, 0.2)
#: Beside a small budget, all that layers keep without one: no layer is compiled for that.
ALL_AND_LESS = (0.0, 0.2)
PLANS = {
    "pipeline": Case(2, (1,), "1f1b", layers=2),
    "tensor": Case(1, (), tp=2, layers=2),
}
QUICK_BUDGETS = {"pipeline": BUDGETS, "tensor": ALL_AND_LESS}
SHARDED = {"sharded base": Case(1, (), dp=2, layers=2, sharded="resharded")}
COMPILED = {name: replace(case, compiled=True) for name, case in (PLANS | SHARDED).items()}
MORE = SHARDED | {
    "interleaved": Case(2, (1, 2, 3), "interleaved"),
    "stages of cut matrices": Case(2, (1,), "1f1b", tp=2, layers=2),
}


def budgeted(folder, cases, budgets):
    """Differences from one process, and the bytes that rounds keep, of each case and budget."""
    found, uncut, rank = {}, folder / "uncut", str(torch.distributed.get_rank())
    for name, plain in cases.items():
        for budget in budgets[name]:
            case, own = replace(plain, budget=budget), folder / f"{name} {budget}"
            references(uncut / rank, case)
            compiled_once(own / rank, case.layers, case.upper, case.tied)
            saved = []

            def note(tensor, saved=saved):
                saved.append(tensor.nbytes)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                apart = differences(own, case, uncut)
            found[name, budget] = apart, sum(saved)
    return found


def require_equal_and_less(ranks, name, budgets=BUDGETS):
    for rank in ranks:
        for budget in budgets:
            apart, _ = rank[name, budget]
            assert max(apart.losses, apart.gradients) <= 1e-9
            assert not apart.missing
        kept = [rank[name, budget][1] for budget in budgets]
        assert kept == sorted(set(kept), reverse=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_processes(2, budgeted, tmp_path_factory.mktemp("two"), PLANS, QUICK_BUDGETS)


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_one_process(two, name):
    """At each budget, and the smaller one keeps less."""
    require_equal_and_less(two, name, QUICK_BUDGETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_keep_less_too(tmp_path, name):
    """As Dynamo and AOTAutograd see them, without generated code."""
    cases, budgets = {name: COMPILED[name]}, {name: BUDGETS}

    require_equal_and_less(run_processes(2, budgeted, tmp_path, cases, budgets), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_plans_with_stages_keep_less_too(tmp_path, name):
    """Several stages a process, stages whose matrices are cut, and bases that are sharded."""
    case = MORE[name]

    ranks = run_processes(
        case.pp * case.dp * case.tp, budgeted, tmp_path, {name: case}, {name: BUDGETS}
    )

    require_equal_and_less(ranks, name)
