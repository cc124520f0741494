"""`tlora_fx::segment_sum` and `tlora_fx::segment_spread`: from values a row to a number a job.

A job's sum reads the job's run alone, in one order, so a neighbour cannot change its bits. On CUDA
offsets are read on the device: a captured graph may be replayed with other ones.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.kernels.device_tables import offsets_on
from tlora_fx.ops.tables import covering


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
    if values.is_cuda:
        starts = offsets_on(segments, values.shape[0], values.device)
        return torch.segment_reduce(values, "sum", offsets=starts, unsafe=True, initial=0)
    bounds = covering(segments, values.shape[0])
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
    if sums.is_cuda:
        ends = offsets_on(segments, rows, sums.device)[1:]
        places = torch.arange(rows, dtype=torch.int32, device=sums.device)
        return sums[torch.bucketize(places, ends, right=True)]
    out = sums.new_empty(rows)
    for job, (start, stop) in enumerate(pairwise(covering(segments, rows))):
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
