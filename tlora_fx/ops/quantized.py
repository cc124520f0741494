"""`tlora_fx::quantized_linear`: a frozen linear whose matrix is stored in 4 or 8 bits.

    nf4      bitsandbytes: 4-bit NormalFloat, a float32 scale for each 64 numbers of a row
    int8     torchao, weight-only: a float32 scale for each row
    float8   torchao, weight-only, e4m3: a float32 scale for each row

The library that defines a form quantises and multiplies; it is imported when it is needed, not
before. Adapters are added by `multi_lora_add`, so that the library's product is one plan among
others' and stays theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.errors import FrozenGradientError, MissingPackageError, QuantizedLinearError

# What both libraries quantise and multiply with.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 64  # numbers to a scale in nf4
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """One form.

    package      that brings it
    block        of how many numbers in_features must be a multiple
    parts        what is stored of a matrix
    layout       [out, in] to shape and dtype of each part
    quantise     float [out, in] to the parts
    linear       x [..., in], parts, bias [out] or None, [out, in] to x Wᵀ + bias in x's dtype
    dequantise   parts, [out, in], dtype to [out, in]
    """

    package: str
    block: int
    parts: tuple[str, ...]
    layout: Callable[[int, int], Layout]
    quantise: Callable[[Tensor], tuple[Tensor, ...]]
    linear: Callable[[Tensor, Sequence[Tensor], Tensor | None, Sequence[int]], Tensor]
    dequantise: Callable[[Sequence[Tensor], Sequence[int], torch.dtype], Tensor]


def require_package(form: str) -> None:
    """Refuse a form whose library is not installed; raises MissingPackageError."""
    package = FORMS[form].package
    if find_spec(package) is None:
        raise MissingPackageError(
            f"a base in {form} needs the package {package}",
            help="pip install 'tlora-fx[quant]'",
        )


def misfit(form: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Reason why a matrix [out, in] of this dtype has no such form, "" where it has."""
    if dtype not in DTYPES:
        return f"{form} has no matrices of {dtype}"
    block = FORMS[form].block
    if shape[1] % block:
        # bitsandbytes' kernel for the CPU reads wrong scales there, and says nothing.
        return f"in {form} in_features must be a multiple of {block}, and is {shape[1]}"
    return ""


def check_stored(
    x: Tensor, stored: Sequence[Tensor], bias: Tensor | None, form: str, shape: Sequence[int]
) -> None:
    """Refuse tensors that are not x and a matrix [out, in] in this form.

    raises    QuantizedLinearError
    """
    if form not in FORMS or len(shape) != 2:
        raise QuantizedLinearError(
            "no such form of a matrix",
            expected=f"one of {', '.join(FORMS)}, and [out, in]",
            found=f"{form}, {list(shape)}",
        )
    reason = misfit(form, shape, x.dtype)
    if reason:
        raise QuantizedLinearError("a matrix cannot be multiplied in this form", found=reason)
    expected = [(tuple(size), kind) for size, kind in FORMS[form].layout(*shape)]
    actual = [(tuple(part.shape), part.dtype) for part in stored]
    if actual != expected or x.shape[-1] != shape[1]:
        raise QuantizedLinearError(
            f"these are no x and parts of a matrix {list(shape)} in {form}",
            expected=f"x [..., {shape[1]}], {_described(expected)}",
            found=f"x {list(x.shape)}, {_described(actual)}",
        )
    if bias is not None and (list(bias.shape) != list(shape[:1]) or bias.dtype != x.dtype):
        raise QuantizedLinearError(
            "bias must fit its layer",
            expected=f"{x.dtype}{list(shape[:1])}",
            found=f"{bias.dtype}{list(bias.shape)}",
        )


def _described(parts: Sequence[tuple[Any, torch.dtype]]) -> str:
    return ", ".join(f"{kind}{list(size)}" for size, kind in parts)


def _nf4_layout(outer: int, inner: int) -> Layout:
    return ((outer * inner // 2, 1), torch.uint8), ((outer * inner // BLOCK,), torch.float32)


def _nf4_quantise(weight: Tensor) -> tuple[Tensor, ...]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def _nf4_state(stored: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState

    # Without `code`, a table that the kernels bring along: making it would wait for the device.
    return QuantState(
        stored[1], shape=torch.Size(shape), blocksize=BLOCK, quant_type="nf4", dtype=dtype
    )


def _nf4_linear(
    x: Tensor, stored: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    from bitsandbytes import matmul_4bit

    y: Tensor = matmul_4bit(x, stored[0].t(), _nf4_state(stored, shape, x.dtype), bias=bias)
    return y


def _nf4_dequantise(stored: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(stored[0], _nf4_state(stored, shape, dtype))
    return weight


def _rows_layout(kind: torch.dtype) -> Callable[[int, int], Layout]:
    def layout(outer: int, inner: int) -> Layout:
        return ((outer, inner), kind), ((outer, 1), torch.float32)

    return layout


def _torchao_quantise(config: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def quantise(weight: Tensor) -> tuple[Tensor, ...]:
        import torchao.quantization

        holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        # Inductor's settings belong to whoever compiles.
        settings = getattr(torchao.quantization, config)(set_inductor_config=False)
        torchao.quantization.quantize_(holder, settings)
        quantised: Any = holder.weight
        return quantised.qdata, quantised.scale

    return quantise


def _torchao_weight(stored: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The library's tensor around what is stored."""
    from torchao.quantization import Float8Tensor, Int8Tensor

    values, scales = stored
    kind = Int8Tensor if values.dtype == torch.int8 else Float8Tensor
    return kind(values, scales, block_size=[1, shape[1]], dtype=dtype)


def _torchao_linear(
    x: Tensor, stored: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    return nn.functional.linear(x, _torchao_weight(stored, shape, x.dtype), bias)


def _torchao_dequantise(
    stored: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    weight: Tensor = _torchao_weight(stored, shape, dtype).dequantize()
    return weight


FORMS = {
    "nf4": QuantizedForm(
        "bitsandbytes", BLOCK, ("codes", "scales"),
        _nf4_layout, _nf4_quantise, _nf4_linear, _nf4_dequantise,
    ),
    "int8": QuantizedForm(
        "torchao", 1, ("values", "scales"), _rows_layout(torch.int8),
        _torchao_quantise("Int8WeightOnlyConfig"), _torchao_linear, _torchao_dequantise,
    ),
    "float8": QuantizedForm(
        "torchao", 1, ("values", "scales"), _rows_layout(torch.float8_e4m3fn),
        _torchao_quantise("Float8WeightOnlyConfig"), _torchao_linear, _torchao_dequantise,
    ),
}  # fmt: skip


def quantised(form: str, part: int, weight: Tensor) -> Tensor:
    """One part of a matrix [out, in] in a form; on the meta device without the library.

    raises    MissingPackageError
    """
    if weight.is_meta:
        shape, dtype = FORMS[form].layout(*weight.shape)[part]
        return torch.empty(shape, dtype=dtype, device="meta")
    require_package(form)
    with torch.no_grad():
        return FORMS[form].quantise(weight.contiguous())[part]


Part = Callable[[Tensor], Tensor]
_PARTS: dict[tuple[str, bool], list[tuple[str, Part]]] = {}


def stored_parts(form: str, turned: bool = False) -> list[tuple[str, Part]]:
    """Name of each part of a form, and the function that makes it of a matrix (see stored.py).

    turned   of a matrix [in, out]
    """
    return list(_PARTS[form, turned])


def _part(name: str) -> Part:
    """The function of a name such as `nf4_codes`, or `nf4_codes_turned` for a matrix [in, out].

    Graphs know these functions by their names, so each is a function of this module.
    """
    form, part, *rest = name.split("_")
    index = FORMS[form].parts.index(part)

    def make(weight: Tensor) -> Tensor:
        return quantised(form, index, weight.t() if rest else weight)

    make.__name__ = make.__qualname__ = name
    _PARTS.setdefault((form, bool(rest)), []).append((part, make))
    return make


nf4_codes, nf4_codes_turned = _part("nf4_codes"), _part("nf4_codes_turned")
nf4_scales, nf4_scales_turned = _part("nf4_scales"), _part("nf4_scales_turned")
int8_values, int8_values_turned = _part("int8_values"), _part("int8_values_turned")
int8_scales, int8_scales_turned = _part("int8_scales"), _part("int8_scales_turned")
float8_values, float8_values_turned = _part("float8_values"), _part("float8_values_turned")
float8_scales, float8_scales_turned = _part("float8_scales"), _part("float8_scales_turned")


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
    require_package(form)
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
    require_package(form)
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
