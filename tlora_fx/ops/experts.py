"""`tlora_fx::expert_linear`: each token times the matrices of the experts that it was routed to.

A row of a mixture of experts goes through each expert's product once, whoever its tokens belong
to: the chosen pairs of token and expert are sorted by expert, multiplied group by group, and put
back. Outside, a result stands where its token stands, so that jobs stay side by side along the
tokens. Nothing is dropped, and sums have one order: a result is the same in each run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.errors import ExpertLinearError
from tlora_fx.ops.kernels.select import is_strict

#: Numbers of gathered matrices at a time, where each pair is multiplied by itself.
GATHERED = 1 << 24
#: Rows and columns of torch's grouped product stand 16 bytes apart, of two each.
ALIGNED = 8


@torch.library.custom_op(
    "tlora_fx::expert_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor index, bool turned) -> Tensor",
)
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, turned: bool
) -> Tensor:
    """Multiply tokens with the matrices of their experts.

    x         [T, in], the same for all experts of a token, or [T, K, in]
    weight    [E, out, in], turned [E, in, out], in x's dtype
    bias      [E, out], or None
    index     [T, K], the expert of each pair, 0 to E - 1
    returns   [T, K, out]
    raises    ExpertLinearError
    """
    check_experts(x, weight, bias, index, turned)
    matrices = weight if turned else weight.transpose(1, 2)
    flat = index.reshape(-1)
    # In strict mode nothing may depend on how many pairs an expert has, a neighbour's among them.
    if is_strict() and not _has_grouped_product(x):
        y = _one_by_one(_pairs(x, index), matrices, flat)
    else:
        order, ends = _sorted(flat, len(weight))
        chosen = index.shape[1] if x.dim() == 2 else 1
        y = x.new_empty(len(flat), matrices.shape[2])
        y[order] = grouped(sorted_rows(x, order, chosen), matrices, ends)
    if bias is not None:
        y = y + bias[flat]
    return y.view(*index.shape, matrices.shape[2])


def check_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, turned: bool
) -> None:
    """Refuse tensors that do not fit each other.

    raises    ExpertLinearError
    """
    fits = weight.dim() == 3 and index.dim() == 2 and x.dim() in (2, 3)
    inner, outer = (1, 2) if turned else (2, 1)
    fits = fits and x.shape[-1] == weight.shape[inner] and x.dtype == weight.dtype
    fits = fits and x.shape[:-1] == index.shape[: x.dim() - 1]
    if fits and bias is not None:
        fits = tuple(bias.shape) == (weight.shape[0], weight.shape[outer])
    if not fits:
        raise ExpertLinearError(
            "tokens, matrices of experts and indices must fit",
            expected=f"x [T, in] or [T, K, in], weight [E, {'in, out' if turned else 'out, in'}] "
            "in x's dtype, bias [E, out], index [T, K]",
            found=f"x {x.dtype}{list(x.shape)}, weight {weight.dtype}{list(weight.shape)}, "
            f"bias {None if bias is None else list(bias.shape)}, index {list(index.shape)}",
        )


def _pairs(x: Tensor, index: Tensor) -> Tensor:
    """A row [in] for each pair of token and expert."""
    if x.dim() == 2:
        x = x[:, None].expand(*index.shape, x.shape[-1])
    return x.reshape(-1, x.shape[-1])


def sorted_rows(x: Tensor, order: Tensor, chosen: int) -> Tensor:
    """A row [in] for each pair, in an order of pairs.

    x        [T, in] or [T, K, in]
    chosen   pairs that are made of a row of x
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows[order // chosen if chosen > 1 else order]


def _sorted(flat: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and where each expert's pairs end."""
    # Few bits sort fast; equal ones keep their order.
    keys, order = flat.to(torch.int16 if experts < 1 << 15 else torch.int32).sort(stable=True)
    numbers = torch.arange(experts, device=flat.device, dtype=keys.dtype)
    return order, torch.searchsorted(keys, numbers, right=True, out_int32=True)


def _has_grouped_product(x: Tensor) -> bool:
    """Whether torch multiplies all groups at once, without asking the device where they end."""
    return x.is_cuda and has_grouped_types(x.dtype)


def has_grouped_types(dtype: torch.dtype) -> bool:
    """Whether it does so in a dtype on CUDA."""
    return dtype == torch.bfloat16 and hasattr(F, "grouped_mm")


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert [S, in] times matrices [E, in, out]."""
    if _has_grouped_product(rows):
        return _by_torch(rows, matrices, ends)
    parts, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(rows[start:end] @ matrices[expert])
        start = end
    return torch.cat(parts) if parts else rows.new_empty(0, matrices.shape[2])


def _by_torch(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """All groups at once; matrices as narrow as a small rank are made wider."""
    outer = matrices.shape[2]
    inner_more, outer_more = -matrices.shape[1] % ALIGNED, -outer % ALIGNED
    if inner_more or outer_more:
        rows = F.pad(rows, (0, inner_more))
        matrices = F.pad(matrices, (0, outer_more, 0, inner_more))
    if 1 not in matrices.stride()[1:]:
        matrices = matrices.contiguous()
    return F.grouped_mm(rows, matrices, offs=ends)[:, :outer]


def _one_by_one(rows: Tensor, matrices: Tensor, flat: Tensor) -> Tensor:
    """The same of rows in any order, each with a copy of its matrix."""
    step = max(1, GATHERED // max(1, matrices[0].numel()))
    parts = [
        torch.bmm(some[:, None], matrices[chosen])[:, 0]
        for some, chosen in zip(torch.split(rows, step), torch.split(flat, step), strict=True)
    ]
    return torch.cat(parts)


@expert_linear.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, turned: bool) -> Tensor:
    check_experts(x, weight, bias, index, turned)
    return x.new_empty(*index.shape, weight.shape[2 if turned else 1])


@torch.library.custom_op(
    "tlora_fx::expert_outer",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor index, int experts) -> Tensor",
)
def expert_outer(left: Tensor, right: Tensor, index: Tensor, experts: int) -> Tensor:
    """The sum of outer products of each expert's pairs: the gradient of its matrix.

    left      [T, M] or [T, K, M]
    right     [T, N] or [T, K, N]
    index     [T, K]
    returns   [experts, M, N] in left's dtype
    """
    left, right, flat = _pairs(left, index), _pairs(right, index), index.reshape(-1)
    order, ends = _sorted(flat, experts)
    left, right = left[order], right[order]
    if _has_grouped_product(left):
        high, wide = left.shape[1], right.shape[1]
        left, right = F.pad(left, (0, -high % ALIGNED)), F.pad(right, (0, -wide % ALIGNED))
        return F.grouped_mm(left.t(), right, offs=ends)[:, :high, :wide]
    sums, start = left.new_zeros(experts, left.shape[1], right.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=sums[expert])
        start = end
    return sums


@expert_outer.register_fake
def _outer_fake(left: Tensor, right: Tensor, index: Tensor, experts: int) -> Tensor:
    return left.new_empty(experts, left.shape[-1], right.shape[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, index, ctx.turned = inputs
    ctx.shared = x.dim() == 2
    # A frozen base keeps no x: dx needs the matrices alone.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, index = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    dx = dweight = dbias = None
    if wants_x:
        dx = torch.ops.tlora_fx.expert_linear(grad, weight, None, index, not ctx.turned)
        dx = dx.sum(1) if ctx.shared else dx
    if wants_weight:
        sides = (x, grad) if ctx.turned else (grad, x)
        dweight = torch.ops.tlora_fx.expert_outer(*sides, index, weight.shape[0])
    if wants_bias:
        one = grad.new_ones(*index.shape, 1)
        dbias = torch.ops.tlora_fx.expert_outer(one, grad, index, weight.shape[0])[:, 0]
    return dx, dweight, dbias, None, None


expert_linear.register_autograd(_backward, setup_context=_setup)
