"""The hash by which the pipeline sees what changed."""

from __future__ import annotations

import pytest
import torch

from tests.pipeline.graphs import add_relu, aten, relu_of, small_graph
from tlora_fx.ir.graph import AdapterSite
from tlora_fx.ir.verifier import fingerprint


def _other_operator(graph):
    relu_of(graph).target = aten.neg.default


def _other_argument(graph):
    node = relu_of(graph)
    node.target, node.args = aten.add.Tensor, (node.args[0], 2)


def _keyword(graph):
    relu_of(graph).kwargs = {"inplace": True}


def _constant(graph):
    graph.constants["c"] = torch.zeros(2)


def _value_of_a_constant(graph):
    graph.constants["known"][0] = 5.0


def _rate(graph):
    relu_of(graph).meta["rate"] = 0.5


def _scaling(graph):
    graph.sites["q"] = AdapterSite("q", 4, 3.0, 0.0)


CHANGES = [
    add_relu, _other_operator, _other_argument, _keyword, _constant, _value_of_a_constant, _rate,
    _scaling,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_changes_has_another_fingerprint(change):
    """Operators, arguments, keywords, constants and their values, rates, scalings."""
    graph = small_graph()
    graph.constants.update(known=torch.ones(2), alone=torch.tensor(3.0))
    before = fingerprint(graph)

    change(graph)

    assert before.change_to(fingerprint(graph)) == "code"


def test_names_do_not_count():
    """Two graphs that compute the same have one fingerprint, whatever their nodes are called."""
    one, two = small_graph(), small_graph()
    relu_of(two)._rename("other")

    assert fingerprint(one) == fingerprint(two)


def test_tags_are_told_apart_from_code():
    """A pass that only tags changed no code."""
    graph = small_graph()
    before = fingerprint(graph)

    relu_of(graph).meta["role"] = "backbone"

    assert before.change_to(fingerprint(graph)) == "tags"


def test_every_pass_of_a_compilation_is_seen(group_after):
    """Fusing and lowering give other graphs; two equal compilations the same."""
    passes = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"
    fused, again = (group_after(passes, "plain", fresh=True) for _ in range(2))
    lowered = group_after(f"{passes},lower-adapters", "plain")

    assert fingerprint(fused) == fingerprint(again)
    assert fingerprint(fused).code != fingerprint(lowered).code
