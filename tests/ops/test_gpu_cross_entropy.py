"""The kernels of cross entropy on a GPU, in bfloat16 and by vocabularies of models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.losses import losses_and_gradient

pytestmark = pytest.mark.gpu
IGNORED = -100


@pytest.mark.parametrize("columns", [100, 32_000, 50_257, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_and_gradients_equal_the_reference(columns, dtype):
    """Against float64 of the same logits; rows without a target, and one with NaN beside."""
    generator = torch.Generator("cuda").manual_seed(columns)
    logits = 3 * torch.randn(37, columns, generator=generator, device="cuda")
    logits = logits.to(dtype)
    targets = torch.randint(columns, (37,), generator=generator, device="cuda")
    targets[0], targets[5] = columns - 1, IGNORED
    weights = torch.rand(37, generator=generator, device="cuda")
    logits[9, columns // 2] = float("nan")
    losses, gradient = losses_and_gradient(logits, targets, weights)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="none", ignore_index=IGNORED)
    expected.backward(weights.double())

    rest = torch.arange(37, device="cuda") != 9
    assert losses[9].isnan()
    assert gradient[9].isnan().any()
    assert not gradient[5].any()
    torch.testing.assert_close(losses[rest].double(), expected[rest].detach(), rtol=2e-6, atol=4e-6)
    rounding = torch.finfo(dtype).eps
    bounds = {"rtol": rounding + 1e-5, "atol": max(1e-8, 2.0**-24 * (dtype == torch.float16))}
    torch.testing.assert_close(gradient[rest].double(), leaf.grad[rest], **bounds)


def test_a_row_has_the_bits_that_it_has_alone():
    """In a row of many."""
    logits = torch.randn(300, 128_256, device="cuda", dtype=torch.bfloat16)
    targets, weights = torch.arange(300, device="cuda"), torch.rand(300, device="cuda")
    every = losses_and_gradient(logits, targets, weights)
    alone = losses_and_gradient(logits[7:8], targets[7:8], weights[7:8])

    assert torch.equal(every[0][7:8], alone[0])
    assert torch.equal(every[1][7:8], alone[1])
