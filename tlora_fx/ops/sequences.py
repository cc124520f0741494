"""Operators that count and convolve along a packed row, within each of its sequences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.ops.attention import wide_dtype


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
