"""Packed attention through flash kernels that torch ships, for the cases that they can do."""

import torch
from torch import Tensor

from tlora_fx.ops.attention_rule import AttentionRule

_HALVES = (torch.float16, torch.bfloat16)


def flash_fits_row(q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> bool:
    """Whether the varlen kernel on CUDA can do the whole row."""
    return q.is_cuda and has_row_kernel(q, v, sinks, rule)


def has_row_kernel(q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> bool:
    """The same of tensors on any device: whether on CUDA it could."""
    bare = rule.softcap == 0 and not rule.drops and sinks is None
    width = q.shape[2]
    fits = width == v.shape[2] and width % 8 == 0 and width <= 256
    return q.dtype in _HALVES and bare and fits


def flash_fits_sequence(
    q: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule, length: int
) -> bool:
    """Whether the CPU kernel can do one sequence of this length."""
    plain = rule.is_plain(length) and sinks is None
    return plain and q.device.type == "cpu" and q.shape[2] == v.shape[2]


def _windows(rule: AttentionRule) -> dict[str, int | float]:
    left = rule.window - 1 if rule.window > 0 else -1
    right = 0 if rule.causal else -1
    return {"scale": rule.scale, "window_size_left": left, "window_size_right": right}


def _near(x: Tensor) -> Tensor:
    """The kernels read rows of heads whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """All sequences of a row on CUDA: out [T, H, D] and lse float32 [H, T]."""
    cu_seqlens, longest = cu_seqlens.to(torch.int32), _longest(longest)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_near(q), _near(k), _near(v)),
        *(cu_seqlens, cu_seqlens, longest, longest),
        *(0.0, rule.causal and rule.window < 0, False),
        **_windows(rule),
    )
    # The kernel keeps q's strides, the operator promises contiguous results.
    return out.contiguous(), lse.contiguous()


def row_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `row_forward`: dq, dk, dv."""
    cu_seqlens, longest = cu_seqlens.to(torch.int32), _longest(longest)
    no_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(dout.contiguous(), _near(q), _near(k), _near(v), out, lse.contiguous()),
        *(cu_seqlens, cu_seqlens, longest, longest),
        *(0.0, rule.causal and rule.window < 0, no_state, q.new_empty(0)),
        **_windows(rule),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _longest(longest: int) -> int:
    # At 1 the kernel folds query heads into tokens and lays out lse by another order.
    return max(longest, 2)


def sequence_forward(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """One sequence q [L, H, D] on the CPU: out [L, H, D] and lse [H, L], wide."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_grouped(q, k, v), 0.0, rule.causal, scale=rule.scale
    )
    return _rowwise(out), lse.flatten(0, 1)


def sequence_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `sequence_forward`: dq [L, H, D], dk and dv [L, Hkv, D]."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    heads = (groups, share)
    # The kernel gives lse with the heads innermost, and reads it so.
    lse = torch.unflatten(lse.t().contiguous().t(), 0, heads)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(dout, heads), *_grouped(q, k, v), _heads_first(out, heads), lse),
        *(0.0, rule.causal),
        scale=rule.scale,
    )
    return _rowwise(dq), _summed(dk), _summed(dv)


def _heads_first(x: Tensor, heads: tuple[int, int]) -> Tensor:
    return torch.unflatten(_near(x), 1, heads).permute(1, 2, 0, 3)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [Hkv, G, L, D]; keys repeat by a stride of 0, without a copy."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    keys = _heads_first(k, (groups, 1)).expand(-1, share, -1, -1)
    values = _heads_first(v, (groups, 1)).expand(-1, share, -1, -1)
    return _heads_first(q, (groups, share)), keys, values


def _rowwise(x: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1)


def _summed(x: Tensor) -> Tensor:
    return x.sum(1).transpose(0, 1) if x.shape[1] > 1 else x.squeeze(1).transpose(0, 1)
