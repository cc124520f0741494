"""`tlora_fx::multi_lora_gated_linear`: `multi_lora_linear` of activation(gate) * up.

What stands behind the gated activation of an MLP reads it twice, for its product and for its
adapters. Where a compiler traces it and a kernel serves, that kernel makes the activation, rounds
and stores it, and has its rows of S on the way (`codegen/kernels/shrink.py`). Elsewhere the
operator is the two of which it stands for.

Its parts are `multi_lora_gated_forward` and those of `multi_lora_linear`. Gradients of the gate and
of what it multiplies are plain operators of torch: a compiler writes them where the products read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import AdapterTableError
from tlora_fx.ops.kernels import dispatch, packed, support
from tlora_fx.ops.lora import (
    DispatchedCall,
    gradients,
    keep,
    loop_forward,
    need_gradients,
    nothing,
)
from tlora_fx.ops.tables import PART_SCHEMA, SITE_SCHEMA, ForwardCall, SiteGroup

#: The activations that a gate may have.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
GELU, CUBE = 1.5957691216057308, 0.044715

torch.library.define(
    "tlora_fx::multi_lora_gated_linear",
    f"(Tensor gate, Tensor up, str activation, Tensor weight, Tensor? bias, {SITE_SCHEMA}) "
    "-> Tensor",
)
torch.library.define(
    "tlora_fx::multi_lora_gated_forward",
    "(Tensor gate, Tensor up, str activation, Tensor[] weights, Tensor?[] biases, "
    f"{PART_SCHEMA}, int tail_columns) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_library = torch.library.Library("tlora_fx", "IMPL")  # type: ignore[no-untyped-call]
ops = torch.ops.tlora_fx


def multi_lora_gated_linear(
    gate: Tensor, up: Tensor, activation: str, weight: Tensor, bias: Tensor | None, *tables: Any,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """`multi_lora_linear` of x = activation(gate) * up.

    gate, up      float [..., in], of one dtype
    activation    "silu", or "gelu_tanh", torch's gelu with approximate="tanh"
    weight, bias, tables, settings   as of `multi_lora_linear`
    returns       [..., out]
    raises        as `multi_lora_linear`; AdapterTableError for another activation, and where gate
                  and up are not alike
    """
    y: Tensor = ops.multi_lora_gated_linear.default(
        gate, up, activation, weight, bias, *tables, **settings
    )
    return y


def _linear(
    keyset: Any, gate: Tensor, up: Tensor, activation: str, weight: Tensor, bias: Tensor | None,
    *tables: Any,
) -> Tensor:  # fmt: skip
    _check(gate, up, activation)
    group = SiteGroup.single([weight], *tables)
    # A traced graph has tail columns behind x where kernels serve and no strict mode is on.
    tail_columns = packed.behind_x(gate, group)
    if not tail_columns:
        x = ACTIVATIONS[activation](gate) * up
        y: Tensor = ops.multi_lora_linear.default(x, weight, bias, *tables)
        return y
    results: list[Tensor] = ops.multi_lora_gated_forward.default(
        gate, up, activation, group.weights, [bias], *group.arguments(), tail_columns
    )
    return results[0]


_library.impl(  # type: ignore[no-untyped-call]
    "multi_lora_gated_linear", _linear, "CompositeImplicitAutograd", with_keyset=True
)


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    """Refuse what metadata alone shows to be wrong; raises AdapterTableError."""
    if activation not in ACTIVATIONS:
        raise AdapterTableError(
            "no such activation of a gate", expected=", ".join(ACTIVATIONS), found=activation
        )
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise AdapterTableError(
            "a gate and what it multiplies must be alike",
            expected=f"up {list(gate.shape)} {gate.dtype}",
            found=f"up {list(up.shape)} {up.dtype}",
        )


def multi_lora_gated_forward(
    gate: Tensor, up: Tensor, activation: str, weights: list[Tensor],
    biases: list[Tensor | None], *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Make x, and apply a frozen linear and the adapters of all jobs.

    weights, biases   one of each
    returns           y [..., out]; S and the dropout bits, as `multi_lora_forward`; x
                      [..., in + tail_columns]
    raises            as `multi_lora_gated_linear`
    """
    group, tail_columns, _ = ForwardCall.of(weights, rest)
    _check(gate, up, activation)
    group.check(gate, biases)
    kernels = support.kernel_group(gate, group)
    if kernels is not None:
        return dispatch.gated_forward(
            gate, up, activation, ACTIVATIONS[activation], biases, group, kernels, tail_columns
        )
    x = gate.new_empty(*gate.shape[:-1], group.inner + tail_columns)
    inputs = packed.narrow(x, tail_columns)
    inputs.copy_(ACTIVATIONS[activation](gate) * up)
    return [*loop_forward(inputs, biases, group), *nothing(x, 2), x]


torch.library.impl("tlora_fx::multi_lora_gated_forward", ("cpu", "cuda"), multi_lora_gated_forward)


@torch.library.register_fake("tlora_fx::multi_lora_gated_forward")  # type: ignore[untyped-decorator]
def _forward_fake(
    gate: Tensor, up: Tensor, activation: str, weights: list[Tensor],
    biases: list[Tensor | None], *rest: Any,
) -> list[Tensor]:  # fmt: skip
    group, tail_columns, _ = ForwardCall.of(weights, rest)
    _check(gate, up, activation)
    group.check(gate, biases)
    y = gate.new_empty(*gate.shape[:-1], weights[0].shape[0])
    x = gate.new_empty(*gate.shape[:-1], group.inner + tail_columns)
    kernels = support.kernel_group(gate, group)
    if kernels is None:
        return [y, *nothing(x, 2), x]
    return [y, *kernels.low_rank_rows(gate), *kernels.bits(gate), x]


class _Differentiable(torch.autograd.Function):
    """Gradients of gate and up, and of the site's a and b."""

    @staticmethod
    def forward(
        ctx: Any, call: DispatchedCall, activation: str, gate: Tensor, up: Tensor,
        *learning: Tensor,
    ) -> Any:  # fmt: skip
        group, tail_columns, _ = call.forward
        y, s, bits, x = _redispatch(
            call.keyset, gate, up, activation, group.weights, call.biases, *group.arguments(),
            tail_columns,
        )  # fmt: skip
        ctx.mark_non_differentiable(s, bits, x)
        keep(ctx, x, call.forward, (s, bits), gate, up, frozen=call.frozen)
        ctx.activation = activation
        return y, s, bits, x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, need_gate, need_up, *learning = ctx.needs_input_grad
        dx, leaves, (gate, up) = gradients(
            ctx, grads, need_dx=need_gate or need_up, need_leaves=any(learning)
        )
        if dx is None:
            return (None, None, None, None, *leaves)
        dgate, dup = _gate_gradients(ctx.activation, gate, up, dx)
        return (None, None, dgate if need_gate else None, dup if need_up else None, *leaves)


def _gate_gradients(activation: str, gate: Tensor, up: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, rounded once.

    Both activations are g sigmoid(z), with z = g, or z = c (g + d g³).
    """
    wide = torch.promote_types(torch.float32, dx.dtype)
    g, d = gate.to(wide), dx.to(wide)
    if activation == "silu":
        open_ = torch.sigmoid(g)
        value = g * open_
        derived = open_ + value * (1 - open_)
    else:
        square = g * g
        open_ = torch.sigmoid(GELU * g * (1 + CUBE * square))
        value = g * open_
        derived = open_ + value * (1 - open_) * (GELU * (1 + 3 * CUBE * square))
    return (d * up.to(wide) * derived).to(dx.dtype), (d * value).to(dx.dtype)


def _redispatch(keyset: Any, *arguments: Any) -> list[Tensor]:
    """The forward below autograd."""
    below = keyset & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        results: list[Tensor] = ops.multi_lora_gated_forward.default.redispatch(below, *arguments)
    return results


def _autograd(
    keyset: Any, gate: Tensor, up: Tensor, activation: str, weights: list[Tensor],
    biases: list[Tensor | None], *rest: Any,
) -> list[Tensor]:  # fmt: skip
    forward = ForwardCall.of(weights, rest)
    frozen, learning = not need_gradients(*weights, *biases), [*forward.group.a, *forward.group.b]
    wanted = not frozen or need_gradients(gate, up, *learning)
    if not (torch.is_grad_enabled() and wanted):
        return _redispatch(keyset, gate, up, activation, weights, biases, *rest)
    call = DispatchedCall(keyset, biases, forward, frozen)
    if not frozen:
        learning += [tensor for tensor in (*weights, *biases) if tensor is not None]
    results = _Differentiable.apply(call, activation, gate, up, *learning)  # type: ignore[no-untyped-call]
    return list(results)


_library.impl(  # type: ignore[no-untyped-call]
    "multi_lora_gated_forward", _autograd, "Autograd", with_keyset=True
)
