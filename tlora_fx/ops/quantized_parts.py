"""What is stored of a matrix in each form: functions that `stored_as` knows by their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tlora_fx.ops.quantized_forms import FORMS, demand_package


def quantised(form: str, part: int, weight: Tensor) -> Tensor:
    """One part of a matrix [out, in] in a form; on the meta device without the library.

    raises    MissingPackageError
    """
    if weight.is_meta:
        shape, dtype = FORMS[form].layout(*weight.shape)[part]
        return torch.empty(shape, dtype=dtype, device="meta")
    demand_package(form)
    with torch.no_grad():
        return FORMS[form].quantise(weight.contiguous())[part]


def stored_parts(form: str, turned: bool = False) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Name of each part of a form, and the function that makes it of a matrix (see stored.py).

    turned   of a matrix [in, out]
    """
    functions = _FUNCTIONS[form, turned]
    return list(zip(FORMS[form].parts, functions, strict=True))


def nf4_codes(weight: Tensor) -> Tensor:
    """Two 4-bit codes a byte, of a matrix [out, in]."""
    return quantised("nf4", 0, weight)


def nf4_scales(weight: Tensor) -> Tensor:
    """The largest number of each block, of a matrix [out, in]."""
    return quantised("nf4", 1, weight)


def int8_values(weight: Tensor) -> Tensor:
    """int8 [out, in]."""
    return quantised("int8", 0, weight)


def int8_scales(weight: Tensor) -> Tensor:
    """float32 [out, 1]."""
    return quantised("int8", 1, weight)


def float8_values(weight: Tensor) -> Tensor:
    """float8_e4m3fn [out, in]."""
    return quantised("float8", 0, weight)


def float8_scales(weight: Tensor) -> Tensor:
    """float32 [out, 1]."""
    return quantised("float8", 1, weight)


def nf4_codes_turned(weight: Tensor) -> Tensor:
    """`nf4_codes` of a matrix [in, out]."""
    return nf4_codes(weight.t())


def nf4_scales_turned(weight: Tensor) -> Tensor:
    """`nf4_scales` of a matrix [in, out]."""
    return nf4_scales(weight.t())


def int8_values_turned(weight: Tensor) -> Tensor:
    """`int8_values` of a matrix [in, out]."""
    return int8_values(weight.t())


def int8_scales_turned(weight: Tensor) -> Tensor:
    """`int8_scales` of a matrix [in, out]."""
    return int8_scales(weight.t())


def float8_values_turned(weight: Tensor) -> Tensor:
    """`float8_values` of a matrix [in, out]."""
    return float8_values(weight.t())


def float8_scales_turned(weight: Tensor) -> Tensor:
    """`float8_scales` of a matrix [in, out]."""
    return float8_scales(weight.t())


_FUNCTIONS = {
    ("nf4", False): (nf4_codes, nf4_scales),
    ("int8", False): (int8_values, int8_scales),
    ("float8", False): (float8_values, float8_scales),
    ("nf4", True): (nf4_codes_turned, nf4_scales_turned),
    ("int8", True): (int8_values_turned, int8_scales_turned),
    ("float8", True): (float8_values_turned, float8_scales_turned),
}
