"""What the operators cost, for `torch.utils.flop_counter`.

Counted as torch counts its own: two operations a multiply-add, matrix products only, attention
without the causal half. Tables without values (fake tensors) count as equal shares.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

import tlora_fx.ops.multi_lora_linear
import tlora_fx.ops.packed_attention  # noqa: F401  (both define what is named below)

ops = torch.ops.tlora_fx


def _lengths(offsets: Tensor, total: int) -> list[float]:
    """The lengths between offsets, scaled so that they cover `total`."""
    count = max(1, offsets.shape[0] - 1)
    if _is_fake(offsets):
        return [total / count] * count
    scale = total / max(1, int(offsets[-1]))
    return [float(length) * scale for length in offsets.diff().tolist()]


def _is_fake(table: Tensor) -> bool:
    return isinstance(table, FakeTensor | FunctionalTensor) or table.is_meta


def _rank_rows(x: Tensor, a: Tensor, ranks: Tensor, segments: Tensor) -> float:
    """Tokens times rank, summed over the jobs."""
    tokens, rows = _lengths(segments, _tokens(x)), _lengths(ranks, _owned_rows(a, ranks))
    return sum(n * r for n, r in zip(tokens, rows, strict=True))


def _owned_rows(a: Tensor, ranks: Tensor) -> int:
    """Rows of a that belong to a job; all of them where nobody knows."""
    return a.shape[0] if _is_fake(ranks) else int(ranks[-1])


def _tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@register_flop_formula(ops.multi_lora_linear, get_raw=True)
def multi_lora_linear_flops(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    rates: Tensor,
    segments: Tensor,
    *rest: Any,
    **out: Any,
) -> int:
    """The frozen product and each job's two low-rank products."""
    low_rank = _rank_rows(x, a, ranks, segments) * (a.shape[1] + b.shape[1])
    return 2 * _tokens(x) * weight.numel() + round(2 * low_rank)


@register_flop_formula(ops.multi_lora_linear_backward, get_raw=True)
def multi_lora_linear_backward_flops(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor,
    compute_dtype: torch.dtype,
    need_dx: bool,
    **out: Any,
) -> int:
    """dx through the frozen weight; dS, S again, dA, dB, and the branch's share of dx."""
    rows, columns = _rank_rows(x, a, ranks, segments), 2 * (a.shape[1] + b.shape[1])
    if not need_dx:
        return round(2 * rows * columns)
    return 2 * _tokens(x) * weight.numel() + round(2 * rows * (columns + a.shape[1]))


def _attended(q: Tensor, cu_seqlens: Tensor) -> float:
    return q.shape[1] * sum(length**2 for length in _lengths(cu_seqlens, q.shape[0]))


@register_flop_formula(ops.packed_attention, get_raw=True)
def packed_attention_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any, **out: Any
) -> int:
    """Scores and weighted values of every pair within a sequence."""
    return round(2 * _attended(q, cu_seqlens) * (q.shape[2] + v.shape[2]))


@register_flop_formula(ops.packed_attention_backward, get_raw=True)
def packed_attention_backward_flops(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    *rest: Any,
    **out_val: Any,
) -> int:
    """Scores again, dq, dk; and the two products of the values."""
    return round(2 * _attended(q, cu_seqlens) * (3 * q.shape[2] + 2 * v.shape[2]))
