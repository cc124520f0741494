"""The three operators that `multi_lora_linear` is made of, for one site or several that share x.

    multi_lora_forward             y of each site; S and the dropout bits, which a backward reads
    multi_lora_input_gradient      dx; of each site dS, and what the pass over dy found for dB
    multi_lora_adapter_gradients   dA and dB of each site

A pipeline may run the third later than the second: nothing but the optimizer waits for it.
Where no kernel serves (see ops/kernels/serving.py) S, bits and dB's parts are empty, of shape [0].
The last `room` columns of x and of each dy are no input: operators may write there (see room.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import FrozenGradientError
from tlora_fx.ops import room as rooms
from tlora_fx.ops.kernels import dispatch, loop, support
from tlora_fx.ops.site_group import SCHEMA, SiteGroup, tokens_of

_TAGS = torch.Tag.pt2_compliant_tag
_DEVICES = ("cpu", "cuda")
# Defined by their parts, not by `custom_op`: its handling of lists takes longer than all launches.
torch.library.define(
    "tlora_fx::multi_lora_forward",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, {SCHEMA}, int room) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "tlora_fx::multi_lora_input_gradient",
    f"(Tensor[] dys, Tensor[] weights, {SCHEMA}, Tensor[] s, Tensor[] bits, bool need_dx, "
    "int room) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "tlora_fx::multi_lora_adapter_gradients",
    f"(Tensor[] dys, Tensor x, Tensor[] weights, {SCHEMA}, Tensor[] s, Tensor[] bits, "
    "Tensor[] ds, Tensor[] db_parts) -> Tensor[]",
    tags=_TAGS,
)
_library = torch.library.Library("tlora_fx", "IMPL")  # type: ignore[no-untyped-call]


def multi_lora_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    """Apply n frozen linears and the adapters of all jobs.

    x         [..., in + room]
    returns   n y [..., out]; n S [tokens, width] in x's dtype; n bits [tokens, in / 8] uint8
    raises    as `multi_lora_linear`
    """
    *tables, room = rest
    group, own = SiteGroup(weights, *tables), rooms.narrow(x, room)
    group.check(own, biases)
    served = support.served(own, group)
    if served is None:
        return [*loop.forward(own, biases, group), *_nothing(x, 2 * len(weights))]
    return dispatch.forward(x, biases, group, served, room)


torch.library.impl("tlora_fx::multi_lora_forward", _DEVICES, multi_lora_forward)


@torch.library.register_fake("tlora_fx::multi_lora_forward")  # type: ignore[untyped-decorator]
def _forward_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    *tables, room = rest
    group, own = SiteGroup(weights, *tables), rooms.narrow(x, room)
    group.check(own, biases)
    made = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    served = support.served(own, group)
    if served is None:
        return [*made, *_nothing(x, 2 * len(weights))]
    return [*made, *served.low_rank_rows(x), *served.bits(x)]


def multi_lora_input_gradient(dys: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    """The gradient of x, by one pass over each dy.

    dys       n [..., out + room]
    s, bits   as the forward gave them
    returns   dx [..., in], or [0] unless need_dx; n dS [tokens, width]; n parts of dB, which only
              `multi_lora_adapter_gradients` reads
    raises    as `multi_lora_linear`
    """
    *tables, s, bits, need_dx, room = rest
    group = SiteGroup(weights, *tables)
    if served_by_kernels(s):
        return dispatch.input_gradient(dys, group, s, bits, need_dx, room)
    dx, ds = loop.input_gradient([rooms.narrow(dy, room) for dy in dys], group, need_dx)
    return [dx, *ds, *_nothing(dx, len(dys))]


torch.library.impl("tlora_fx::multi_lora_input_gradient", _DEVICES, multi_lora_input_gradient)


@torch.library.register_fake("tlora_fx::multi_lora_input_gradient")  # type: ignore[untyped-decorator]
def _input_gradient_fake(dys: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    *tables, s, _, need_dx, _ = rest
    group = SiteGroup(weights, *tables)
    first = dys[0]
    dx = first.new_empty(*first.shape[:-1], group.inner) if need_dx else first.new_empty(0)
    if served_by_kernels(s):
        made = support.Served.of(first, group)
        return [dx, *(torch.empty_like(one) for one in s), *made.gradient_parts(first)]
    tokens = tokens_of(first)
    ds = [
        first.new_empty(tokens, group.capacity(site), dtype=group.compute_dtype)
        for site in range(len(dys))
    ]
    return [dx, *ds, *_nothing(dx, len(dys))]


def multi_lora_adapter_gradients(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], *rest: Any
) -> list[Tensor]:
    """The gradients of all adapters.

    ds, db_parts   as `multi_lora_input_gradient` gave them
    returns        n da like a, n db like b; rows of jobs without tokens are zero
    raises         as `multi_lora_linear`
    """
    *tables, s, bits, ds, db_parts = rest
    group = SiteGroup(weights, *tables)
    if served_by_kernels(s):
        return dispatch.adapter_gradients(x, group, bits, ds, db_parts)
    return loop.adapter_gradients(dys, x, group, ds)


torch.library.impl("tlora_fx::multi_lora_adapter_gradients", _DEVICES, multi_lora_adapter_gradients)


@torch.library.register_fake("tlora_fx::multi_lora_adapter_gradients")  # type: ignore[untyped-decorator]
def _adapter_gradients_fake(
    dys: list[Tensor], x: Tensor, weights: list[Tensor], *rest: Any
) -> list[Tensor]:
    group = SiteGroup(weights, *rest[:-4])
    return [leaf.new_empty(leaf.shape) for leaf in (*group.a, *group.b)]


def _nothing(like: Tensor, count: int) -> list[Tensor]:
    return [like.new_empty(0) for _ in range(count)]


def served_by_kernels(s: list[Tensor]) -> bool:
    """Whether kernels made these: by the shape, for a row may have no tokens."""
    return s[0].dim() == 2


class _Differentiable(torch.autograd.Function):
    """What autograd knows: gradients of x, and of each site's a and b.

    Tensors that have no gradient come in a tuple, beside what autograd looks at.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], x: Tensor, *learning: Tensor) -> Any:
        keyset, weights, biases, shared, frozen = call
        count, room = len(weights), rooms.behind_x(x, SiteGroup(weights, *shared))
        x = rooms.widen(x, room)
        made = _redispatch(keyset, x, weights, biases, *shared, room)
        ctx.mark_non_differentiable(*made[count:])
        ctx.set_materialize_grads(False)
        *tables, segments, keys, token_index, sites, _, _, _ = shared
        lists = (weights, *tables, sites)
        ctx.save_for_backward(
            x, segments, keys, token_index, *(one for part in lists for one in part),
            *made[count:],
        )  # fmt: skip
        ctx.settings, ctx.count, ctx.room, ctx.frozen = shared[-3:], count, room, frozen
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.frozen:
            raise FrozenGradientError(
                "multi_lora_linear gives no gradient for its weight and bias",
                help="freeze them, or leave this layer to run as it is on its job's segment",
            )
        count, needs = ctx.count, ctx.needs_input_grad
        x, segments, keys, token_index, *flat = ctx.saved_tensors
        parts = [flat[start : start + count] for start in range(0, len(flat), count)]
        weights, *tables, sites, s, bits = parts
        shared = (*tables, segments, keys, token_index, sites, *ctx.settings)
        x = rooms.narrow(x, ctx.room)
        dys = [
            x.new_zeros(*x.shape[:-1], weight.shape[0]) if dy is None else dy
            for dy, weight in zip(grads[:count], weights, strict=True)
        ]
        room = rooms.behind_dy(dys[0], SiteGroup(weights, *shared)) if needs[1] else 0
        wide = [rooms.widen(dy, room) for dy in dys]
        direct = _is_plain(x, *dys)
        input_gradient = multi_lora_input_gradient if direct else _input_gradient
        dx, *rest = input_gradient(wide, weights, *shared, s, bits, needs[1], room)
        leaves: list[Tensor | None] = [None] * (2 * count)
        if any(needs[2:]):
            # Views of what is there: dy itself would be written once more.
            dys = [rooms.narrow(one, room) for one in wide]
            gradients = multi_lora_adapter_gradients if direct else _adapter_gradients
            leaves = [*gradients(dys, x, weights, *shared, s, bits, rest[:count], rest[count:])]
        return (None, dx if needs[1] else None, *leaves)


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
        and all(type(one) in _PLAIN for one in tensors)
    )


def _redispatch(keyset: Any, *arguments: Any) -> list[Tensor]:
    """The forward below autograd."""
    below = keyset & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        if below.raw_repr() in _BACKENDS:
            return multi_lora_forward(*arguments)
        made: list[Tensor] = ops.multi_lora_forward.default.redispatch(below, *arguments)
    return made


def forward_of(keyset: Any, *arguments: Any) -> list[Tensor]:
    """`multi_lora_forward` of the operators that are made of it, with their dispatch keys."""
    below = keyset & torch._C._after_autograd_keyset
    if below.raw_repr() in _BACKENDS and not torch._C._autograd._profiler_enabled():
        return _autograd(keyset, *arguments, 0)
    made: list[Tensor] = ops.multi_lora_forward.default(*arguments, 0)
    return made


def _autograd(
    keyset: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any
) -> list[Tensor]:
    *shared, room = rest
    frozen, learning = not _need_gradients(*weights, *biases), [*shared[0], *shared[1]]
    if not torch.is_grad_enabled() or (frozen and not _need_gradients(x, *learning)):
        if not room:
            room = rooms.behind_x(x, SiteGroup(weights, *shared))
            x = rooms.widen(x, room)
        return _redispatch(keyset, x, weights, biases, *shared, room)
    call = (keyset, weights, biases, shared, frozen)
    if not frozen:
        learning += [one for one in (*weights, *biases) if one is not None]
    made = _Differentiable.apply(call, rooms.narrow(x, room), *learning)  # type: ignore[no-untyped-call]
    return list(made)


def _need_gradients(*tensors: Tensor | None) -> bool:
    return any(one.requires_grad for one in tensors if one is not None)


_library.impl(  # type: ignore[no-untyped-call]
    "multi_lora_forward", _autograd, "Autograd", with_keyset=True
)
