"""Cross entropy of rows of logits on a GPU: the losses in one read, the gradient in another.

A thread keeps the largest of its own columns and their sum of exponentials, so a column costs one
exponential and a row's threads meet once, at its end. Each row is one program's, whose cut follows
from the vocabulary alone: no bit of a row depends on its neighbours.

source   Milakov and Gimelshein 2018, Online normalizer calculation for softmax
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns that a thread takes at once: 16 bytes of halves.
_EACH = 8
# Threads' places in a step of a row, and warps; of an H200, 128,256 columns.
_LANES, _WARPS = 2048, 16
# Columns that a program of the gradient takes.
_PART, _PART_WARPS = 2048, 4


@triton.jit
def _exp(x):
    """e to the x; where x is minus infinity 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _cross_entropy(
    logits, row_step, targets, losses, lse, columns,
    LANES: tl.constexpr, EACH: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_step
    places = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Not infinity, which less itself is no number.
    largest = tl.full([LANES], -3.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, columns, LANES * EACH):
        column = first + places
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, axis=1))
        total = total * _exp(largest - new_largest) + tl.sum(_exp(x - new_largest[:, None]), axis=1)
        largest = new_largest
    top = tl.max(largest, axis=0)
    log_total = tl.log(tl.sum(total * _exp(largest - top), axis=0))
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < columns)
    target_logit = tl.load(logits + tl.where(inside, target, 0)).to(tl.float32)
    loss = tl.where(inside, log_total + (top - target_logit), float("nan"))
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, loss))
    tl.store(lse + row, top + log_total)


@triton.jit
def _cross_entropy_backward(
    grad_losses, grad_step, logits, row_step, targets, lse, grad_logits, columns,
    PART: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < columns
    target = tl.load(targets + row)
    value = tl.zeros([PART], tl.float32)
    if target != IGNORED:
        logits += row.to(tl.int64) * row_step
        x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        value = _exp(x - tl.load(lse + row))
        value = tl.where(column == target, value - 1.0, value)
        value = tl.where((target >= 0) & (target < columns), value, float("nan"))
        value *= tl.load(grad_losses + row * grad_step)
    to = grad_logits + row.to(tl.int64) * columns + column
    tl.store(to, value.to(grad_logits.dtype.element_ty), mask=inside)


def forward(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the logarithm of its sum of exponentials.

    logits    [n, V] of halves or float32, columns contiguous
    targets   int64 [n], in 0..V - 1, or `ignored`; any other gives NaN
    returns   float32 [n], twice
    """
    rows, columns = logits.shape
    losses, lse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    _cross_entropy[(rows,)](
        logits, logits.stride(0), targets, losses, lse, columns,
        LANES=_LANES, EACH=_EACH, IGNORED=ignored, num_warps=_WARPS,
    )  # fmt: skip
    return losses, lse


def backward(
    grad_losses: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignored: int
) -> Tensor:
    """The logits' gradient, [n, V] in their dtype.

    grad_losses   float32 [n], the gradient of the losses
    lse           of `forward`
    """
    rows, columns = logits.shape
    grad_logits = logits.new_empty(rows, columns)
    _cross_entropy_backward[(rows, triton.cdiv(columns, _PART))](
        grad_losses, grad_losses.stride(0), logits, logits.stride(0), targets, lse, grad_logits,
        columns, PART=_PART, IGNORED=ignored, num_warps=_PART_WARPS,
    )  # fmt: skip
    return grad_logits
