"""Costs of the operators, for `torch.utils.flop_counter`.

Counted as torch counts its own: two operations a multiply-add, matrix products only, attention
without the causal half. Tables without values (fake tensors) count as equal shares.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

import tlora_fx.ops.attention
import tlora_fx.ops.dora
import tlora_fx.ops.experts
import tlora_fx.ops.float8
import tlora_fx.ops.gated
import tlora_fx.ops.parallel
import tlora_fx.ops.quantized  # noqa: F401  (these define what is named below)
from tlora_fx.ops.expert_lora import Call
from tlora_fx.ops.lora import from_kernels
from tlora_fx.ops.tables import (
    AdapterGradientsCall,
    ForwardCall,
    InputGradientCall,
    SiteGroup,
    tokens_of,
)

ops = torch.ops.tlora_fx
# Of an operator's arguments; settings follow.
_TABLES = 9


def _lengths(offsets: Tensor, total: int) -> list[float]:
    """The lengths between offsets, scaled so that they cover `total`."""
    count = max(1, offsets.shape[0] - 1)
    if _is_fake(offsets):
        return [total / count] * count
    scale = total / max(1, int(offsets[-1]))
    return [float(length) * scale for length in offsets.diff().tolist()]


def _is_fake(table: Tensor) -> bool:
    return isinstance(table, FakeTensor | FunctionalTensor) or table.is_meta


def _low_rank(x: Tensor, group: SiteGroup) -> list[float]:
    """Tokens times rank, summed over the jobs, of each site."""
    tokens, sites = _lengths(group.segments, tokens_of(x)), []
    for a, ranks in zip(group.a, group.ranks, strict=True):
        # All rows of a belong to jobs where nobody knows.
        owned = a.shape[0] if _is_fake(ranks) else int(ranks[-1])
        rows = _lengths(ranks, owned)
        sites.append(sum(n * r for n, r in zip(tokens, rows, strict=True)))
    return sites


def _forward(x: Tensor, group: SiteGroup) -> int:
    frozen = 2 * tokens_of(x) * sum(weight.numel() for weight in group.weights)
    rows = _low_rank(x, group)
    widths = [a.shape[1] + b.shape[1] for a, b in zip(group.a, group.b, strict=True)]
    return frozen + sum(round(2 * n * width) for n, width in zip(rows, widths, strict=True))


@register_flop_formula(ops.multi_lora_linear, get_raw=True)
def multi_lora_linear_flops(x: Tensor, weight: Tensor, bias: Any, *tables: Any, **rest: Any) -> int:
    """The frozen product and each job's two low-rank products."""
    return _forward(x, SiteGroup.single([weight], *tables[:_TABLES], x.dtype))


@register_flop_formula(ops.multi_lora_linears, get_raw=True)
def multi_lora_linears_flops(
    x: Tensor, weights: list[Tensor], biases: Any, *tables: Any, **rest: Any
) -> int:
    """`multi_lora_linear_flops`, summed over the linears."""
    given: Any = (*tables[:_TABLES], x.dtype)
    return _forward(x, SiteGroup(weights, *given))


@register_flop_formula(ops.multi_lora_forward, get_raw=True)
def multi_lora_forward_flops(
    x: Tensor, weights: list[Tensor], biases: Any, *rest: Any, **out: Any
) -> int:
    """The frozen products and each job's two low-rank products."""
    return _forward(x, ForwardCall.of(weights, rest).group)


@register_flop_formula(ops.multi_lora_gated_linear, get_raw=True)
def multi_lora_gated_linear_flops(
    gate: Tensor, up: Tensor, activation: str, weight: Tensor, bias: Any, *rest: Any, **out: Any
) -> int:
    """`multi_lora_linear_flops` of what the activation makes."""
    return multi_lora_linear_flops(gate, weight, bias, *rest)


@register_flop_formula(ops.multi_lora_gated_forward, get_raw=True)
def multi_lora_gated_forward_flops(
    gate: Tensor, up: Tensor, activation: str, weights: list[Tensor], biases: Any, *rest: Any,
    **out: Any,
) -> int:  # fmt: skip
    """`multi_lora_forward_flops` of what the activation makes."""
    return multi_lora_forward_flops(gate, weights, biases, *rest)


@register_flop_formula(ops.multi_lora_input_gradient, get_raw=True)
def multi_lora_input_gradient_flops(
    dys: list[Tensor], weights: list[Tensor], *rest: Any, **out: Any
) -> int:
    """dS; where dx is wanted, its product with the frozen weight and its branch. dB as kernels do.

    Kernels find dB in the pass over dy that finds dS; the loop over jobs finds it with dA.
    """
    group, s, _, need_dx, _ = InputGradientCall.of(weights, rest)
    flop = 0
    sites = zip(group.a, group.b, weights, _low_rank(dys[0], group), strict=True)
    for a, b, weight, rows in sites:
        columns = b.shape[1] * (1 + from_kernels(s)) + a.shape[1] * need_dx
        flop += round(2 * rows * columns) + 2 * tokens_of(dys[0]) * weight.numel() * need_dx
    return flop


@register_flop_formula(ops.multi_lora_adapter_gradients, get_raw=True)
def multi_lora_adapter_gradients_flops(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], *rest: Any, **out: Any
) -> int:
    """dA; where no kernel served, S again and dB."""
    group, s, *_ = AdapterGradientsCall.of(weights, rest)
    again = 0 if from_kernels(s) else 1
    sites = zip(group.a, group.b, _low_rank(x, group), strict=True)
    return sum(
        round(2 * rows * (a.shape[1] + again * (a.shape[1] + b.shape[1]))) for a, b, rows in sites
    )


@register_flop_formula(ops.dora_norms, get_raw=True)
def dora_norms_flops(weight: Tensor, a: Tensor, *rest: Any, **out: Any) -> int:
    """A by the weight, and by itself; every job with the largest rank. No token is in it."""
    *_, jobs, max_rank = rest
    count, columns = len(jobs) * int(max_rank), int(weight.numel()) + max_rank * sum(weight.shape)
    return int(2 * count * columns)


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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **out: Any
) -> int:
    """Scores again, dq, dk; and the two products of the values."""
    _, _, cu_seqlens, *_ = rest
    return round(2 * _attended(q, cu_seqlens) * (3 * q.shape[2] + 2 * v.shape[2]))


@register_flop_formula(ops.quantized_linear, get_raw=True)
def quantized_linear_flops(
    x: Tensor, stored: list[Tensor], bias: Tensor | None, form: str, shape: list[int], **out: Any
) -> int:
    """The product alone: restoring the matrix is none."""
    return 2 * tokens_of(x) * int(shape[0] * shape[1])


@register_flop_formula(ops.quantized_linear_backward, get_raw=True)
def quantized_linear_backward_flops(
    dy: Tensor, stored: list[Tensor], form: str, shape: list[int], **out: Any
) -> int:
    """Operations of dx."""
    return 2 * tokens_of(dy) * int(shape[0] * shape[1])


@register_flop_formula(ops.float8_linear, get_raw=True)
def float8_linear_flops(
    x: Tensor, codes: Tensor, scale: Tensor, stored: list[Tensor], *rest: Any, **out: Any
) -> int:
    """Operations of the product alone."""
    return 2 * tokens_of(x) * stored[0].numel()


@register_flop_formula(ops.float8_input_gradient, get_raw=True)
def float8_input_gradient_flops(codes: Tensor, scale: Tensor, columns: Tensor, **out: Any) -> int:
    """Operations of dx."""
    return 2 * tokens_of(codes) * columns.numel()


@register_flop_formula(ops.expert_linear, get_raw=True)
def expert_linear_flops(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, turned: bool, **out: Any
) -> int:
    """Each pair of a token and an expert with one matrix."""
    return 2 * index.numel() * weight.shape[1] * weight.shape[2]


@register_flop_formula(ops.expert_outer, get_raw=True)
def expert_outer_flops(left: Tensor, right: Tensor, index: Tensor, experts: int, **out: Any) -> int:
    """An outer product for each pair."""
    return 2 * index.numel() * left.shape[-1] * right.shape[-1]


def _expert_rows(call: Call) -> int:
    """Pairs times rank, summed over the jobs."""
    bounds = _lengths(call.segments, call.index.shape[0])
    ranks = {job: a.shape[0] // call.experts for job, a in zip(call.jobs, call.a, strict=True)}
    rows = sum(length * ranks.get(job, 0) for job, length in enumerate(bounds))
    return round(rows) * call.index.shape[1]


@register_flop_formula([ops.multi_lora_experts, ops.multi_lora_experts_forward], get_raw=True)
def multi_lora_experts_flops(*given: Any, **out: Any) -> int:
    """A pair with one frozen matrix, and with its job's two small ones."""
    call = Call(*given)
    inner, outer = call.x.shape[-1], call.outer
    return 2 * (call.pairs * inner * outer + _expert_rows(call) * (inner + outer))


@register_flop_formula(ops.multi_lora_experts_backward, get_raw=True)
def multi_lora_experts_backward_flops(dy: Tensor, *given: Any, **out: Any) -> int:
    """dx through both, where it is wanted; dS, dA and dB."""
    *arguments, _, _, _, need_dx = given
    call = Call(*arguments)
    inner, outer, rows = call.x.shape[-1], call.outer, _expert_rows(call)
    through = (call.pairs * outer + rows) * inner if need_dx else 0
    return 2 * (through + rows * (inner + 2 * outer))


@register_flop_formula(ops.multi_lora_add, get_raw=True)
def multi_lora_add_flops(y: Tensor, x: Tensor, *tables: Any, **rest: Any) -> int:
    """Each job's two low-rank products."""
    return _forward(x, SiteGroup.single([], *tables[:_TABLES], x.dtype))


@register_flop_formula(ops.multi_lora_add_forward, get_raw=True)
def multi_lora_add_forward_flops(y: Tensor, x: Tensor, *tables: Any, **rest: Any) -> int:
    """Each job's two low-rank products."""
    return _forward(x, SiteGroup([], *tables))


@register_flop_formula(ops.multi_lora_add_input_gradient, get_raw=True)
def multi_lora_add_input_gradient_flops(dy: Tensor, *rest: Any, **out: Any) -> int:
    """dS; the branch's dx where it is wanted; dB as kernels do."""
    group, s, _, need_dx, _ = InputGradientCall.of([], rest)
    (rows,) = _low_rank(dy, group)
    columns: int = group.b[0].shape[1] * (1 + from_kernels(s)) + group.inner * need_dx
    return round(2 * rows * columns)


@register_flop_formula(
    [ops.tp_copy, ops.tp_reduce, ops.tp_cross_entropy],
    get_raw=True,
)
def no_products(*args: Any, **out: Any) -> int:
    """Sums over processes multiply nothing."""
    return 0
