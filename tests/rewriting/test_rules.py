"""Sets of rules, rewrites of several values at once, and patterns of functions."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.models import error_of
from tlora_fx.errors import PatternWrong, RewriteMismatch, RewritesEndless
from tlora_fx.ir.graph import origin_of, record
from tlora_fx.pipeline import Rewrites, counting
from tlora_fx.rewriting import (
    Rewriter,
    RewriteRule,
    anything,
    call,
    match,
    pattern_of,
    read_by,
    rewrite_greedily,
    shaped,
    stored,
    typed,
)

aten = torch.ops.aten
LINEAR = call(aten.linear.default, anything("x"), stored("w"), ...)


def rule(source, target, **options):
    """A call of one operator in place of another's."""
    return RewriteRule(
        call(source, anything("x")),
        lambda found: lambda make: make(target, found["x"]),
        **options,
    )


def test_rules_apply_until_none_fits(small):
    """What one makes, another takes on."""
    rules = [rule(aten.relu.default, aten.abs.default), rule(aten.abs.default, aten.neg.default)]

    assert rewrite_greedily(small.graph, rules) == 2
    assert small.targets()[-1] == "neg"


def test_the_rule_of_most_benefit_is_taken(small):
    """Where two fit."""
    rules = [
        rule(aten.relu.default, aten.abs.default),
        rule(aten.relu.default, aten.neg.default, benefit=2),
    ]

    rewrite_greedily(small.graph, rules)

    assert small.targets()[-1] == "neg"


def test_rules_in_circles_are_refused(small):
    """With the node."""
    rules = [rule(aten.relu.default, aten.abs.default), rule(aten.abs.default, aten.relu.default)]

    assert "come to no end" in error_of(
        lambda: rewrite_greedily(small.graph, rules), RewritesEndless
    )


def test_a_bisection_holds_rules_back(small):
    """One rewrite is one of a bisection's."""
    rules = [rule(aten.relu.default, aten.abs.default, name="abs")]

    with counting(Rewrites(limit=0)) as _:
        assert rewrite_greedily(small.graph, rules) == 0
    assert small.targets()[-1] == "relu"


def halves(found):
    """Two products as the halves of a stack."""

    def build(make):
        both = make(aten.stack.default, [item["x"] for item in found])
        parts = make(aten.unbind.int, both)
        return [make(operator.getitem, parts, index) for index in range(2)]

    return build


def test_several_values_are_replaced_as_one_rewrite(small):
    """It counts once; a new value is made from the one that it replaces, the rest from all."""
    rewrites = Rewrites()
    frozen, down = small["frozen"], small["down"]
    keys = [origin_of(node).key for node in (frozen, down)]
    matches = [match(LINEAR, frozen), match(LINEAR, down)]

    with counting(rewrites):
        first, second = Rewriter(small.graph).replace_several(matches, halves(matches), "both")
    record([("", small.graph)], "test", "base")

    small.graph.lint()
    assert rewrites.descriptions == ["both"]
    assert keys[0] in [source.key for source in origin_of(first).sources]
    assert keys[1] in [source.key for source in origin_of(second).sources]
    shared = origin_of(first.args[0])
    assert set(keys) <= {source.key for source in shared.sources}
    assert first.meta["path"] == "mlp.up"
    assert second.meta["path"] == "mlp.a"


def test_values_that_are_made_of_each_other_are_no_set(small):
    """No place is before both."""
    nodes = [small["down"], small["scaled"]]

    assert Rewriter(small.graph).replace_several(nodes, lambda make: nodes) is None


def test_another_number_of_values_is_refused(small):
    """A value for each."""
    matches = [match(LINEAR, small["frozen"]), match(LINEAR, small["down"])]
    rewriter = Rewriter(small.graph)

    text = error_of(
        lambda: rewriter.replace_several(
            matches, lambda make: [make(aten.neg.default, small["x"])]
        ),
        RewriteMismatch,
    )
    assert "expected  2 values" in text


def scaled_branch(x, a):
    """What the graph's branch computes."""
    return torch.nn.functional.linear(x.to(torch.float32), a) * 2.0


def test_a_function_is_a_pattern(small):
    """Parameters are captured by name; a product fits in either order."""
    example = torch.zeros(5, 8), torch.zeros(8, 8)
    found = match(pattern_of(lambda x, a: 2.0 * torch.nn.functional.linear(x, a), *example,
                             weights=["a"]), small["scaled"])  # fmt: skip

    assert found["x"] is small["cast"]
    assert found["a"] is small["down"].args[1]


def test_a_function_that_reads_a_value_twice_wants_it_twice(small):
    """Two equal calls are not one."""
    pattern = pattern_of(lambda x: torch.relu(x) + torch.relu(x), torch.zeros(5, 8))
    missed = match(pattern, small["total"])

    assert not missed


def test_a_function_without_a_result_of_its_own_is_no_pattern():
    """Nor one that decides by values."""
    assert "no value that it computes" in error_of(
        lambda: pattern_of(lambda x: x, torch.zeros(2)), PatternWrong
    )
    assert "is no pattern" in error_of(
        lambda: pattern_of(lambda x: x + 1 if x.sum() > 0 else x, torch.zeros(2)), PatternWrong
    )


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (read_by(anything(), 3), "it is read by 2; what is wanted is read by 3"),
        (typed(anything(), torch.int64), "it is of type float32; what is wanted is of type int64"),
        (shaped(anything(), 5, 9), "it has the shape [5, 8]; what is wanted has the shape [5, 9]"),
        (shaped(anything(), 8), "it has the shape [5, 8]; what is wanted has the shape [8]"),
    ],
)
def test_a_condition_that_fails_says_why(small, pattern, why):
    """As all patterns do."""
    node = small["x"]

    assert match(pattern, node).why == why


def test_sizes_are_captured_and_compared(small):
    """A name that stands twice is one size."""
    same = call(aten.add.Tensor, shaped(anything(), "n", "m"), shaped(anything(), "n", "m"))
    other = call(aten.add.Tensor, shaped(anything(), "n", "m"), shaped(anything(), ..., "n"))

    assert match(same, small["total"])["m"] == 8
    assert not match(other, small["total"])
