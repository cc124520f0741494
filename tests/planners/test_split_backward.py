"""A backward in halves gives what a whole one gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tlora_fx.planners.split_backward import backward_of_input, backward_of_weights


def two_results(x, a, b):
    """One operator of two results, as sites that share their input have."""
    return TwoLinears.apply(x, a, b)


class TwoLinears(torch.autograd.Function):
    """x a and x b."""

    @staticmethod
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x, a, b)
        return x @ a, x @ b

    @staticmethod
    def backward(ctx, first, second):
        x, a, b = ctx.saved_tensors
        gives = ctx.needs_input_grad
        return (
            first @ a.t() + second @ b.t() if gives[0] else None,
            x.t() @ first if gives[1] else None,
            x.t() @ second if gives[2] else None,
        )


def several_results(x, leaves):
    one, two = two_results(x, leaves[0], leaves[1])
    return x + one * torch.sigmoid(two)


def one_leaf_twice(x, leaves):
    return x + torch.tanh(x @ leaves[0]) @ leaves[0] @ (leaves[1] * 2)


def a_leaf_beside_the_way(x, leaves):
    return (x @ (leaves[0] @ leaves[1]) + leaves[0].sum()).relu()


@pytest.mark.parametrize("function", [several_results, one_leaf_twice, a_leaf_beside_the_way])
@pytest.mark.parametrize("loss", [False, True], ids=["hidden", "loss"])
def test_both_halves_give_the_gradients_of_a_whole_backward(function, loss):
    """For operators of several results, and for leaves that are read twice."""
    torch.manual_seed(0)
    start = torch.randn(3, 4, dtype=torch.float64)
    weights = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    grad = None if loss else torch.randn(3, 4, dtype=torch.float64)

    def prepared():
        x = start.clone().requires_grad_()
        leaves = [nn.Parameter(weight.clone()) for weight in weights]
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        out = function(x, leaves)
        return x, leaves, out.sum() if loss else out

    x, expected, out = prepared()
    out.backward(grad)
    y, found, out = prepared()
    homes = [leaf.grad for leaf in found]
    half, left = backward_of_input((out,), None if grad is None else (grad,), y)

    assert torch.allclose(half, x.grad, rtol=1e-12)
    assert all(bool((leaf.grad == 1).all()) for leaf in found)
    backward_of_weights(left)
    for leaf, other, home in zip(found, expected, homes, strict=True):
        assert torch.allclose(leaf.grad, other.grad, rtol=1e-12)
        assert leaf.grad is home


def test_hooks_of_leaves_are_called_in_the_second_half():
    """What watches gradients sees them."""
    leaves = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    seen = []
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(seen.append)
    x = torch.ones(2, 4, requires_grad=True)
    _, left = backward_of_input((several_results(x, leaves),), (torch.ones(2, 4),), x)

    assert not seen
    backward_of_weights(left)
    assert {id(one) for one in seen} == {id(leaf) for leaf in leaves}
