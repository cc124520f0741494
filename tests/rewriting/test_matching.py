"""Patterns: what fits, what is captured, and what is said where they do not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from tests.models import error_of
from tlora_fx.errors import PatternWrong
from tlora_fx.rewriting import (
    add,
    anything,
    arguments_of,
    call,
    constant,
    either,
    find,
    match,
    mul,
    nearest_match,
    stored,
    uncast,
    where,
)

aten = torch.ops.aten
LINEAR = aten.linear.default
LORA = add(
    call(LINEAR, anything("x"), stored("W", owner="base"), name="frozen linear"),
    mul(
        call(LINEAR, uncast(anything("x")), stored("A"), name="down"),
        constant("scaling", float),
        name="scaled branch",
    ),
)


def test_a_pattern_captures_what_it_names(small):
    """Values by name: nodes, stored tensors, constants; the nodes that it describes beside them."""
    found = match(LORA, small["total"])

    assert found
    assert found["x"] is small["x"]
    assert found["scaling"] == 2.0
    assert found["down"] is small["down"]
    assert {node.name for node in found.nodes} == {
        "total", "frozen", "mlp_up", "scaled", "down", "cast", "mlp_a",
    }  # fmt: skip


def test_sums_and_products_match_in_either_order(small):
    """add(a, b) fits b + a."""
    total = small["total"]
    total.args = tuple(reversed(total.args))

    assert match(LORA, total)


@pytest.mark.parametrize("bias", [(), (None,)])
def test_an_argument_at_its_default_is_as_one_left_out(small, bias):
    """linear(x, w), linear(x, w, None) and linear(x, weight=w) are alike."""
    frozen = small["frozen"]
    frozen.args = (*frozen.args[:2], *bias)
    assert match(call(LINEAR, anything("x"), stored()), frozen)

    frozen.args, frozen.kwargs = frozen.args[:1], {"weight": frozen.args[1]}
    assert match(call(LINEAR, anything("x"), weight=stored("w"), bias=None), frozen)
    assert arguments_of(frozen) == {"input": small["x"], "weight": small["mlp_up"], "bias": None}


def test_an_argument_that_is_not_described_must_be_at_its_default(small):
    """Unless the pattern leaves it open with `...`."""
    total = small["total"]
    total.kwargs = {"alpha": 3}

    missed = match(LORA, total)

    assert not missed
    assert missed.why == "it has alpha = 3, not 1"
    assert match(call(aten.add.Tensor, anything(), anything(), ...), total)


def test_a_name_that_stands_twice_is_one_value(small):
    """x + x fits only where both are the same node."""
    twice = call(aten.add.Tensor, anything("x"), anything("x"))
    total = small["total"]

    missed = match(twice, total)
    assert missed.why == "the other of it is scaled, not the x"

    total.args = (small["frozen"], small["frozen"])
    assert match(twice, total)


def test_a_given_capture_must_be_met(small):
    """What is known before is a condition."""
    reads = call(LINEAR, anything("input"), ...)

    assert match(reads, small["frozen"], {"input": small["x"]})
    missed = match(reads, small["down"], {"input": small["x"]})
    assert missed.why == "the input of it is cast, not the input"
    assert missed.node is small["cast"]


def test_a_miss_says_what_held_and_what_failed(small):
    """The conditions in words, the node, and what is there instead."""
    small["down"].args = (*small["down"].args, small["mlp_up"])

    missed = match(LORA, small["total"])

    assert missed.why == "its down has a bias"
    assert missed.failed == "the bias of its down is left out, or None"
    assert missed.node is small["mlp_up"]
    assert missed.held[0] == "it is aten.add.Tensor"
    assert "its scaled branch is aten.mul.Tensor" in missed.held
    assert "the input of its down is the x" in missed.held


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (call(aten.mm.default, ..., name="product"),
         "its product is aten.add.Tensor, not aten.mm.default"),
        (add(stored("table"), anything()),
         "its table is computed, not stored (aten.linear.default)"),
        (add(anything(), constant("step")), "its step is computed (aten.mul.Tensor)"),
        (add(anything(), mul(anything(), constant("scale", int))), "its scale is 2.0"),
        (add(anything(), mul(anything(), 3.0)), "the other of it is 2.0, not 3.0"),
        (add(call(LINEAR, anything(), stored("A", owner="job")), anything()),
         "its A is mlp.up.weight, not one of the job"),
        (where("its sum is empty", lambda found: False, add(anything(), anything())),
         "it does not hold that its sum is empty"),
    ],
    ids=["operator", "stored", "constant", "kind", "value", "owner", "where"],
)  # fmt: skip
def test_each_pattern_says_why_it_does_not_fit(small, pattern, why):
    """One sentence."""
    assert match(pattern, small["total"]).why == why


def test_of_several_patterns_the_nearest_is_told(small):
    """The one of which most conditions held."""
    far = call(aten.sub.Tensor, ...)
    near = add(call(LINEAR, anything(), 3), anything())

    assert nearest_match([far, near], small["total"]).pattern is near
    assert nearest_match([near, LORA], small["total"]).pattern is LORA


def test_a_choice_goes_back_where_what_follows_fails(small):
    """The first choice fits alone, the second with what comes after it."""
    first = call(LINEAR, either(anything("y"), uncast(anything("x"))), stored())
    again = where("it is uncast", lambda found: "x" in found, first)

    assert match(again, small["down"])["x"] is small["x"]


def test_find_walks_a_graph_in_order(small):
    """All matches; nodes that nobody reads are passed over."""
    small.graph.call_function(LINEAR, (small["x"], small["mlp_up"]))

    found = [m.node.name for m in find(small.graph, call(LINEAR, anything(), stored(), ...))]

    assert found == ["frozen", "down"]


def test_lists_are_matched_item_by_item(small):
    """Operators that take lists."""
    with small.graph.inserting_after(small["frozen"]):
        view = small.graph.call_function(aten.view.default, (small["frozen"], [8, 5]))

    assert match(call(aten.view.default, anything(), [constant("rows"), 5]), view)["rows"] == 8
    assert not match(call(aten.view.default, anything(), [8]), view)


def test_a_pattern_prints_its_named_parts_line_by_line():
    """To be read in a report."""
    assert str(LORA).splitlines() == [
        "add(frozen linear, scaled branch)",
        "frozen linear = linear(x, W)",
        "scaled branch = mul(down, scaling)",
        "down = linear(cast*(x), A)",
    ]


def test_an_argument_that_the_operator_lacks_is_refused():
    """When the pattern is written, not when it meets a graph."""
    text = error_of(lambda: call(LINEAR, anything(), wieght=stored()), PatternWrong)

    assert "wieght" in text
    assert "nearest   weight" in text


@given(st.permutations(["frozen", "scaled", "down"]), st.data())
def test_a_match_and_a_miss_are_never_both(order, data):
    """Whatever stands where: a match has all names, a miss has a reason."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    w = graph.get_attr("w")
    made = {
        "frozen": graph.call_function(LINEAR, (x, w)),
        "down": graph.call_function(LINEAR, (x, w)),
    }
    made["scaled"] = graph.call_function(aten.mul.Tensor, (made["down"], data.draw(st.floats())))
    total = graph.call_function(aten.add.Tensor, (made[order[0]], made[order[1]]))
    pattern = add(call(LINEAR, anything("x"), stored("W")), mul(anything("y"), constant("s")))

    found = match(pattern, total)

    if found:
        assert {"x", "W", "y", "s"} <= set(found.captures)
    else:
        assert found.why
        assert {order[0], order[1]} != {"frozen", "scaled"}
