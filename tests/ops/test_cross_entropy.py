"""The operator of cross entropy where no kernel serves, and how compilers see it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tlora_fx.ops import cross_entropy, cross_entropy_backward


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_torchs_where_no_kernel_serves(dtype):
    """Losses and gradients, rows without a target among them; halves give float32."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 31, generator=generator).to(dtype)
    targets = torch.tensor([3, -100, 30, 0, 7])
    weights = torch.rand(5, generator=generator)
    leaf, other = (logits.detach().clone().requires_grad_() for _ in range(2))
    losses, _ = cross_entropy(leaf, targets)
    wide = torch.promote_types(torch.float32, dtype)
    expected = F.cross_entropy(other.to(wide), targets, reduction="none")
    for value in (losses, expected):
        value.backward(weights.to(wide))

    assert losses.dtype == wide
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(leaf.grad, other.grad)


def test_compilers_see_what_it_gives():
    """Shapes, dtypes and gradients, also of sizes that are symbols."""
    targets = torch.tensor([0, 10, -100, 2])
    for logits in (torch.randn(4, 11), torch.randn(11, 4).t()):
        _, lse = cross_entropy(logits, targets)
        torch.library.opcheck(cross_entropy, (logits.requires_grad_(), targets))
        saved = torch.ones(4), logits.detach(), targets, lse
        torch.library.opcheck(cross_entropy_backward, saved)
