"""The kernels of cross entropy against float64; Triton's interpreter gets bf16 wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.losses import losses_and_gradient

IGNORED = -100


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "bound"),
    [
        (5, 61, torch.float32, 2e-6),
        (3, 4096, torch.float32, 2e-6),
        (2, 20_001, torch.float32, 2e-6),
        (4, 9000, torch.float16, 1e-3),
    ],
)
def test_losses_and_gradients_equal_the_reference(rows, columns, dtype, bound):
    """Vocabularies of less than a step, of whole ones, and of more than one."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[0], targets[1] = columns - 1, IGNORED
    weights = torch.rand(rows, generator=generator)
    losses, gradient = losses_and_gradient(logits, targets, weights)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="none", ignore_index=IGNORED)
    expected.backward(weights.double())

    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=bound, atol=bound / 10)
    assert not gradient[1].any()


def test_large_and_infinite_logits():
    """Of words that are ruled out, and of words far above all others."""
    logits = torch.full((3, 100), -float("inf"))
    logits[:, 3], logits[:, 70] = 1e4, 1e4 - 1
    logits[1, :50] = 0
    logits[2] = 1e3
    targets = torch.tensor([70, 3, 5])
    losses, gradient = losses_and_gradient(logits, targets, torch.ones(3))

    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient.sum(1), torch.zeros(3), rtol=0, atol=2e-3)


def test_no_row_reads_another():
    """NaN stays in its row, and rows have the bits that they have alone."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 10_000, generator=generator)
    targets = torch.tensor([3, 9_999, IGNORED, 8])
    weights = torch.rand(4, generator=generator)
    alone = losses_and_gradient(logits[1:2], targets[1:2], weights[1:2])
    logits[0, 77] = logits[2, 5] = float("nan")
    losses, gradient = losses_and_gradient(logits, targets, weights)

    assert losses.isnan().tolist() == [True, False, False, False]
    assert gradient.isnan().any(1).tolist() == [True, False, False, False]
    assert torch.equal(losses[1:2], alone[0])
    assert torch.equal(gradient[1:2], alone[1])


@pytest.mark.parametrize("target", [-1, 100, 2**40])
def test_a_target_that_is_no_word_has_no_loss(target):
    """NaN, which ends the job; nothing is read beyond the row."""
    targets = torch.tensor([5, target])
    losses, gradient = losses_and_gradient(torch.randn(2, 100), targets, torch.ones(2))

    assert losses.isnan().tolist() == [False, True]
    assert gradient.isnan().any(1).tolist() == [False, True]


def test_rows_with_room_behind_them():
    """A view into wider rows, and one whose columns lie apart."""
    wide = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    targets, weights = torch.arange(6), torch.ones(6)
    expected = losses_and_gradient(wide[:, :200].contiguous(), targets, weights)

    for view in (wide[:, :200], wide[:, :200].t().contiguous().t()):
        found = losses_and_gradient(view, targets, weights)
        assert all(map(torch.equal, found, expected))
