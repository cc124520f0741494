"""Stages compute together what the whole model computes."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.pipelines import compiled, load, rows_of
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import NoStage, PipelineBroken, TokensMismatch
from tlora_fx.ir.graph import placeholders
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.stages import StageModule, cut_stages, held_by, legal_cuts
from tlora_fx.planners.stage_cuts import balanced_cuts, cut_layers, layer_products


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """Four layers, adapters in the upper two, one matrix for embedding and head."""
    return compiled(tmp_path_factory.mktemp("base"), 4, upper=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(meta):
    made = SuperModel(meta.group, meta.backbone, meta.jobs)
    load(made)
    return made


def run(model, cuts, row):
    hidden = None
    for graph in cut_stages(model, cuts):
        hidden = StageModule(model, graph)(hidden, row)
    return hidden


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (1, 2, 3)])
def test_stages_one_after_the_other_are_the_model(model, cuts):
    """Every row gives the same bits, wherever the layers are cut."""
    for row in rows_of():
        assert torch.equal(run(model, cuts, row), model(row))


def test_a_stage_computes_tables_again_and_holds_its_layers_alone(meta):
    """Rotary frequencies are in every stage; embedding and head at the ends."""
    plan = Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(3,))
    below, above = held_by(meta, plan, 0), held_by(meta, plan, 1)

    assert below & above == {"model.rotary_emb.inv_freq"}
    assert "model.embed_tokens.weight" in below
    assert {"model.layers.3", "model.norm.weight", "loss"} <= above


def test_what_a_process_holds_is_enough_for_its_stages(meta):
    """With the rest on the meta device, interleaved stages of one process still run."""
    plan = Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(1, 2, 3), schedule="interleaved")
    part = SuperModel(meta.group, meta.backbone, meta.jobs)
    load(part, LocalShard(held_by(part, plan, 0)))
    first, _, third, _ = cut_stages(part, plan.cuts)
    row = rows_of()[0]
    hidden = StageModule(part, first)(None, row)

    assert StageModule(part, third)(hidden, row).shape == hidden.shape
    assert part.net.get_submodule("model.layers.1.mlp.up_proj").weight.is_meta


def test_gradients_travel_down_to_the_lowest_adapter(meta):
    """Below it nothing is learned, and no gradient is waited for."""
    stages = cut_stages(meta, (1, 2, 3))

    assert [stage.learns for stage in stages] == [False, False, True, True]
    assert [stage.needs_grad for stage in stages] == [False, False, False, True]


def test_hidden_values_of_another_row_are_refused(model):
    """A stage knows from its own table how many tokens come."""
    first, second = (StageModule(model, graph) for graph in cut_stages(model, (2,)))
    long, short = rows_of()[:2]

    with pytest.raises(TokensMismatch, match="another micro-batch"):
        second(first(None, long), short)


def test_a_value_that_learns_against_its_graph_is_refused(model):
    """A boundary whose gradient would be lost ends the run."""
    graph = cut_stages(model, (2,))[1]
    hidden = torch.zeros(graph.takes.shape(rows_of()[0]), dtype=torch.float64)
    stage = StageModule(model, graph)

    with torch.no_grad():
        assert not stage(hidden, rows_of()[0]).requires_grad
    for leaf in model.net.parameters():
        leaf.requires_grad_(False)
    try:
        with pytest.raises(PipelineBroken, match="need of a gradient"):
            stage(hidden, rows_of()[0])
    finally:
        for bank in model.banks.values():
            bank.requires_grad_(True)


@pytest.mark.parametrize("cut", [0, 4, 9, -1])
def test_a_cut_outside_of_the_layers_is_refused(meta, cut):
    """With the places that can be cut."""
    with pytest.raises(NoStage, match="cut at one of 1, 2, 3"):
        cut_stages(meta, (cut,))


def test_a_second_value_that_crosses_is_named(tmp_path):
    """Where a later layer reads an earlier one's value too, no stage begins between them."""
    model = compiled(tmp_path, 4, upper=2, tie_word_embeddings=True)
    root = model.group.root
    calls = [node for node in root.nodes if node.op == "call_module" and "layers" in node.target]
    with root.inserting_after(calls[3]):
        both = root.call_function(torch.ops.aten.add.Tensor, (calls[3], calls[1]))
    both.meta = dict(calls[3].meta)
    calls[3].replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)

    assert legal_cuts(model) == (1, 2)
    with pytest.raises(NoStage, match="cut at one of 1, 2") as caught:
        cut_stages(model, (3,))
    assert calls[1].name in str(caught.value)


def test_tables_of_a_row_reach_a_stage_by_name(model):
    """A stage takes what its nodes read, and nothing else."""
    last = StageModule(model, cut_stages(model, (2,))[1])

    assert set(last.inputs) == set(placeholders(model.group.root)) - {"input_ids"}


def test_cost_moves_the_cut_up_where_lower_layers_learn_nothing(meta):
    """Layers below the lowest adapter cost no backward."""
    costs = layer_products(meta)

    assert costs[0] == costs[1] < costs[2] < costs[3]
    assert balanced_cuts(meta, 2) == (3,)
    assert cut_layers([1.0] * 4, 2) == (2,)


COSTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@given(costs=COSTS, stages=st.integers(1, 5))
def test_no_other_cut_has_a_cheaper_dearest_stage(costs, stages):
    """Against every possible cut."""
    if stages > len(costs):
        with pytest.raises(NoStage):
            cut_layers(costs, stages)
        return

    def dearest(cuts):
        bounds = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    every = combinations(range(1, len(costs)), stages - 1)
    found = cut_layers(costs, stages)
    assert len(found) == stages - 1
    assert dearest(found) <= min(map(dearest, every)) * (1 + 1e-6)


@given(costs=COSTS, legal=st.sets(st.integers(1, 8)))
def test_cuts_are_where_they_may_be(costs, legal):
    """A stage begins only where a single value crosses."""
    allowed = {place for place in legal if place < len(costs)}

    assert set(cut_layers(costs, len(allowed) + 1, allowed)) == allowed
