"""Frozen matrices in 4 and 8 bits, as the libraries define, store and multiply them.

    nf4      bitsandbytes: 4-bit NormalFloat, a float32 scale for each 64 numbers of a row
    int8     torchao, weight-only: a float32 scale for each row
    float8   torchao, weight-only, e4m3: a float32 scale for each row

A library is imported when a matrix is quantised or multiplied with, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.errors import MissingPackageError, QuantizedLinearError

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


def demand_package(form: str) -> None:
    """Refuse a form whose library is not installed; raises MissingPackageError."""
    package = FORMS[form].package
    if find_spec(package) is None:
        raise MissingPackageError(
            f"a base in {form} needs the package {package}",
            help="pip install 'tlora-fx[quant]'",
        )


def misfit(form: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Why a matrix [out, in] of this dtype has no such form, "" where it has."""
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
    found = [(tuple(part.shape), part.dtype) for part in stored]
    if found != expected or x.shape[-1] != shape[1]:
        raise QuantizedLinearError(
            f"these are no x and parts of a matrix {list(shape)} in {form}",
            expected=f"x [..., {shape[1]}], {_told(expected)}",
            found=f"x {list(x.shape)}, {_told(found)}",
        )
    if bias is not None and (list(bias.shape) != list(shape[:1]) or bias.dtype != x.dtype):
        raise QuantizedLinearError(
            "bias must fit its layer",
            expected=f"{x.dtype}{list(shape[:1])}",
            found=f"{bias.dtype}{list(bias.shape)}",
        )


def _told(parts: Sequence[tuple[Any, torch.dtype]]) -> str:
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

    made: Tensor = matmul_4bit(x, stored[0].t(), _nf4_state(stored, shape, x.dtype), bias=bias)
    return made


def _nf4_dequantise(stored: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    made: Tensor = dequantize_4bit(stored[0], _nf4_state(stored, shape, dtype))
    return made


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
        made = getattr(torchao.quantization, config)(set_inductor_config=False)
        torchao.quantization.quantize_(holder, made)
        found: Any = holder.weight
        return found.qdata, found.scale

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
    made: Tensor = _torchao_weight(stored, shape, dtype).dequantize()
    return made


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
