"""What DoRA's kernels compile to."""

from __future__ import annotations

import os
import sys

import pytest

from tlora_fx.codegen.compiled_check import MOST_REGISTERS, needs_of
from tlora_fx.codegen.spec import SHARED_BYTES

PRODUCTS = {
    "RANK": 16, "WIDTH": 4096, "INNER": 4096, "ROWS": 64, "COLUMNS": 128, "BLOCK": 16, "STEP": 32,
}  # fmt: skip
SIZES = {
    "scale": {"WIDTH": 4096, "BIASED": True, "CHUNK": 64, "COLUMNS": 128},
    "gradient": {"WIDTH": 4096, "BIASED": True, "CHUNK": 128, "ROWS": 32, "COLUMNS": 128},
    "sum": {"WIDTH": 4096, "CHUNK": 128, "COLUMNS": 128},
    "products": PRODUCTS | {"column_step": 1},
    "products_float32": PRODUCTS | {"column_step": 1},
    "products_columns": PRODUCTS | {"row_step": 1},
    "norms": {"RANK": 64, "WIDTH": 4096, "SHARES": 16, "BLOCK": 16, "COLUMNS": 64},
}
BFLOAT16, INT32 = (
    ("y", "bias", "dy", "dx", "out", "weight"),
    ("segments", "slots", "ranks", "indices"),
)
FLOAT32 = (
    "magnitudes", "norms", "parts", "sums", "products", "grams", "lengths", "scales", "a", "b",
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is built for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("gradient", "products") else pytest.mark.slow)
        for kind in SIZES
    ],
)
def test_a_kernel_fits_hopper(kind):
    """Registers, no spills, shared memory; rows of 16 bits are read 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora_fx.ops.kernels import dora

    kernel, values = getattr(dora, "_" + kind.partition("_")[0]), SIZES[kind]
    names = [parameter.name for parameter in kernel.params]
    types = dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(INT32, "*i32")
    types |= dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(values, "constexpr")
    types |= {"weight": "*fp32"} if kind == "products_float32" else {}
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*")
        or (signature[name] == "i32" and name.endswith(("_step", "extent")))
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in values.items()}, aligned
    )
    found = needs_of(triton.compile(source, target=GPUTarget("cuda", 90, 32)), 90)

    assert found.registers <= MOST_REGISTERS
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert kind == "sum" or found.wide_loads > 0
    assert not kind.startswith("products") or found.tensor_core > 0
