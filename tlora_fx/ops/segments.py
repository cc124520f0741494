"""Operators that take a row apart by jobs: read a job's part, write it, choose or sum per job.

A job's sum reads the job's run alone, in one order, so a neighbour cannot change its bits.

Two operators work on each sequence of a row instead: they count, and convolve, along its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from tlora_fx.errors import SegmentError
from tlora_fx.ops.attention_rule import wide_dtype
from tlora_fx.ops.kernels.device_tables import offsets_on
from tlora_fx.ops.tables import covering, token_bounds


def _part(x: Tensor, segments: Tensor, job: int, dim: int) -> tuple[int, int]:
    """Where the job's part of dimension `dim` begins and how long it is."""
    bounds = token_bounds(segments, x.shape[dim])
    if not 0 <= job < len(bounds) - 1:
        raise SegmentError("no such job in the row", found=job, jobs=len(bounds) - 1)
    return bounds[job], bounds[job + 1] - bounds[job]


@torch.library.custom_op(
    "tlora_fx::segment_read",
    mutates_args=(),
    schema="(Tensor x, Tensor segments, int job, int dim) -> Tensor",
)
def segment_read(x: Tensor, segments: Tensor, job: int, dim: int) -> Tensor:
    """A copy of one job's part of a row.

    x         any type, tokens or units along `dim`
    segments  int32 [J + 1] on the CPU
    returns   contiguous, `dim` as long as the job's part
    raises    SegmentError
    """
    start, length = _part(x, segments, job, dim)
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


@segment_read.register_fake
def _read_fake(x: Tensor, segments: Tensor, job: int, dim: int) -> Tensor:
    shape: list[Any] = list(x.shape)
    shape[dim] = _length(segments, job, x.shape[dim])
    return x.new_empty(shape)


def _length(segments: Any, job: int, tokens: Any) -> Any:
    """How long a job's part is while code is traced: one number wherever the same is meant.

    Kept as torch keeps the sizes of its own operators (`FakeTensor.nonzero_memo`): beside the
    table, until it is traced anew.
    """
    epoch = segments.fake_mode.epoch
    known: tuple[int, list[Any]] | None = getattr(segments, "_lengths", None)
    if known is None or known[0] != epoch:
        known = segments._lengths = (epoch, [])
    for other_job, whole, length in known[1]:
        if other_job == job and guard_or_false(whole == tokens):
            return length
    length = torch.library.get_ctx().new_dynamic_size()
    known[1].append((job, tokens, length))
    return length


def _read_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, segments, ctx.job, ctx.dim = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(segments)


def _read_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (segments,) = ctx.saved_tensors
    whole = grad.new_zeros(ctx.shape)
    dx = torch.ops.tlora_fx.segment_write(whole, grad, segments, ctx.job, ctx.dim)
    return dx, None, None, None


segment_read.register_autograd(_read_backward, setup_context=_read_setup)


@torch.library.custom_op(
    "tlora_fx::segment_write",
    mutates_args=(),
    schema="(Tensor x, Tensor value, Tensor segments, int job, int dim) -> Tensor",
)
def segment_write(x: Tensor, value: Tensor, segments: Tensor, job: int, dim: int) -> Tensor:
    """A copy of a row with one job's part replaced.

    x         any type, tokens or units along `dim`
    value     x's type, shaped as `segment_read` gives it
    segments  int32 [J + 1] on the CPU
    returns   like x, contiguous
    raises    SegmentError
    """
    start, length = _part(x, segments, job, dim)
    shape = list(x.shape)
    shape[dim] = length
    if list(value.shape) != shape or value.dtype != x.dtype:
        raise SegmentError(
            "the new part does not fit its job's segment",
            expected=f"{x.dtype}{shape}",
            found=f"{value.dtype}{list(value.shape)}",
        )
    out = x.clone(memory_format=torch.contiguous_format)
    out.narrow(dim, start, length).copy_(value)
    return out


@segment_write.register_fake
def _write_fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _write_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, value, segments, ctx.job, ctx.dim = inputs
    ctx.shape = value.shape
    ctx.save_for_backward(segments)


def _write_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (segments,) = ctx.saved_tensors
    dx = dvalue = None
    if ctx.needs_input_grad[0]:
        zeros = grad.new_zeros(ctx.shape)
        dx = torch.ops.tlora_fx.segment_write(grad, zeros, segments, ctx.job, ctx.dim)
    if ctx.needs_input_grad[1]:
        dvalue = torch.ops.tlora_fx.segment_read(grad, segments, ctx.job, ctx.dim)
    return dx, dvalue, None, None, None


segment_write.register_autograd(_write_backward, setup_context=_write_setup)


@torch.library.custom_op(
    "tlora_fx::segment_switch",
    mutates_args=(),
    schema="(Tensor short, Tensor long, Tensor position_ids, Tensor segments, int threshold) "
    "-> Tensor",
)
def segment_switch(
    short: Tensor, long: Tensor, position_ids: Tensor, segments: Tensor, threshold: int
) -> Tensor:
    """Choose one of two tables for each job by the job's own longest sequence.

    short, long   [1, T, ...] (batch form [B, S, ...]), one type and shape
    position_ids  int64 [1, T] (batch form [B, S])
    segments      int32 [J + 1] on the CPU
    threshold     tokens; a job whose largest position + 1 exceeds it reads `long`
    returns       like short, contiguous; has no gradient
    raises        SegmentError
    """
    _check_switch(short, long, position_ids)
    positions = position_ids.reshape(-1)
    bounds = token_bounds(segments, positions.numel())
    out = short.clone(memory_format=torch.contiguous_format)
    rows, others = out.view(positions.numel(), -1), long.reshape(positions.numel(), -1)
    for job in range(len(bounds) - 1):
        span = slice(bounds[job], bounds[job + 1])
        if span.start < span.stop:
            longest = positions[span].amax() + 1
            rows[span] = torch.where(longest > threshold, others[span], rows[span])
    return out


@segment_switch.register_fake
def _switch_fake(short: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(short, memory_format=torch.contiguous_format)


def _check_switch(short: Tensor, long: Tensor, position_ids: Tensor) -> None:
    same = short.shape == long.shape and short.dtype == long.dtype
    if not same or short.shape[:2] != position_ids.shape or position_ids.dim() != 2:
        raise SegmentError(
            "segment_switch needs two equal tables over the tokens of position_ids",
            expected=f"[{', '.join(map(str, position_ids.shape))}, ...] twice, one type",
            found=f"{short.dtype}{list(short.shape)} and {long.dtype}{list(long.shape)}",
        )


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
        indices = torch.arange(rows, dtype=torch.int32, device=sums.device)
        return sums[torch.bucketize(indices, ends, right=True)]
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


@torch.library.custom_op(
    "tlora_fx::sequence_cumsum",
    mutates_args=(),
    schema="(Tensor x, Tensor cu_seqlens, int dim) -> Tensor",
)
def sequence_cumsum(x: Tensor, cu_seqlens: Tensor, dim: int) -> Tensor:
    """The running sum of integers that starts anew with each sequence.

    x           integers or booleans, tokens along `dim`
    cu_seqlens  int32 [S + 1] where x lies: sequence s owns tokens cu_seqlens[s]:cu_seqlens[s + 1]
    returns     int64, shaped as x; has no gradient
    """
    # Integers are exact, so what came before a sequence can be taken away again.
    starts = _starts(_tokens(x.shape[dim], cu_seqlens), cu_seqlens)
    x = x.to(torch.int64)
    total = x.cumsum(dim)
    return total - (total - x).index_select(dim, starts)


@sequence_cumsum.register_fake
def _cumsum_fake(x: Tensor, cu_seqlens: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64, memory_format=torch.contiguous_format)


def sequence_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, dilation: int, groups: int
) -> Tensor:
    """A causal convolution that starts anew with each sequence.

    x           [C, T] or [1, C, T], any float dtype
    weight      [O, C / groups, K]; the last of K is a token's own, as in `aten.conv1d`
    bias        [O] or None
    cu_seqlens  int32 [S + 1] where x lies: sequence s owns tokens cu_seqlens[s]:cu_seqlens[s + 1]
    dilation    tokens from one of K to the next
    returns     [O, T] or [1, O, T] in x's dtype
    """
    taps = _taps(x, cu_seqlens, weight.shape[-1], dilation)
    if not weight.shape[0] == x.shape[-2] == groups:
        columns = torch.stack(list(taps), -2).flatten(-3, -2)
        return F.conv1d(columns, weight.flatten(1).unsqueeze(-1), bias, groups=groups)
    factors = weight.to(wide_dtype(x.dtype)).squeeze(1).unsqueeze(-1).unbind(1)
    out: Tensor = reduce(add, (tap * factor for tap, factor in zip(taps, factors, strict=True)))
    return (out if bias is None else out + bias.unsqueeze(-1)).to(x.dtype)


def _taps(x: Tensor, cu_seqlens: Tensor, count: int, dilation: int) -> Iterator[Tensor]:
    """For each token what a kernel sees, the furthest first; 0 before its sequence."""
    tokens = _tokens(x.shape[-1], cu_seqlens)
    places = tokens - _starts(tokens, cu_seqlens)
    for back in range(dilation * (count - 1), 0, -dilation):
        # Chosen, not multiplied by 0: a neighbour may hold NaN.
        yield torch.where(places >= back, x.roll(back, -1), 0)
    yield x


# Made of torch's operators, it has their gradients, and Inductor fuses them with their neighbours.
torch.library.define(
    "tlora_fx::sequence_conv1d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, int dilation, int groups) "
    "-> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("tlora_fx::sequence_conv1d", "CompositeImplicitAutograd", sequence_conv1d)


def _tokens(count: int, cu_seqlens: Tensor) -> Tensor:
    return torch.arange(count, dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _starts(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Where each token's sequence begins, without reading it on the host.

    The whole table is searched: a part of one entry would tie what is compiled to one sequence.
    """
    return cu_seqlens[torch.bucketize(tokens, cu_seqlens, right=True) - 1]
