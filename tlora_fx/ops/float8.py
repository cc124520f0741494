"""`tlora_fx::float8_linear`: a frozen linear that is multiplied in float8, both ways.

    codes, scale = tlora_fx::float8_rows(x)             once for all linears that read x
    y = tlora_fx::float8_linear(x, codes, scale, [codes, scales], bias, "turn")

The matrix is rounded once, with a scale for each row. A token is rounded where it is computed, with
a scale of its own, so no token touches another one's numbers. In the
backward a row of dy is multiplied with the matrix's scales and then rounded: the codes are those of
the forward, so the gradient is that of what the forward computed. What rounds tokens is plain
PyTorch, which a compiler puts into the kernel that makes x or dy; torchao has the same under names
that are not public. The products are `torch._scaled_mm`'s.

That product takes its second operand by columns. The forward has it so; dX needs the matrix turned:

    copy      the codes stand turned beside the others, one byte a number more
    turn      they are turned for each product
    restore   the matrix is restored, and multiplied in x's dtype, with dy as it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tlora_fx.errors import FrozenGradientError, QuantizedLinearError

Part = Callable[[Tensor], Tensor]
Backward = Literal["copy", "turn", "restore"]
BACKWARDS: tuple[Backward, ...] = get_args(Backward)
CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max
SMALLEST = torch.finfo(torch.float32).tiny  # a row of zeros is divided by it
GRANULE = 16  # of both sizes, as the product wants them
OLDEST = (8, 9)  # compute capability with products in float8


def no_product(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Reason why a matrix [out, in] is not multiplied in float8, "" where it is."""
    if dtype != torch.bfloat16:
        return f"products in float8 give bfloat16, and it is of {dtype}"
    if any(size % GRANULE for size in shape):
        return f"products in float8 need sizes that are multiples of {GRANULE}"
    return ""


def float8_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round each row by its largest number.

    x         float [..., n]
    factors   float32 [n], by which columns are multiplied first, or None
    returns   codes float8_e4m3fn [..., n] and scale float32 [..., 1]: their product is the row;
              neither has a gradient. A row with a NaN or an infinity gets NaN.
    """
    wide = x.detach().float()
    if factors is not None:
        wide = wide * factors
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST * LARGEST) / LARGEST
    return (wide / scale).to(CODES), scale


# No kernel of its own: whoever compiles sees what it is made of.
torch.library.define(
    "tlora_fx::float8_rows", "(Tensor x, Tensor? factors=None) -> (Tensor, Tensor)"
)
torch.library.impl("tlora_fx::float8_rows", "CompositeImplicitAutograd", float8_rows)


def row_codes(weight: Tensor) -> Tensor:
    """The codes of a matrix [out, in]."""
    return float8_rows(weight)[0].contiguous()


def row_scales(weight: Tensor) -> Tensor:
    """Scales [out, 1], float32, of a matrix [out, in]."""
    return float8_rows(weight)[1].contiguous()


def column_codes(weight: Tensor) -> Tensor:
    """Codes [in, out] of a matrix [out, in]."""
    return float8_rows(weight)[0].t().contiguous()


def row_codes_turned(weight: Tensor) -> Tensor:
    """The codes [out, in] of a matrix [in, out]."""
    return row_codes(weight.t())


def row_scales_turned(weight: Tensor) -> Tensor:
    """Scales [out, 1] of a matrix [in, out]."""
    return row_scales(weight.t())


def column_codes_turned(weight: Tensor) -> Tensor:
    """Codes [in, out] of a matrix [in, out]."""
    return column_codes(weight.t())


_PARTS: tuple[tuple[str, Part, Part], ...] = (
    ("codes", row_codes, row_codes_turned),
    ("scales", row_scales, row_scales_turned),
    ("columns", column_codes, column_codes_turned),
)


def product_parts(backward: Backward, turned: bool = False) -> list[tuple[str, Part]]:
    """Name and function of each tensor that `float8_linear` takes as `stored`.

    turned   of a matrix [in, out]
    """
    parts = _PARTS if backward == "copy" else _PARTS[:2]
    return [(name, other if turned else plain) for name, plain, other in parts]


def check_product(
    x: Tensor, codes: Tensor, scale: Tensor, stored: Sequence[Tensor], bias: Tensor | None
) -> None:
    """Refuse what is no x, its rows in float8 and a matrix; raises QuantizedLinearError."""
    require_products(x.device)
    outer, inner = stored[0].shape
    reason = no_product((outer, inner), x.dtype)
    expected = [(x.shape, CODES), ((*x.shape[:-1], 1), torch.float32)]
    expected += [((outer, inner), CODES), ((outer, 1), torch.float32), ((inner, outer), CODES)]
    actual = [(tensor.shape, tensor.dtype) for tensor in (codes, scale, *stored)]
    fits = x.shape[-1] == inner and len(stored) in (2, 3)
    fits = fits and all(
        tuple(a) == tuple(b) and kind == other
        for (a, kind), (b, other) in zip(actual, expected, strict=False)
    )
    if bias is not None:
        fits = fits and list(bias.shape) == [outer] and bias.dtype == x.dtype
    if reason or not fits:
        raise QuantizedLinearError(
            "these cannot be multiplied in float8",
            expected=f"x [..., {inner}], its codes and scale, and parts of [{outer}, {inner}]",
            found=reason or ", ".join(f"{kind}{list(size)}" for size, kind in actual),
        )


def require_products(device: torch.device) -> None:
    """Refuse a device without products in float8; raises QuantizedLinearError."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        raise QuantizedLinearError(
            "this GPU does not multiply in float8",
            expected=f"compute capability {OLDEST[0]}.{OLDEST[1]} or newer",
            found=f"{found[0]}.{found[1]}",
            help="leave products=true out: quantize-base{to=float8} restores the matrix",
        )


def _multiply(
    codes: Tensor, scale: Tensor, right: Tensor, right_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """codes [..., k] and right [n, k], with a scale a row each, to [..., n] in bfloat16."""
    rows, inner = codes.reshape(-1, codes.shape[-1]), right.shape[0]
    y = torch._scaled_mm(
        rows, right.t(), scale.reshape(-1, 1), right_scale.view(1, inner), bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return y.view(*codes.shape[:-1], inner)


@torch.library.custom_op(
    "tlora_fx::float8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scale, Tensor[] stored, Tensor? bias, str backward) "
    "-> Tensor",
)
def float8_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    stored: list[Tensor],
    bias: Tensor | None,
    backward: str,
) -> Tensor:
    """Apply a frozen linear in float8.

    x              [..., in], bfloat16; only its gradient is made of it
    codes, scale   `float8_rows` of x
    stored         codes [out, in], scales [out, 1], for "copy" columns [in, out]; frozen
    bias           [out], bfloat16, or None
    backward       "copy", "turn" or "restore"; see above
    returns        [..., out], bfloat16
    raises         QuantizedLinearError
    """
    check_product(x, codes, scale, stored, bias)
    return _multiply(codes, scale, stored[0], stored[1], bias)


@float8_linear.register_fake
def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    stored: list[Tensor],
    bias: Tensor | None,
    backward: str,
) -> Tensor:
    check_product(x, codes, scale, stored, bias)
    return x.new_empty(*x.shape[:-1], stored[0].shape[0])


@torch.library.custom_op(
    "tlora_fx::float8_input_gradient",
    mutates_args=(),
    schema="(Tensor codes, Tensor scale, Tensor columns) -> Tensor",
)
def float8_input_gradient(codes: Tensor, scale: Tensor, columns: Tensor) -> Tensor:
    """The gradient of x [..., in], bfloat16, of dy in float8.

    codes, scale   `float8_rows` of dy [..., out] with the matrix's scales as factors
    columns        the matrix's codes turned, [in, out]
    """
    ones = scale.new_ones(columns.shape[0])
    return _multiply(codes, scale, columns, ones, None)


@float8_input_gradient.register_fake
def _gradient_fake(codes: Tensor, scale: Tensor, columns: Tensor) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], columns.shape[0], dtype=torch.bfloat16)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, stored, bias, ctx.backward = inputs
    ctx.save_for_backward(*stored)
    ctx.trains_bias = bias is not None and bias.requires_grad


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.trains_bias:
        raise FrozenGradientError(
            "float8_linear gives no gradient for its bias",
            help="freeze it, or leave this layer as it is",
        )
    dx = _input_gradient(grad, ctx.saved_tensors, ctx.backward) if ctx.needs_input_grad[0] else None
    return dx, None, None, [None] * len(ctx.saved_tensors), None, None


def _input_gradient(dy: Tensor, stored: Sequence[Tensor], backward: str) -> Tensor:
    codes, scales, *columns = stored
    if backward == "restore":
        return dy @ (codes.float() * scales).to(dy.dtype)
    turned = columns[0] if columns else codes.t().contiguous()
    rows, scale = torch.ops.tlora_fx.float8_rows(dy, scales.view(-1))
    dx: Tensor = torch.ops.tlora_fx.float8_input_gradient(rows, scale, turned)
    return dx


float8_linear.register_autograd(_backward, setup_context=_setup)
