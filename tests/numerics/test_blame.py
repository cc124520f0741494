"""What numerical verification once let pass, or blamed the wrong node or pass for."""

from __future__ import annotations

import torch

from tests.models import error_of
from tests.numerics.conftest import a_pass, nodes
from tlora_fx.errors import GraphInvalid, NumericsBroken

aten = torch.ops.aten
FUSED = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"


def test_a_layer_that_no_longer_runs_is_not_called_exact(verdict):
    """One layer of each structure cannot tell: all run."""

    def skip(group):
        first, second, *_ = [n for n in group.root.nodes if n.op == "call_module"]
        second.replace_all_uses_with(first)
        group.root.erase_node(second)

    skips = a_pass(skip)
    assert "drops adapters" in error_of(lambda: verdict(FUSED, [skips], "plain"), GraphInvalid)
    text = error_of(lambda: verdict(FUSED, [skips], "plain", checked=False), NumericsBroken)
    assert "model.layers." in text


def test_a_pass_does_not_widen_its_own_bound(verdict):
    """Casts to bfloat16 that it brings do not count as the dtype of the graphs."""

    def narrow(group):
        for node in nodes(group, "aten.linear", role="shared"):
            with node.graph.inserting_after(node):
                half = node.graph.call_function(aten.to.dtype, (node, torch.bfloat16))
            with node.graph.inserting_after(half):
                back = node.graph.call_function(aten.to.dtype, (half, torch.float32))
            half.meta.update({k: v for k, v in node.meta.items() if k not in ("run", "origin")})
            back.meta.update({k: v for k, v in half.meta.items() if k != "run"})
            node.replace_all_uses_with(back, lambda user, half=half: user is not half)

    text = error_of(
        lambda: verdict(FUSED, [a_pass(narrow, numerics="bound")], "plain"), NumericsBroken
    )

    assert "within 2e-05" in text


def test_a_fault_in_the_root_is_not_blamed_on_a_layers_input(verdict):
    """The node that the root calls the layer with is named."""

    def scale(group):
        node = nodes(group, "aten.embedding")[0]
        with group.root.inserting_after(node):
            made = group.root.call_function(aten.mul.Tensor, (node, 2.0))
        made.meta.update({k: v for k, v in node.meta.items() if k not in ("run", "origin")})
        node.replace_all_uses_with(made, lambda user: user is not made)

    text = error_of(lambda: verdict(FUSED, [a_pass(scale)], "plain"), NumericsBroken)

    (line,) = [line for line in text.splitlines() if line.strip().startswith("node ")]
    assert "aten.mul" in line


def test_a_pass_after_one_that_leaves_nan_is_not_blamed(verdict):
    """Nothing can be told of it."""

    def spoil(group):
        nodes(group, "aten.silu")[0].target = aten.neg.default
        node = nodes(group, "aten.embedding")[0]
        with group.root.inserting_after(node):
            made = group.root.call_function(aten.mul.Tensor, (node, float("nan")))
        made.meta.update({k: v for k, v in node.meta.items() if k not in ("run", "origin")})
        node.replace_all_uses_with(made, lambda user: user is not made)

    def again(group):
        node = nodes(group, "aten.neg")[0]
        with node.graph.inserting_after(node):
            made = node.graph.call_function(aten.clone.default, (node,))
        made.meta.update({k: v for k, v in node.meta.items() if k not in ("run", "origin")})
        node.replace_all_uses_with(made, lambda user: user is not made)

    told = verdict(FUSED, [a_pass(spoil, numerics="no"), a_pass(again)], "plain")

    assert told == "not checked: losses or gradients before it are not finite"
