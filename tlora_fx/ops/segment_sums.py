"""`tlora_fx::segment_sum` and `tlora_fx::segment_spread`: from values a row to a number a job.

A job's sum reads the job's run alone, in one order, so a neighbour cannot change its bits.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import SegmentError
from tlora_fx.ops.tables import token_bounds


def _bounds(segments: Tensor, rows: int) -> list[int]:
    """Where each job's rows begin; unlike tokens of a unit, every row counts for itself."""
    bounds = token_bounds(segments, rows)
    if bounds[-1] != rows or segments[-1] != rows:
        raise SegmentError(
            f"segments do not cover the {rows} rows that they are summed over",
            expected=f"a last offset of {rows}",
            found=segments.tolist(),
        )
    return bounds


@torch.library.custom_op(
    "tlora_fx::segment_sum", mutates_args=(), schema="(Tensor values, Tensor segments) -> Tensor"
)
def segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """Sum each job's run of values.

    values    float [N]
    segments  int32 [J + 1] on the CPU: job j owns values[segments[j]:segments[j + 1]]
    returns   [J] in the values' type; 0 for a job without values
    raises    SegmentError
    """
    bounds = _bounds(segments, values.shape[0])
    return torch.stack([values[start:stop].sum() for start, stop in pairwise(bounds)])


@segment_sum.register_fake
def _sum_fake(values: Tensor, segments: Tensor) -> Tensor:
    return values.new_empty(segments.shape[0] - 1)


@torch.library.custom_op(
    "tlora_fx::segment_spread",
    mutates_args=(),
    schema="(Tensor sums, Tensor segments, SymInt rows) -> Tensor",
)
def segment_spread(sums: Tensor, segments: Tensor, rows: int) -> Tensor:
    """Give each row its job's number: what `segment_sum` is differentiated by.

    sums      float [J]
    segments  int32 [J + 1] on the CPU, up to `rows`
    returns   [rows] in the sums' type
    raises    SegmentError
    """
    out = sums.new_empty(rows)
    for job, (start, stop) in enumerate(pairwise(_bounds(segments, rows))):
        out[start:stop] = sums[job]
    return out


@segment_spread.register_fake
def _spread_fake(sums: Tensor, segments: Tensor, rows: int) -> Tensor:
    return sums.new_empty(rows)


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, segments = inputs
    ctx.rows = values.shape[0]
    ctx.save_for_backward(segments)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (segments,) = ctx.saved_tensors
    return torch.ops.tlora_fx.segment_spread(grad, segments, ctx.rows), None


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (segments,) = ctx.saved_tensors
    return torch.ops.tlora_fx.segment_sum(grad, segments), None, None


segment_sum.register_autograd(_sum_backward, setup_context=_sum_setup)
segment_spread.register_autograd(_spread_backward, setup_context=_spread_setup)
