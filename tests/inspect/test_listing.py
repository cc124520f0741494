"""What a listing says of a model, against the model itself."""

from __future__ import annotations

import pytest

from tests.inspect.conftest import LLAMA_8B, NARROW
from tests.models import randomise
from tlora_fx.inspect.schema import Listing
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters


def rows_of(listing: Listing, module: str):
    """The rows of a module in all blocks."""
    return [row for block in listing.blocks for row in block.rows if row.module == module]


@pytest.mark.parametrize("name", ["quickstart", "odd"])
def test_a_jobs_parameters_are_those_that_it_trains(name, request):
    """Counted from the graph, equal to what the model hands to the optimizer."""
    model = request.getfixturevalue(name)
    listing = request.getfixturevalue(f"{name}_listing")
    model.materialize(base_tensors(model.backbone), "cpu")
    start_adapters(model)
    randomise(model, 1)

    for job in listing.jobs:
        assert job.parameters == sum(p.numel() for p in model.job_parameters(job.name).values())


def test_shared_parameters_are_the_bases(quickstart, quickstart_listing):
    """Each of them counted once."""
    parameters = list(quickstart.backbone.model.parameters())

    assert quickstart_listing.totals.shared_parameters == sum(p.numel() for p in parameters)


LONG = [pytest.param("many", LLAMA_8B, marks=pytest.mark.slow), ("narrow", NARROW)]


@pytest.mark.parametrize(("name", "config"), LONG)
def test_a_long_base_has_all_its_parameters_and_sites(name, config, request):
    """Seven linears in each layer; the keys and values of Llama-3-8B have 8 of 32 heads."""
    totals = request.getfixturevalue(f"{name}_listing").totals
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = 2.5 * hidden**2 + 3 * hidden * config["intermediate_size"] + 2 * hidden

    assert totals.shared_parameters == (2 * config["vocab_size"] + 1) * hidden + layers * layer
    assert totals.sites == 7 * layers


@pytest.mark.parametrize(("name", "config"), LONG)
def test_the_forward_of_a_long_base_costs_two_operations_a_weight(name, config, request):
    """Within 2%, without its embedding, which multiplies nothing, and without adapters."""
    listing = request.getfixturevalue(f"{name}_listing")
    adapters = sum(
        max(1, len(block.layers)) * (branch.flop_per_token or 0) / len(listing.jobs)
        for block in listing.blocks
        for row in block.rows
        for branch in row.branches
    )
    weights = listing.totals.shared_parameters - config["vocab_size"] * config["hidden_size"]
    found = (listing.totals.flop_per_token or 0) - adapters

    assert found == pytest.approx(2 * weights, rel=0.02)


@pytest.mark.parametrize(("name", "config"), LONG)
def test_training_a_long_base_costs_four_operations_a_weight(name, config, request):
    """4·P·T within 2%: forward 2·P·T, the gradient of the input 2·P·T; adapters 6 operations."""
    listing = request.getfixturevalue(f"{name}_listing")
    adapters = listing.totals.adapter_parameters / len(listing.jobs)
    weights = listing.totals.shared_parameters - config["vocab_size"] * config["hidden_size"]

    assert listing.totals.training_flop_per_token == pytest.approx(
        4 * weights + 6 * adapters, rel=0.02
    )


def test_a_site_costs_its_weight_and_the_mean_of_its_branches(quickstart_listing):
    """A multiply-add counts two; jobs bring equal shares of the tokens."""
    (row,) = rows_of(quickstart_listing, "self_attn.q_proj")

    assert row.flop_per_token == 2 * 128 * 128 + 2 * (128 + 128) * (16 + 8 + 4) / 3


def test_attention_costs_by_the_length_of_the_sequence(quickstart_listing):
    """Scores and values: four operations a head's dimension, token and token before it."""
    (row,) = rows_of(quickstart_listing, "self_attn")

    assert row.flop_per_length == 4 * 4 * 32
    assert row.operator == "packed_attention"


def test_norms_are_recognised(quickstart_listing):
    """Their arithmetic reads as one operator."""
    assert {row.operator for row in rows_of(quickstart_listing, "input_layernorm")} == {"rms_norm"}


def test_bytes_of_a_site_are_its_weight_and_its_bank(quickstart_listing):
    """float32, ranks 16, 8 and 4."""
    (row,) = rows_of(quickstart_listing, "self_attn.q_proj")

    assert row.weight_bytes == 4 * 128 * 128
    assert row.adapter_bytes == 4 * (16 + 8 + 4) * (128 + 128)


def test_every_adapter_of_every_job_stands_in_some_row(odd, odd_listing):
    """Lowered or as it is: none is lost."""
    listed: dict[str, set[str]] = {}
    for block in odd_listing.blocks:
        for row in block.rows:
            for branch in row.branches:
                paths = [f"{layer}.{row.module}" for layer in block.layers] or [row.module]
                listed.setdefault(branch.job, set()).update(paths)

    for job in odd.group.jobs:
        assert listed[job.name] == set(job.sites)


def test_structures_say_what_tells_them_apart(odd_listing):
    """Another base layer, or other adapters."""
    why = {block.layers[0]: block.why for block in odd_listing.blocks if block.layers}

    assert why["model.layers.0"] == ""
    assert why["model.layers.1"] == "the base computes other things here"
    assert why["model.layers.3"] == "other adapters than in layers.1: one-layer"


def test_a_copy_that_a_job_trains_costs_its_own_product(odd_listing):
    """The base's head for all, and one job's copy for its share."""
    (row,) = rows_of(odd_listing, "lm_head")
    (branch,) = row.branches

    assert branch.kind == "saved"
    assert branch.flop_per_token == 2 * 32 * 61
    assert row.flop_per_token == 2 * 32 * 61 * (1 + 1 / 5)


def test_doras_norm_costs_once_a_row(odd_listing):
    """It multiplies weights, not tokens."""
    row = rows_of(odd_listing, "self_attn.q_proj")[0]

    assert row.flop_per_row > 2 * 32 * 32 * 3


def test_attention_kinds_are_listed_by_layer(odd_listing):
    """Sliding and full attention take turns in Gemma 2."""
    windows = {found.layers[0]: found.window for found in odd_listing.attention}

    assert windows["model.layers.0"] == 4
    assert windows["model.layers.1"] == -1


def test_padded_rows_have_lines_in_their_shapes(padded_listing):
    """A hand-written module: B lines of S tokens."""
    (row,) = rows_of(padded_listing, "qkv")

    assert padded_listing.form == "batch"
    assert row.shape == ["B", "S", 96]
    assert row.flop_per_token == 2 * 32 * 96 + 2 * 2 * (32 + 96)


def test_attention_over_padded_rows_costs_by_length(padded_listing):
    """Two products of 32 numbers for each pair of tokens, and the softmax between them."""
    rows = [row for block in padded_listing.blocks for row in block.rows if row.flop_per_length]

    assert any(row.flop_per_length >= 2 * 2 * 32 for row in rows)


def test_dropout_of_the_base_is_listed(padded_listing):
    """With its rate, for all jobs."""
    assert {(found.module, found.rate) for found in padded_listing.dropouts} == {("drop", 0.1)}
    assert padded_listing.dropouts[0].jobs == ["one", "two"]
