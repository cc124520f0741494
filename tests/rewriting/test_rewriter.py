"""Rewriting helpers: what they put in place is whole."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.models import error_of
from tlora_fx.errors import GraphInvalid, RewriteMismatch
from tlora_fx.ir.graph import TensorRef, ancestry, origin_of, record
from tlora_fx.pipeline import Rewrites, counting
from tlora_fx.rewriting import Rewriter, anything, call, mul, stored

aten = torch.ops.aten
SCALED = mul(call(aten.linear.default, anything("x"), stored("A"), name="down"), 2.0)


@pytest.fixture
def rewriter(small):
    return Rewriter(small.graph)


def fold_scale(found):
    """2 * linear(x, A) as linear(x, 2 * A)."""
    return lambda make: make(
        aten.linear.default, found["x"], make(aten.mul.Tensor, found["A"], 2.0)
    )


def replace_scaled(rewriter):
    (found,) = rewriter.find(SCALED)
    return rewriter.replace(found, fold_scale(found))


def test_replace_puts_a_subgraph_in_a_matchs_place(small, rewriter):
    """Readers read the new value; what only the old one read is gone."""
    new = replace_scaled(rewriter)

    small.graph.lint()
    assert small.targets() == ["linear", "to", "mul", "linear", "add", "relu"]
    assert new in small["total"].args


def test_what_replace_makes_has_values_and_tags(small, rewriter):
    """Shape, role, jobs, path and source line, without the author doing anything."""
    new = replace_scaled(rewriter)

    for node in (new, new.args[1]):
        assert node.meta["val"].dtype == torch.float32
        assert node.meta["role"] == "shared"
        assert node.meta["jobs"] == ()
        assert node.meta["path"] == "mlp"
        assert node.meta["source"].startswith("model.py:")
    assert tuple(new.meta["val"].shape) == (5, 8)
    assert tuple(new.args[1].meta["val"].shape) == (8, 8)


def test_what_replace_makes_says_what_it_was_made_from(small, rewriter):
    """The matched nodes are its sources once the pass has ended."""
    new = replace_scaled(rewriter)

    record([("", small.graph)], "my-pass", "base")

    assert origin_of(new).made_by == "my-pass"
    keys = {origin.key for origin in ancestry(origin_of(new))}
    assert {"base/mlp:mul", "base/mlp.a:linear"} <= keys


def test_a_rewrite_that_is_held_back_leaves_the_graph_as_it_is(small, rewriter):
    """The helper says so by returning None, and counts it all the same."""
    before = small.targets()
    rewrites = Rewrites(limit=0)

    with counting(rewrites):
        assert replace_scaled(rewriter) is None
        after = rewriter.insert_after(small["total"], lambda make: make(aten.silu.default, make))
        assert after is None
        assert rewriter.bypass(small["cast"], small["x"]) is False

    assert small.targets() == before
    assert rewrites.descriptions == [
        "replace scaled at mlp",
        "insert after total at mlp",
        "drop cast at mlp",
    ]


def test_a_value_of_another_type_is_refused(small, rewriter):
    """The error names both values."""
    (found,) = rewriter.find(SCALED)

    text = error_of(
        lambda: rewriter.replace(found, lambda make: make(aten.t.default, found.node)),
        RewriteMismatch,
    )

    assert "[5, 8] torch.float32" in text
    assert "[8, 5] torch.float32" in text


def test_an_operator_that_does_not_take_its_arguments_is_refused(small, rewriter):
    """At once, not when the pass has ended."""
    (found,) = rewriter.find(SCALED)

    def build(make):
        return make(aten.mm.default, found["x"], found["x"])

    assert "aten.mm" in error_of(lambda: rewriter.replace(found, build), GraphInvalid)


def test_insert_after_redirects_every_reader(small, rewriter):
    """But what was inserted reads the node itself."""
    total = small["total"]
    new = rewriter.insert_after(total, lambda make: make(aten.silu.default, total))

    assert small["result"].args == (new,)
    assert new.args == (total,)
    assert small.targets()[-3:] == ["add", "silu", "relu"]


def test_insert_after_an_input_keeps_inputs_first(small, rewriter):
    """Graphs take all placeholders before they compute."""
    x = small["x"]
    new = rewriter.insert_after(x, lambda make: make(aten.neg.default, x))

    small.graph.lint()
    assert small["frozen"].args[0] is new
    assert new.prev is x


def test_insert_before_redirects_one_reader(small, rewriter):
    """Others read the argument itself."""
    x, down = small["x"], small["frozen"]
    new = rewriter.insert_before(down, x, lambda make: make(aten.neg.default, x))

    assert down.args[0] is new
    assert small["cast"].args[0] is x


def test_bypass_drops_a_node_that_does_nothing(small, rewriter):
    """Its readers read what is there already."""
    assert rewriter.bypass(small["cast"], small["x"])

    assert small["down"].args[0] is small["x"]
    assert "to" not in small.targets()


def test_bypass_refuses_a_node_that_does_something(small, rewriter):
    """Shapes differ."""
    assert "mlp_up" in error_of(
        lambda: rewriter.bypass(small["cast"], small["mlp_up"]), RewriteMismatch
    )


def test_erase_dead_keeps_inputs(small, rewriter):
    """Everything else that nobody reads goes, and what only that read."""
    small["result"].args = (small["frozen"],)

    assert rewriter.erase_dead() == 5
    assert small.targets() == ["linear", "relu"]
    assert [node.op for node in small.graph.nodes][:1] == ["placeholder"]


def test_a_maker_reads_stored_tensors_and_takes_other_tags(small, rewriter):
    """Tables that a pass needs beside what it replaces."""
    make = rewriter.at(small["total"])
    table = make.tagged(role="table").tensor(
        TensorRef("buffer", "t", (8,), torch.float64), rate=0.5
    )

    assert table.meta["role"] == "table"
    assert table.meta["rate"] == 0.5
    assert table.meta["val"].dtype == torch.float64
    assert table.next is small["total"]


HELPERS = {
    "replace": lambda rewriter, node: rewriter.replace(
        node, lambda make: make(aten.relu.default, node)
    ),
    "replace_several": lambda rewriter, node: rewriter.replace_several([node], lambda make: [node]),
    "insert_after": lambda rewriter, node: rewriter.insert_after(
        node, lambda make: make(aten.relu.default, node)
    ),
    "bypass": lambda rewriter, node: rewriter.bypass(node, node.all_input_nodes[0]),
    "at": lambda rewriter, node: rewriter.at(node),
}


@pytest.mark.parametrize("helper", HELPERS)
def test_a_node_of_another_graph_is_refused(small, helper):
    """Such as of a layer's code, where the rewriter is the root's; torch would only assert."""
    told = error_of(lambda: HELPERS[helper](Rewriter(fx.Graph()), small["total"]), GraphInvalid)

    assert "a node of another graph" in told
    assert "Rewriter(node.graph)" in told
