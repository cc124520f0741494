"""What the operator of cross entropy finds."""

from __future__ import annotations

from torch import Tensor

from tlora_fx.ops import cross_entropy


def losses_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of rows of logits, and the logits' gradient for losses that are weighted."""
    leaf = logits.detach().requires_grad_()
    losses, _ = cross_entropy(leaf, targets)
    losses.backward(weights)
    assert leaf.grad is not None
    return losses.detach(), leaf.grad
