"""`tlora_fx::quantized_linear`: a frozen linear whose matrix is stored in 4 or 8 bits.

The library that defines the form multiplies (see quantized_forms.py). Adapters are added by
`multi_lora_add`, so that the library's product is one plan among others' and stays theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import FrozenGradientError
from tlora_fx.ops.quantized_forms import FORMS, check_stored, demand_package


@torch.library.custom_op(
    "tlora_fx::quantized_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] stored, Tensor? bias, str form, int[] shape) -> Tensor",
)
def quantized_linear(
    x: Tensor, stored: list[Tensor], bias: Tensor | None, form: str, shape: list[int]
) -> Tensor:
    """Apply a frozen linear.

    x         [..., in], float32, bfloat16 or float16
    stored    the parts of the matrix, on x's device, as its form has them
    bias      [out] in x's dtype, or None
    form      "nf4", "int8" or "float8"
    shape     [out, in]
    returns   [..., out] in x's dtype
    raises    QuantizedLinearError; MissingPackageError without the form's library
    """
    check_stored(x, stored, bias, form, shape)
    demand_package(form)
    rows = x.reshape(-1, shape[1])
    # The libraries differ in what they make of no rows at all.
    y = FORMS[form].linear(rows, stored, bias, shape) if len(rows) else x.new_empty(0, shape[0])
    return y.view(*x.shape[:-1], shape[0])


@quantized_linear.register_fake
def _fake(
    x: Tensor, stored: list[Tensor], bias: Tensor | None, form: str, shape: list[int]
) -> Tensor:
    check_stored(x, stored, bias, form, shape)
    return x.new_empty(*x.shape[:-1], shape[0])


@torch.library.custom_op(
    "tlora_fx::quantized_linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor[] stored, str form, int[] shape) -> Tensor",
)
def quantized_linear_backward(
    dy: Tensor, stored: list[Tensor], form: str, shape: list[int]
) -> Tensor:
    """The gradient of x [..., in], through the matrix as the library restores it in dy's dtype.

    dy       [..., out]
    raises   as `quantized_linear`
    """
    demand_package(form)
    weight = FORMS[form].dequantise(stored, shape, dy.dtype)
    return (dy.reshape(-1, shape[0]) @ weight).view(*dy.shape[:-1], shape[1])


@quantized_linear_backward.register_fake
def _backward_fake(dy: Tensor, stored: list[Tensor], form: str, shape: list[int]) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, stored, bias, ctx.form, ctx.shape = inputs
    ctx.save_for_backward(*stored)
    ctx.trains_bias = bias is not None and bias.requires_grad


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.trains_bias:
        raise FrozenGradientError(
            "quantized_linear gives no gradient for its bias",
            help="freeze it, or leave this layer as it is",
        )
    stored = list(ctx.saved_tensors)
    op = torch.ops.tlora_fx.quantized_linear_backward
    dx = op(grad, stored, ctx.form, ctx.shape) if ctx.needs_input_grad[0] else None
    return dx, [None] * len(stored), None, None, None


quantized_linear.register_autograd(_backward, setup_context=_setup)
