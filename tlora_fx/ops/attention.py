"""`tlora_fx::packed_attention`: attention inside each sequence of a packed row."""

from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops import attention_flash as flash
from tlora_fx.ops.attention_math import SequenceMath, wide_dtype
from tlora_fx.ops.attention_rule import AttentionRule, Sequences, check_attention

_TABLES = (
    "Tensor cu_seqlens, Tensor max_seqlen, Tensor segments, Tensor keys, Tensor token_index, "
    "Tensor? site, float scale, bool causal, int window, float softcap, Tensor? sinks, "
    "float dropout"
)


@torch.library.custom_op(
    "tlora_fx::packed_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)",
)
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence of a row.

    q, k, v      [T, H, D], [T, Hkv, D], [T, Hkv, Dv], one float type, Hkv divides H
    cu_seqlens   int32 [S + 1] on q's device; sequence i is tokens cu_seqlens[i]:cu_seqlens[i + 1]
    max_seqlen   int32 scalar on the CPU, at least the longest sequence
    segments     int32 [J + 1] on the CPU; a sequence belongs to one job
    keys         int64 [J, 2] on the CPU, (seed, step); read only for dropout
    token_index  int32, one a token; read only for dropout
    site         int64 scalar on the CPU, `site_id`; needed for dropout
    scale        multiplies q kᵀ
    causal       token i sees tokens j <= i
    window       token i sees tokens with i - j < window; -1: no window
    softcap      scores s become softcap * tanh(s / softcap); 0: none
    sinks        one more logit a head, [H], that takes weight and has no value; or None
    dropout      rate in [0, 1) on the weights, drawn by each job's keyed masks
    returns      out [T, H, Dv] in q's type, lse [H, T] float32 (float64 for float64);
                 lse has no gradient
    raises       AttentionShapeError, SegmentError, MaskKeyError
    """
    rule = AttentionRule(scale, causal, window, softcap, dropout)
    check_attention(q, k, v, cu_seqlens)
    rule.check()
    if len(q) and flash.flash_fits_row(q, v, sinks, rule):
        return flash.row_forward(q, k, v, cu_seqlens, int(max_seqlen), rule)
    rows = Sequences.read(cu_seqlens, segments, keys, token_index, site, dropout, len(q))
    out, lse = _outputs(q, v)
    for start, stop in rows.spans:
        span = slice(start, stop)
        if flash.flash_fits_sequence(q, v, sinks, rule, stop - start):
            part = flash.sequence_forward(q[span], k[span], v[span], rule)
        else:
            part = SequenceMath.take(q, k, v, span, rule, rows).forward(sinks)
        out[span], lse[:, span] = part
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=wide_dtype(q.dtype))


@packed_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *tables: Any
) -> tuple[Tensor, Tensor]:
    check_attention(q, k, v, cu_seqlens)
    return _outputs(q, v)


@torch.library.custom_op(
    "tlora_fx::packed_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}) -> (Tensor, Tensor, Tensor)",
)
def packed_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `packed_attention` by q, k and v; weights and masks are computed again.

    dout      [T, H, Dv]
    out, lse  as `packed_attention` gave them
    returns   dq, dk, dv like q, k, v
    raises    as `packed_attention`
    """
    rule = AttentionRule(scale, causal, window, softcap, dropout)
    check_attention(q, k, v, cu_seqlens)
    rule.check()
    if len(q) and flash.flash_fits_row(q, v, sinks, rule):
        longest = int(max_seqlen)
        return flash.row_backward(dout, q, k, v, out, lse, cu_seqlens, longest, rule)
    rows = Sequences.read(cu_seqlens, segments, keys, token_index, site, dropout, len(q))
    grads = _like(q), _like(k), _like(v)
    for start, stop in rows.spans:
        span = slice(start, stop)
        if flash.flash_fits_sequence(q, v, sinks, rule, stop - start):
            own = dout[span], q[span], k[span], v[span], out[span], lse[:, span]
            parts = flash.sequence_backward(*own, rule)
        else:
            sequence = SequenceMath.take(q, k, v, span, rule, rows)
            parts = sequence.backward(dout[span], lse[:, span])
        for grad, part in zip(grads, parts, strict=True):
            grad[span] = part
    return grads


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@packed_attention_backward.register_fake
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *tables: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.causal, ctx.window, ctx.softcap, sinks, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, sinks, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 15
    q, k, v, *tables, sinks, out, lse = ctx.saved_tensors
    numbers = ctx.scale, ctx.causal, ctx.window, ctx.softcap, sinks, ctx.dropout
    op = torch.ops.tlora_fx.packed_attention_backward
    dq, dk, dv = op(dout, q, k, v, out, lse, *tables, *numbers)
    dsinks = None
    if ctx.needs_input_grad[13]:
        dsinks = _sinks_gradient(dout, out, lse, sinks)
    return dq, dk, dv, *[None] * 10, dsinks, None


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink takes weight exp(sink - lse) and adds nothing, so its logit lowers the output."""
    pull = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weight * pull).sum(1).to(sinks.dtype)


packed_attention.register_autograd(_backward, setup_context=_setup)
