"""`tlora_fx::multi_lora_linear`: one frozen linear and the adapters of all jobs on it.

Each job's branch runs on its own segment, never on masked rows of others: a NaN of one job has
no way into another's sums.
"""

from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import FrozenGradientError
from tlora_fx.ops.adapter_tables import AdapterTables, check_adapters, sum_dtype
from tlora_fx.ops.philox import keep_scale

_TABLES = (
    "Tensor ranks, Tensor scales, Tensor rates, Tensor segments, Tensor keys, "
    "Tensor token_index, Tensor site, ScalarType compute_dtype"
)


@torch.library.custom_op(
    "tlora_fx::multi_lora_linear",
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, {_TABLES}) -> Tensor",
)
def multi_lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
) -> Tensor:
    """Apply a frozen linear, and to each job's tokens its own adapter.

    x              float [..., in]; all but the last dimension enumerate tokens
    weight, bias   [out, in] and [out] or None, in x's dtype, frozen
    a, b           [R, in] and [R, out]: all jobs' A, and all jobs' B transposed
    ranks          int32 [J + 1] on the CPU, job j owns rows ranks[j]:ranks[j + 1] of a and b; rows
                   from ranks[J] on belong to nobody
    scales, rates  float64 [J] on the CPU: lora_alpha / r or alike, and dropout rates
    segments       int32 [J + 1] on the CPU
    keys           int64 [J, 2] on the CPU, (seed, step)
    token_index    int32, one a token; read only when some job drops
    site           int64 scalar on the CPU, `site_id` of the layer
    compute_dtype  adapters are cast to it and multiplied in it
    returns        [..., out] in x's dtype; rows of job j hold
                   x Wᵀ + bias + scale_j * (drop_j(x) A_jᵀ) B_j
    raises         AdapterTableError, SegmentError, MaskKeyError
    source         tLoRA, section 3.3
    """
    check_adapters(x, weight, bias, a, b)
    rows = x.reshape(-1, x.shape[-1])
    tables = AdapterTables.read(
        a, b, ranks, scales, rates, segments, keys, token_index, site, len(rows)
    )
    y = torch.nn.functional.linear(rows, weight, bias)
    for branch in tables.branches:
        keep = tables.draw(branch, x.shape[-1])
        dropped = _drop(rows[branch.tokens].to(compute_dtype), keep, tables, branch.job)
        hidden = dropped @ a[branch.ranks].to(compute_dtype).t()
        _add_product(y[branch.tokens], hidden, b[branch.ranks].to(compute_dtype), branch.scale)
    return y.view(*x.shape[:-1], weight.shape[0])


@multi_lora_linear.register_fake
def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *tables: Any
) -> Tensor:
    check_adapters(x, weight, bias, a, b)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _drop(part: Tensor, keep: Tensor | None, tables: AdapterTables, job: int) -> Tensor:
    if keep is None:
        return part
    return torch.where(keep, part * keep_scale(tables.masks.rates[job]), 0)


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target += scale * (left @ right), in place, summed in the wider of the two types."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
        return
    wide = sum_dtype(target.dtype, left.dtype)
    target.copy_(target.to(wide) + (left @ right).to(wide) * scale)


@torch.library.custom_op(
    "tlora_fx::multi_lora_linear_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor weight, Tensor a, Tensor b, {_TABLES}, bool need_dx) "
    "-> (Tensor, Tensor, Tensor)",
)
def multi_lora_linear_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `multi_lora_linear`; masks and the low-rank rows are computed again.

    dy       [..., out]
    returns  dx like x (empty [0] unless need_dx), da like a, db like b; rows of jobs without
             tokens are zero
    raises   as `multi_lora_linear`
    """
    check_adapters(x, weight, None, a, b)
    rows, grads = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    tables = AdapterTables.read(
        a, b, ranks, scales, rates, segments, keys, token_index, site, len(rows)
    )
    dx = grads @ weight if need_dx else x.new_empty(0)
    da, db = _zeros(a), _zeros(b)
    for branch in tables.branches:
        own_a, own_b = a[branch.ranks].to(compute_dtype), b[branch.ranks].to(compute_dtype)
        grad = grads[branch.tokens].to(compute_dtype)
        keep = tables.draw(branch, x.shape[-1])
        dropped = _drop(rows[branch.tokens].to(compute_dtype), keep, tables, branch.job)
        inner = (grad @ own_b.t()).mul_(branch.scale)
        da[branch.ranks] = inner.t() @ dropped
        db[branch.ranks] = ((dropped @ own_a.t()).t() @ grad).mul_(branch.scale)
        if not need_dx:
            continue
        if keep is None:
            _add_product(dx[branch.tokens], inner, own_a, 1.0)
        else:
            _add(dx[branch.tokens], _drop(inner @ own_a, keep, tables, branch.job))
    return dx.view(x.shape) if need_dx else dx, da, db


@multi_lora_linear_backward.register_fake
def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *tables: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx = tables[-1]
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    return dx, a.new_empty(a.shape), b.new_empty(b.shape)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _add(target: Tensor, value: Tensor) -> None:
    wide = sum_dtype(target.dtype, value.dtype)
    target.copy_(target.to(wide) + value.to(wide))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, a, b, *tables, ctx.compute_dtype = inputs
    ctx.save_for_backward(x, weight, a, b, *tables)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise FrozenGradientError(
            "multi_lora_linear gives no gradient for its weight and bias",
            help="freeze them, or leave this layer to run as it is on its job's segment",
        )
    op = torch.ops.tlora_fx.multi_lora_linear_backward
    need_dx = ctx.needs_input_grad[0]
    dx, da, db = op(grad, *ctx.saved_tensors, ctx.compute_dtype, need_dx)
    return (dx if need_dx else None, None, None, da, db, *[None] * 8)


multi_lora_linear.register_autograd(_backward, setup_context=_setup)
