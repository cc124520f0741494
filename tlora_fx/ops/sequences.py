"""Operators that count along a packed row, within each of its sequences."""

from __future__ import annotations

import torch
from torch import Tensor


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
    # Integers are exact, so what came before a sequence can be taken away again, without reading
    # on the host where sequences begin.
    tokens = torch.arange(x.shape[dim], dtype=cu_seqlens.dtype, device=x.device)
    starts = cu_seqlens[torch.bucketize(tokens, cu_seqlens[1:], right=True)]
    x = x.to(torch.int64)
    total = x.cumsum(dim)
    return total - (total - x).index_select(dim, starts)


@sequence_cumsum.register_fake
def _cumsum_fake(x: Tensor, cu_seqlens: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64, memory_format=torch.contiguous_format)
