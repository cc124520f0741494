"""The adapters of all jobs on frozen linears: `tlora_fx::multi_lora_linear` and its kin.

    multi_lora_linear    a frozen linear and the adapters on it
    multi_lora_linears   several that read the same x
    multi_lora_add       the adapters, added to what another library's product gave, such as that
                         of a quantised base

Graphs hold these operators, one output a site. They are made of others, which also hand on what a
backward reads again: those are what autograd, AOT and a pipeline that runs dX and dA, dB apart see.

    multi_lora_forward              y of each site; S and the dropout bits, which a backward reads
    multi_lora_input_gradient       dx; of each site dS, and what the pass over dy found for dB
    multi_lora_add_forward          y with the branches; S and the dropout bits
    multi_lora_add_input_gradient   what the branches add to dx; dS, and parts of dB
    multi_lora_adapter_gradients    dA and dB of each site, of both

A pipeline may run the last later than dX: nothing but the optimizer waits for it. Where no kernel
serves (see kernels/support.py) S, bits and dB's parts are empty, of shape [0]. The last
`tail_columns` columns of x and of each dy are no input: operators may write there. Sites whose
weights stand in one buffer are joined: all y are one tensor, and all dy another (see
kernels/packed.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_fx.errors import AdapterTableError, FrozenGradientError
from tlora_fx.ops.dropout import JobMasks, keep_scale, threshold_of
from tlora_fx.ops.kernels import dispatch, packed, support
from tlora_fx.ops.kernels.support import KernelGroup
from tlora_fx.ops.tables import (
    PART_SCHEMA,
    SITE_SCHEMA,
    SITES_SCHEMA,
    AdapterGradientsCall,
    ForwardCall,
    InputGradientCall,
    SiteGroup,
    check_adapters,
    check_fit,
    check_scales,
    named,
    rank_bounds,
    tokens_of,
)

_TAGS = torch.Tag.pt2_compliant_tag
_DEVICES = ("cpu", "cuda")
torch.library.define(
    "tlora_fx::multi_lora_linear",
    f"(Tensor x, Tensor weight, Tensor? bias, {SITE_SCHEMA}) -> Tensor",
)
torch.library.define(
    "tlora_fx::multi_lora_linears",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, {SITES_SCHEMA}) -> Tensor[]",
)
torch.library.define("tlora_fx::multi_lora_add", f"(Tensor y, Tensor x, {SITE_SCHEMA}) -> Tensor")
# Defined by their parts, not by `custom_op`: its handling of lists takes longer than all launches.
torch.library.define(
    "tlora_fx::multi_lora_forward",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, {PART_SCHEMA}, int tail_columns, "
    "bool joined=False) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "tlora_fx::multi_lora_input_gradient",
    f"(Tensor[] dys, Tensor[] weights, {PART_SCHEMA}, Tensor[] s, Tensor[] bits, bool need_dx, "
    "int tail_columns) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "tlora_fx::multi_lora_adapter_gradients",
    f"(Tensor[] dys, Tensor x, Tensor[] weights, {PART_SCHEMA}, Tensor[] s, Tensor[] bits, "
    "Tensor[] ds, Tensor[] db_parts) -> Tensor[]",
    tags=_TAGS,
)
_library = torch.library.Library("tlora_fx", "IMPL")  # type: ignore[no-untyped-call]


def multi_lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *tables: Any, **settings: Any
) -> Tensor:
    """Apply a frozen linear, and to each job's tokens its own adapter.

    x              float [..., in]; all but the last dimension enumerate tokens
    weight, bias   [out, in] and [out] or None, in x's dtype, frozen
    returns        [..., out] in x's dtype; rows of job j hold
                   x Wᵀ + bias + scale_j * (drop_j(x) A_jᵀ) B_j
    raises         AdapterTableError, SegmentError, MaskKeyError, naming the site
    source         tLoRA, section 3.3

    The tables, which all operators of adapters take in this order:

    a, b           [R, in] and [R, out]: all jobs' A, and all jobs' B transposed
    ranks          int32 [J + 1] on the CPU, job j owns rows ranks[j]:ranks[j + 1] of a and b; rows
                   from ranks[J] on belong to nobody
    scales, rates  float64 [J] on the CPU: lora_alpha / r or alike, and dropout rates
    segments       int32 [J + 1] on the CPU
    keys           int64 [J, 2] on the CPU, (seed, step)
    token_index    int32, one a token; read only when some job drops
    site           int64 scalar on the CPU, `site_id` of the layer; where x is a piece of its input,
                   bits from 32 on are the piece's first column divided by 8
    compute_dtype  adapters are cast to it and multiplied in it
    max_rank       the largest rank that a job may have here; 0, the default: the rows of a
    drops          whether a job may drop here, the default; where False, rates must be 0
    """
    y: Tensor = torch.ops.tlora_fx.multi_lora_linear.default(x, weight, bias, *tables, **settings)
    return y


def multi_lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *tables: Any,
    **settings: Any,
) -> list[Tensor]:
    """`multi_lora_linear` of several linears that read the same x: q, k, v, or gate, up.

    tables     with an item a linear for a, b, ranks, scales, rates and sites
    max_rank   the largest rank that a job may have at any of them
    returns    what each linear gives
    raises     as `multi_lora_linear`
    """
    ys: list[Tensor] = torch.ops.tlora_fx.multi_lora_linears.default(
        x, weights, biases, *tables, **settings
    )
    return ys


def multi_lora_add(y: Tensor, x: Tensor, *tables: Any, **settings: Any) -> Tensor:
    """Add to each job's tokens what its own adapter makes of them.

    y        float [..., out], what the frozen operator made of x
    x        [..., in], of y's dtype; all but the last dimension enumerate tokens
    tables   as of `multi_lora_linear`
    returns  [..., out] in y's dtype; rows of job j hold y + scale_j * (drop_j(x) A_jᵀ) B_j
    raises   AdapterTableError, SegmentError, MaskKeyError

    The gradient of y is that of the result.
    """
    total: Tensor = torch.ops.tlora_fx.multi_lora_add.default(y, x, *tables, **settings)
    return total


def _linear(keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *tables: Any) -> Tensor:
    group = SiteGroup.single([weight], *tables)
    return _forward_of(keyset, x, [bias], group, joined=False)[0]


def _linears(
    keyset: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *tables: Any
) -> list[Tensor]:
    group = SiteGroup(weights, *tables)
    results = _forward_of(keyset, x, biases, group, packed.joins(x, group))
    return _each(results[: len(results) - 2 * len(weights)], weights)


for _name, _function in (("multi_lora_linear", _linear), ("multi_lora_linears", _linears)):
    _library.impl(  # type: ignore[no-untyped-call]
        _name, _function, "CompositeImplicitAutograd", with_keyset=True
    )


@torch.library.impl("tlora_fx::multi_lora_add", "CompositeImplicitAutograd")
def _add(y: Tensor, x: Tensor, *tables: Any) -> Tensor:
    arguments = SiteGroup.single([], *tables).arguments()
    results: list[Tensor] = torch.ops.tlora_fx.multi_lora_add_forward.default(y, x, *arguments)
    return results[0]


def multi_lora_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    """Apply n frozen linears and the adapters of all jobs.

    x         [..., in + tail_columns]
    returns   n y [..., out], joined one [..., sum of out]; n S [tokens, width] in x's dtype; n bits
              [tokens, in / 8] uint8
    raises    as `multi_lora_linear`
    """
    group, tail_columns, joined = ForwardCall.of(weights, rest)
    inputs = packed.narrow(x, tail_columns)
    group.check(inputs, biases)
    kernels = support.kernel_group(inputs, group)
    if kernels is None:
        ys = loop_forward(inputs, biases, group)
        ys = [torch.cat(ys, -1)] if joined else ys
        return [*ys, *nothing(x, 2 * len(weights))]
    return dispatch.forward(x, biases, group, kernels, tail_columns, joined)


torch.library.impl("tlora_fx::multi_lora_forward", _DEVICES, multi_lora_forward)


@torch.library.register_fake("tlora_fx::multi_lora_forward")  # type: ignore[untyped-decorator]
def _forward_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    group, tail_columns, joined = ForwardCall.of(weights, rest)
    inputs = packed.narrow(x, tail_columns)
    group.check(inputs, biases)
    outers = [weight.shape[0] for weight in weights]
    ys = [x.new_empty(*x.shape[:-1], outer) for outer in ([sum(outers)] if joined else outers)]
    kernels = support.kernel_group(inputs, group)
    if kernels is None:
        return [*ys, *nothing(x, 2 * len(weights))]
    return [*ys, *kernels.low_rank_rows(x), *kernels.bits(x)]


def multi_lora_input_gradient(dys: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    """The gradient of x, by one pass over each dy.

    dys       n [..., out + tail_columns], joined one [..., sum of out + tail_columns]
    s, bits   as the forward gave them
    returns   dx [..., in], or [0] unless need_dx; n dS [tokens, width]; n parts of dB, which only
              `multi_lora_adapter_gradients` reads
    raises    as `multi_lora_linear`
    """
    group, s, bits, need_dx, tail_columns = InputGradientCall.of(weights, rest)
    if from_kernels(s):
        return dispatch.input_gradient(dys, group, s, bits, need_dx, tail_columns)
    each = _each([packed.narrow(dy, tail_columns) for dy in dys], weights)
    dx, ds = loop_input_gradient(each, group, need_dx)
    return [dx, *ds, *nothing(dx, len(weights))]


def _each(values: list[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """A y or dy a site, views where they came as one."""
    if len(values) >= len(weights):
        return values
    return list(values[0].split_with_sizes([len(weight) for weight in weights], -1))


torch.library.impl("tlora_fx::multi_lora_input_gradient", _DEVICES, multi_lora_input_gradient)


@torch.library.register_fake("tlora_fx::multi_lora_input_gradient")  # type: ignore[untyped-decorator]
def _input_gradient_fake(dys: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    group, s, _, need_dx, _ = InputGradientCall.of(weights, rest)
    first = dys[0]
    dx = first.new_empty(*first.shape[:-1], group.inner) if need_dx else first.new_empty(0)
    if from_kernels(s):
        parts = KernelGroup.of(first, group).gradient_parts(first)
        return [dx, *(torch.empty_like(rows) for rows in s), *parts]
    tokens = tokens_of(first)
    ds = [
        first.new_empty(tokens, group.capacity(site), dtype=group.compute_dtype)
        for site in range(len(weights))
    ]
    return [dx, *ds, *nothing(dx, len(weights))]


def multi_lora_adapter_gradients(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], *rest: Any
) -> list[Tensor]:
    """The gradients of all adapters.

    ds, db_parts   as `multi_lora_input_gradient` gave them
    returns        n da like a, n db like b; rows of jobs without tokens are zero
    raises         as `multi_lora_linear`
    """
    group, s, bits, ds, db_parts = AdapterGradientsCall.of(weights, rest)
    if from_kernels(s):
        return dispatch.adapter_gradients(x, group, bits, ds, db_parts)
    return loop_adapter_gradients(_each(dys, weights), x, group, ds)


torch.library.impl("tlora_fx::multi_lora_adapter_gradients", _DEVICES, multi_lora_adapter_gradients)


@torch.library.register_fake("tlora_fx::multi_lora_adapter_gradients")  # type: ignore[untyped-decorator]
def _adapter_gradients_fake(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], *rest: Any
) -> list[Tensor]:
    group = AdapterGradientsCall.of(weights, rest).group
    return [leaf.new_empty(leaf.shape) for leaf in (*group.a, *group.b)]


def nothing(like: Tensor, count: int) -> list[Tensor]:
    """Empty tensors in place of S, bits or parts that no kernel made."""
    return [like.new_empty(0) for _ in range(count)]


def from_kernels(s: list[Tensor]) -> bool:
    """Whether kernels made these: by the shape, for a row may have no tokens."""
    return s[0].dim() == 2


class DispatchedCall(NamedTuple):
    """A forward on its way through autograd, which does not look into it.

    keyset   of the call's dispatch
    frozen   whether no weight and no bias learns
    """

    keyset: Any
    biases: list[Tensor | None]
    forward: ForwardCall
    frozen: bool


class _Differentiable(torch.autograd.Function):
    """What autograd knows: gradients of x, and of each site's a and b.

    Tensors that have no gradient come in a tuple, beside what autograd looks at.
    """

    @staticmethod
    def forward(ctx: Any, call: DispatchedCall, x: Tensor, *learning: Tensor) -> Any:
        group, weights = call.forward.group, call.forward.group.weights
        own = call.forward._replace(tail_columns=packed.behind_x(x, group))
        x = packed.widen([x], own.tail_columns)
        results = _redispatch(call.keyset, x, weights, call.biases, *own.arguments())
        ys, rest = results[: -2 * len(weights)], results[-2 * len(weights) :]
        ctx.mark_non_differentiable(*rest)
        keep(ctx, x, own, rest, frozen=call.frozen)
        if own.joined:
            ys = _each(ys, weights)
            # A backward that keeps one, as attention's does v, would keep all. What reads them in
            # generated code reads them where they are. All of gate and up are kept anyway.
            if not packed.is_wide(weights[0]):
                ys = [y.contiguous() for y in ys]
        return (*ys, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, need_dx, *learning = ctx.needs_input_grad
        dx, leaves, _ = gradients(ctx, grads, need_dx=need_dx, need_leaves=any(learning))
        return (None, dx, *leaves)


#: Lists that `keep` saves, an item a site each.
_KEPT_LISTS = 9


def keep(
    ctx: Any,
    x: Tensor,
    call: ForwardCall,
    rest: Sequence[Tensor],
    *more: Tensor,
    frozen: bool,
) -> None:
    """Keep what `gradients` reads.

    x        with its tail columns
    rest     S and the bits of each site
    more     handed on
    """
    ctx.set_materialize_grads(False)
    group = call.group
    lists = (
        group.weights, group.a, group.b, group.ranks, group.scales, group.rates, group.sites,
    )  # fmt: skip
    ctx.save_for_backward(
        x, group.segments, group.keys, group.token_index,
        *(item for part in lists for item in part), *rest, *more,
    )  # fmt: skip
    ctx.settings = group.compute_dtype, group.max_rank, group.drops
    ctx.count, ctx.frozen = len(group.weights), frozen
    ctx.tail_columns, ctx.joined = call.tail_columns, call.joined


def gradients(
    ctx: Any, grads: Sequence[Tensor | None], *, need_dx: bool, need_leaves: bool
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor]]:
    """dx; da and db of each site; and what more was kept.

    raises   FrozenGradientError
    """
    if not ctx.frozen:
        raise FrozenGradientError(
            "multi_lora_linear gives no gradient for its weight and bias",
            help="freeze them, or leave this layer to run as it is on its job's segment",
        )
    count: int = ctx.count
    x, segments, keys, token_index, *flat = ctx.saved_tensors
    more = flat[_KEPT_LISTS * count :]
    parts = [flat[start * count : (start + 1) * count] for start in range(_KEPT_LISTS)]
    weights, a, b, ranks, scales, rates, sites, s, bits = parts
    lists = a, b, ranks, scales, rates
    group = SiteGroup(weights, *lists, segments, keys, token_index, sites, *ctx.settings)
    x = packed.narrow(x, ctx.tail_columns)
    dys = [
        x.new_zeros(*x.shape[:-1], weight.shape[0]) if dy is None else dy
        for dy, weight in zip(grads[:count], weights, strict=True)
    ]
    tail_columns = packed.behind_dy(dys[0], group, ctx.joined) if need_dx else 0
    wide = [
        packed.widen(part, tail_columns) for part in ([dys] if ctx.joined else [[d] for d in dys])
    ]
    direct = _is_plain(x, *dys)
    input_gradient = multi_lora_input_gradient if direct else _input_gradient
    tables = group.arguments()
    dx, *rest = input_gradient(wide, weights, *tables, s, bits, need_dx, tail_columns)
    leaves: list[Tensor | None] = [None] * (2 * count)
    if need_leaves:
        # Views of what is there: dy itself would be written once more.
        dys = [packed.narrow(dy, tail_columns) for dy in wide]
        adapters = multi_lora_adapter_gradients if direct else _adapter_gradients
        leaves = [*adapters(dys, x, weights, *tables, s, bits, rest[:count], rest[count:])]
    return dx if need_dx else None, leaves, more


ops = torch.ops.tlora_fx


_input_gradient = ops.multi_lora_input_gradient.default
_adapter_gradients = ops.multi_lora_adapter_gradients.default
_PLAIN = (Tensor, torch.nn.Parameter)
_BACKENDS = {
    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    for name in ("CPU", "CUDA")
}


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nobody but the backend would see an operator on these: no tracer, no profiler."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and not torch.is_grad_enabled()
        and not torch._C._autograd._profiler_enabled()
        and all(type(tensor) in _PLAIN for tensor in tensors)
    )


def _redispatch(keyset: Any, *arguments: Any) -> list[Tensor]:
    """The forward below autograd."""
    below = keyset & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        if below.raw_repr() in _BACKENDS:
            return multi_lora_forward(*arguments)
        results: list[Tensor] = ops.multi_lora_forward.default.redispatch(below, *arguments)
    return results


def _forward_of(
    keyset: Any, x: Tensor, biases: list[Tensor | None], group: SiteGroup, joined: bool
) -> list[Tensor]:
    """`multi_lora_forward` of the operators that are made of it, with their dispatch keys."""
    arguments = (x, group.weights, biases, *group.arguments(), 0, joined)
    below = keyset & torch._C._after_autograd_keyset
    if below.raw_repr() in _BACKENDS and not torch._C._autograd._profiler_enabled():
        return _autograd(keyset, *arguments)
    results: list[Tensor] = ops.multi_lora_forward.default(*arguments)
    return results


def _autograd(
    keyset: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    call = ForwardCall.of(weights, rest)
    frozen, learning = not need_gradients(*weights, *biases), [*call.group.a, *call.group.b]
    if not torch.is_grad_enabled() or (frozen and not need_gradients(x, *learning)):
        if not call.tail_columns:
            call = call._replace(tail_columns=packed.behind_x(x, call.group))
            x = packed.widen([x], call.tail_columns)
        return _redispatch(keyset, x, weights, biases, *call.arguments())
    if not frozen:
        learning += [tensor for tensor in (*weights, *biases) if tensor is not None]
    dispatched = DispatchedCall(keyset, biases, call, frozen)
    results = _Differentiable.apply(  # type: ignore[no-untyped-call]
        dispatched, packed.narrow(x, call.tail_columns), *learning
    )
    return list(results)


def need_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd is asked for the gradient of any."""
    return any(tensor.requires_grad for tensor in tensors if tensor is not None)


_library.impl(  # type: ignore[no-untyped-call]
    "multi_lora_forward", _autograd, "Autograd", with_keyset=True
)


def _check_added(y: Tensor, x: Tensor, group: SiteGroup) -> None:
    """Refuse what metadata alone shows to be wrong; raises AdapterTableError."""
    if y.shape[:-1] != x.shape[:-1] or y.dtype != x.dtype:
        raise AdapterTableError(
            "adapters must be added to what was made of their own input",
            expected=f"y {[*x.shape[:-1], 'out']} {x.dtype}",
            found=f"y {list(y.shape)} {y.dtype}",
        )
    standing = x.new_empty((), device="meta").expand(y.shape[-1], x.shape[-1])
    check_adapters(x, standing, None, group.a[0], group.b[0])


@torch.library.custom_op(
    "tlora_fx::multi_lora_add_forward",
    mutates_args=(),
    schema=f"(Tensor y, Tensor x, {PART_SCHEMA}) -> Tensor[]",
)
def multi_lora_add_forward(y: Tensor, x: Tensor, *tables: Any) -> list[Tensor]:
    """Add the adapters of all jobs.

    returns   the sum [..., out]; S and the dropout bits, [0] where no kernel serves
    raises    as `multi_lora_add`
    """
    group = SiteGroup([], *tables)
    _check_added(y, x, group)
    kernels = support.kernel_group(x, group)
    if kernels is not None:
        return dispatch.add_forward(y, x, group, kernels)
    total = y.clone(memory_format=torch.contiguous_format)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows):
        adapters = AdapterTables.read(group, 0, len(rows))
        add_branches(total.view(-1, y.shape[-1]), rows, adapters, group, 0)
    return [total, x.new_empty(0), x.new_empty(0)]


@multi_lora_add_forward.register_fake
def _add_forward_fake(y: Tensor, x: Tensor, *tables: Any) -> list[Tensor]:
    group = SiteGroup([], *tables)
    _check_added(y, x, group)
    kernels, total = support.kernel_group(x, group), y.new_empty(y.shape)
    if kernels is None:
        return [total, x.new_empty(0), x.new_empty(0)]
    return [total, *kernels.low_rank_rows(x), *kernels.bits(x)]


@torch.library.custom_op(
    "tlora_fx::multi_lora_add_input_gradient",
    mutates_args=(),
    schema=f"(Tensor dy, {PART_SCHEMA}, Tensor[] s, Tensor[] bits, bool need_dx) -> Tensor[]",
)
def multi_lora_add_input_gradient(dy: Tensor, *rest: Any) -> list[Tensor]:
    """Contribution of the branches to the gradient of x.

    dy        [..., out]
    s, bits   as the forward gave them
    returns   dx [..., in], or [0] unless need_dx; dS [tokens, rank]; parts of dB, which only
              `multi_lora_adapter_gradients` reads
    raises    as `multi_lora_add`
    """
    group, s, bits, need_dx, _ = InputGradientCall.of([], rest)
    if from_kernels(s):
        return dispatch.add_input_gradient(dy, group, s[0], bits[0], need_dx)
    rows = dy.reshape(-1, dy.shape[-1])
    dx = rows.new_zeros(len(rows), group.inner) if need_dx else None
    adapters = AdapterTables.read(group, 0, len(rows))
    ds = add_branch_gradients(dx, rows, adapters, group, 0)
    shaped = dy.new_empty(0) if dx is None else dx.view(*dy.shape[:-1], group.inner)
    return [shaped, ds, dy.new_empty(0)]


@multi_lora_add_input_gradient.register_fake
def _add_input_gradient_fake(dy: Tensor, *rest: Any) -> list[Tensor]:
    group, s, _, need_dx, _ = InputGradientCall.of([], rest)
    dx = dy.new_empty(*dy.shape[:-1], group.inner) if need_dx else dy.new_empty(0)
    if from_kernels(s):
        return [dx, torch.empty_like(s[0]), *KernelGroup.of(dy, group).gradient_parts(dy)]
    ds = dy.new_empty(tokens_of(dy), group.capacity(0), dtype=group.compute_dtype)
    return [dx, ds, dy.new_empty(0)]


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, x, (a,), (b,), (ranks,), (scales,), (rates,), *row, (site,), dtype, max_rank, drops = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, a, b, ranks, scales, rates, *row, site, *output[1:])
    ctx.settings = dtype, max_rank, drops


def _add_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *saved, s, bits = ctx.saved_tensors
    dy, ops = grads[0], torch.ops.tlora_fx
    nothing: tuple[Any, ...] = ([None], [None], [None], None, None, None, [None], None, None, None)
    if dy is None:
        return None, None, [None], [None], *nothing
    need_y, need_x, *need = ctx.needs_input_grad
    tables = SiteGroup.single([], *saved, *ctx.settings).arguments()
    dx, ds, parts = ops.multi_lora_add_input_gradient.default(dy, *tables, [s], [bits], need_x)
    da, db = None, None
    if any(map(_needed, need[:2])):
        da, db = ops.multi_lora_adapter_gradients.default(
            [dy], x, [], *tables, [s], [bits], [ds], [parts]
        )
    return dy if need_y else None, dx if need_x else None, [da], [db], *nothing


def _needed(needs: bool | list[bool]) -> bool:
    return any(needs) if isinstance(needs, list) else needs


multi_lora_add_forward.register_autograd(_add_backward, setup_context=_add_setup)


# The adapters of a site in plain PyTorch, job by job: on the CPU, and where no kernel serves.
#
# Each job's branch runs on its own segment, never on masked rows of others: a NaN of one job has no
# way into another's sums.


@dataclass(frozen=True, slots=True)
class Branch:
    """One job's adapter on this layer, with the tokens and ranks that it owns."""

    job: int
    tokens: slice
    ranks: slice
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """The adapters of a row on one layer: only jobs with a rank and tokens."""

    branches: tuple[Branch, ...]
    masks: JobMasks

    @classmethod
    def read(cls, group: SiteGroup, index: int, tokens: int) -> AdapterTables:
        """Check all tables of a site of a group.

        raises   AdapterTableError, SegmentError, MaskKeyError, naming the site
        """
        site = group.sites[index]
        with named(site):
            masks = JobMasks.read(
                group.rates[index], group.segments, group.keys, group.token_index, site, tokens
            )
            jobs = len(masks.rates)
            rows = rank_bounds(group.ranks[index], jobs, group.a[index].shape[0])
            scales = check_scales(group.scales[index], jobs)
            branches = tuple(_branches(masks.bounds, rows, scales))
            largest = max(
                (branch.ranks.stop - branch.ranks.start for branch in branches), default=0
            )
            drops = any(map(threshold_of, masks.rates))
            check_fit(largest, drops, group.max_rank, group.drops)
        return cls(branches, masks)

    def draw(self, branch: Branch, columns: int) -> Tensor | None:
        """The branch's keep mask, or None where it drops nothing."""
        return self.masks.keep(branch.job, columns) if self.masks.drops(branch.job) else None


def _branches(bounds: list[int], rows: list[int], scales: list[float]) -> Iterator[Branch]:
    for job, scale in enumerate(scales):
        tokens, ranks = slice(*bounds[job : job + 2]), slice(*rows[job : job + 2])
        if tokens.start < tokens.stop and ranks.start < ranks.stop:
            yield Branch(job, tokens, ranks, scale)


def loop_forward(x: Tensor, biases: list[Tensor | None], group: SiteGroup) -> list[Tensor]:
    """y [..., out] of each site."""
    rows = x.reshape(-1, x.shape[-1])
    if not rows.numel():
        return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in group.weights]
    ys = []
    for site, (weight, bias) in enumerate(zip(group.weights, biases, strict=True)):
        tables = AdapterTables.read(group, site, len(rows))
        y = torch.nn.functional.linear(rows, weight, bias)
        ys.append(add_branches(y, rows, tables, group, site).view(*x.shape[:-1], -1))
    return ys


def add_branches(
    y: Tensor, rows: Tensor, tables: AdapterTables, group: SiteGroup, site: int
) -> Tensor:
    """Add every job's branch to its rows of y [tokens, out], in place; returns y."""
    a, b, compute = group.a[site], group.b[site], group.compute_dtype
    for branch in tables.branches:
        keep = tables.draw(branch, rows.shape[1])
        dropped = _drop(rows[branch.tokens].to(compute), keep, tables, branch.job)
        hidden = dropped @ a[branch.ranks].to(compute).t()
        _add_product(y[branch.tokens], hidden, b[branch.ranks].to(compute), branch.scale)
    return y


def loop_input_gradient(
    dys: list[Tensor], group: SiteGroup, need_dx: bool
) -> tuple[Tensor, list[Tensor]]:
    """dx, or [0] unless needed; dS of each site in the compute dtype, zero where nobody's."""
    first = dys[0]
    total = first.new_empty(0)
    all_ds = []
    for site, dy in enumerate(dys):
        grads = dy.reshape(-1, dy.shape[-1])
        tables = AdapterTables.read(group, site, len(grads))
        dx = grads @ group.weights[site] if need_dx else None
        all_ds.append(add_branch_gradients(dx, grads, tables, group, site))
        if dx is not None:
            total = total.add_(dx) if site else dx
    return total.view(*first.shape[:-1], group.inner) if need_dx else total, all_ds


def add_branch_gradients(
    dx: Tensor | None, grads: Tensor, tables: AdapterTables, group: SiteGroup, site: int
) -> Tensor:
    """Add to dx [tokens, in], in place, what comes through the branches; returns dS.

    dx   None where it is not wanted
    """
    a, b, compute = group.a[site], group.b[site], group.compute_dtype
    ds = grads.new_zeros(len(grads), group.capacity(site), dtype=compute)
    for branch in tables.branches:
        own_a, own_b = a[branch.ranks].to(compute), b[branch.ranks].to(compute)
        inner = (grads[branch.tokens].to(compute) @ own_b.t()).mul_(branch.scale)
        ds[branch.tokens, : len(own_a)] = inner
        if dx is None:
            continue
        keep = tables.draw(branch, group.inner)
        if keep is None:
            _add_product(dx[branch.tokens], inner, own_a, 1.0)
        else:
            _add_wide(dx[branch.tokens], _drop(inner @ own_a, keep, tables, branch.job))
    return ds


def loop_adapter_gradients(
    dys: list[Tensor], x: Tensor, group: SiteGroup, ds: list[Tensor]
) -> list[Tensor]:
    """da of each site, then db; masks and the low-rank rows are computed again."""
    rows, compute = x.reshape(-1, x.shape[-1]), group.compute_dtype
    all_da, all_db = [], []
    for site, dy in enumerate(dys):
        grads = dy.reshape(-1, dy.shape[-1])
        tables = AdapterTables.read(group, site, len(rows))
        da, db = _zeros(group.a[site]), _zeros(group.b[site])
        for branch in tables.branches:
            own_a = group.a[site][branch.ranks].to(compute)
            keep = tables.draw(branch, rows.shape[1])
            dropped = _drop(rows[branch.tokens].to(compute), keep, tables, branch.job)
            da[branch.ranks] = ds[site][branch.tokens, : len(own_a)].t() @ dropped
            low = (dropped @ own_a.t()).t() @ grads[branch.tokens].to(compute)
            db[branch.ranks] = low.mul_(branch.scale)
        all_da.append(da)
        all_db.append(db)
    return [*all_da, *all_db]


def _drop(part: Tensor, keep: Tensor | None, tables: AdapterTables, job: int) -> Tensor:
    if keep is None:
        return part
    return torch.where(keep, part * keep_scale(tables.masks.rates[job]), 0)


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target += scale * (left @ right), in place, summed in the wider of the two types."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
        return
    wide = torch.promote_types(target.dtype, left.dtype)
    target.copy_(target.to(wide) + (left @ right).to(wide) * scale)


def _add_wide(target: Tensor, value: Tensor) -> None:
    wide = torch.promote_types(target.dtype, value.dtype)
    target.copy_(target.to(wide) + value.to(wide))


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)
