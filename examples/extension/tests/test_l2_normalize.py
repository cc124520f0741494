"""`l2_normalize`: the operator, its gradient, and both of its rules."""

import pytest
import torch
from tlora_fx_extension.l2_normalize import l2_normalize, ops
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from tlora_fx.passes.tensor_parallel.rules import CannotCarry, Operands, carried
from tlora_fx.passes.token_parallel.rules import MixesTokens, find_rule

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def call_on(dim):
    """A call in a graph, and its argument's node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(ops.l2_normalize.default, (x, dim))
    x.meta["val"] = node.meta["val"] = X
    return node, x


def test_the_operator_holds_together():
    """Schema, fake and autograd registration, under dynamic sizes too."""
    torch.library.opcheck(l2_normalize, (X.clone().requires_grad_(), -1))


def test_gradients_are_those_of_plain_torch():
    """In float64."""
    torch.autograd.gradcheck(lambda x: l2_normalize(x, -1), X.clone().requires_grad_())


def test_tokens_stay_apart_along_features_only():
    """The row's axis is carried; a norm over the row is refused."""
    rule = find_rule(ops.l2_normalize.default)
    node, x = call_on(-1)
    assert rule(node, {x: 0}.get) == 0

    node, x = call_on(0)
    with pytest.raises(MixesTokens, match="norm over the row"):
        rule(node, {x: 0}.get)


def test_pieces_are_carried_along_other_dimensions_only():
    """A piece of the features has no norm of its own."""
    node, x = call_on(-1)
    assert carried(Operands(node, 2, {x: 0})) == 0
    with pytest.raises(CannotCarry, match="whole of what is cut"):
        carried(Operands(node, 2, {x: 1}))


def test_its_cost_is_known():
    """Three operations an element."""
    with FlopCounterMode(display=False) as counter:
        l2_normalize(X, -1)

    assert counter.get_total_flops() == 3 * X.numel()
