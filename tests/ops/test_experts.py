"""`expert_linear`: against a product with one gathered matrix for each pair."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.errors import ExpertLinearError
from tlora_fx.ops import expert_linear
from tlora_fx.ops.kernels import strict

TOKENS, CHOSEN, EXPERTS, INNER, OUTER = 11, 2, 5, 6, 4
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def made(*, turned=False, shared=True, tokens=TOKENS, skipped=2):
    """x, matrices, biases and an index in which one expert has nothing to do."""
    draw = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    sizes = (INNER, OUTER) if turned else (OUTER, INNER)
    x = drawn(tokens, INNER) if shared else drawn(tokens, CHOSEN, INNER)
    index = torch.randint(EXPERTS - 1, (tokens, CHOSEN), generator=draw)
    return x, drawn(EXPERTS, *sizes), drawn(EXPERTS, OUTER), index + (index >= skipped)


def by_pair(x, weight, bias, index, turned):
    """The same, one gathered matrix a pair."""
    pairs = x[:, None].expand(*index.shape, INNER) if x.dim() == 2 else x
    matrices = weight[index] if turned else weight[index].transpose(2, 3)
    return (pairs[:, :, None] @ matrices)[:, :, 0] + bias[index]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_output_and_gradients_are_those_of_gathered_matrices(turned, shared, is_strict):
    """Of x, of the matrices and of the biases."""
    x, weight, bias, index = made(turned=turned, shared=shared)
    with strict(is_strict):
        y = expert_linear(x, weight, bias, index, turned)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=y.dtype)
        gradients = torch.autograd.grad(y, (x, weight, bias), dy)

    expected = by_pair(x, weight, bias, index, turned)
    wanted = torch.autograd.grad(expected, (x, weight, bias), dy)
    for found, right in zip((y, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_a_row_without_tokens_has_no_pairs():
    """A rank or a job may bring none."""
    x, weight, bias, index = made(tokens=0)

    y = expert_linear(x, weight, bias, index, False)
    gradients = torch.autograd.grad(y.sum(), (x, weight, bias))

    assert y.shape == (0, CHOSEN, OUTER)
    assert all(not gradient.any() for gradient in gradients)


def test_in_strict_mode_no_bit_of_a_token_depends_on_its_neighbours():
    """Also where a neighbour is not a number, and its routing is any."""
    x, weight, bias, index = (t.detach() for t in made(tokens=64))
    beside, other = x.clone(), index.clone()
    beside[20:], other[20:] = torch.nan, 0

    with strict():
        alone = expert_linear(x, weight, bias, index, False)
        together = expert_linear(beside, weight, bias, other, False)

    assert torch.equal(alone[:20], together[:20])
    assert bool(together[20:].isnan().all())


@pytest.mark.parametrize("change", ["narrow", "flat", "short", "wide"])
def test_what_does_not_fit_is_refused(change):
    """The error lists what each argument must be."""
    x, weight, bias, index = made()
    if change == "narrow":
        x = x.float()
    elif change == "flat":
        index = index[:, 0]
    elif change == "short":
        index = index[1:]
    else:
        bias = bias[:, 1:]

    with pytest.raises(ExpertLinearError, match=r"weight \[E, out, in\]"):
        expert_linear(x, weight, bias, index, False)


def test_torch_knows_the_operator():
    """Its fake tensors, its gradient, and what is traced of both."""
    torch.library.opcheck(expert_linear, (*made(), False), test_utils=CHECKS)
