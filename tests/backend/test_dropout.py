"""Dropout of lowered branches: torch's generator seeds it, the operator draws the masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backend.models import Lowering, net


class Layer(nn.Module):
    """One LoRA layer, checkpointed or not."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.inner = net(lora_dropout=0.5).base_model.model.up
        self.again = again

    def forward(self, x):
        if self.again:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def frozen(self, x):
        return F.linear(x, self.inner.base_layer.weight, self.inner.base_layer.bias)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_forward_and_backward_use_one_mask(again):
    """For a fixed mask the branch is linear in A, B and x, so gradients give its value back."""
    layer = Layer(again).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(2, 6, 20, dtype=torch.float64)

    y = Lowering({"strict": True}).compile(layer)(x)
    y.backward(slope)

    branch = (slope * (y - layer.frozen(x))).sum().detach()
    a, b = layer.inner.lora_A["default"].weight, layer.inner.lora_B["default"].weight
    through_x = x.grad - slope @ layer.inner.base_layer.weight
    for gradient, value in ((a.grad, a), (b.grad, b), (through_x, x)):
        assert torch.allclose((gradient * value).sum().detach(), branch)


def test_masks_follow_the_seed():
    """torch.manual_seed repeats masks; without it each forward draws new ones."""
    layer, x = Layer(), torch.randn(2, 6, 12)
    compiled = Lowering().compile(layer)

    torch.manual_seed(7)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(7)

    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)


def test_half_of_the_elements_are_kept_and_doubled():
    """On ones through an A and B that pass values on, each value is 0 or twice the scale."""
    layer = Layer()
    with torch.no_grad():
        layer.inner.lora_A["default"].weight.copy_(torch.eye(3, 12))
        layer.inner.lora_B["default"].weight.copy_(torch.eye(20, 3))
    x = torch.ones(40, 50, 12)

    branch = (Lowering().compile(layer)(x) - layer.frozen(x))[..., :3]

    scale = layer.inner.scaling["default"]
    kept = branch > scale
    assert torch.allclose(branch, kept * 2 * scale, atol=1e-5)
    assert 0.45 < kept.float().mean() < 0.55


class Both(nn.Module):
    """Two LoRA layers with equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(), Layer()
        self.two.load_state_dict(self.one.state_dict())

    def forward(self, x):
        return self.one(x), self.two(x)


def test_two_sites_draw_two_masks():
    """Equal sites of one forward, fed alike, drop different elements."""
    one, two = Lowering().compile(Both())(torch.ones(8, 12))

    assert not torch.equal(one, two)


def test_a_second_length_has_masks_for_all_its_tokens():
    """With dynamic sizes the number of tokens is taken from the input."""
    compiled = Lowering().compile(Layer())

    assert [compiled(torch.randn(n, 4, 12)).shape[0] for n in (2, 3, 5)] == [2, 3, 5]


def test_eager_masks_are_kept_where_they_are_asked_for():
    """With Inductor's fallback_random the branch is left, so that masks are those of eager mode."""
    layer, x = Layer(), torch.randn(2, 6, 12)
    backend = Lowering({"fallback_random": True})

    torch.manual_seed(3)
    found = backend.compile(layer)(x)
    torch.manual_seed(3)

    assert torch.allclose(found, layer(x), atol=1e-6)
    assert backend.counts == [(0, 1)]
