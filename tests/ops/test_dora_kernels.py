"""What DoRA's kernels compile to."""

from __future__ import annotations

import os
import sys

import pytest

from scripts.check_kernels import MAX_REGISTERS, needs_of
from tlora_fx.codegen.spec import SHARED_BYTES

PRODUCTS = {
    "RANK": 16, "WIDTH": 4096, "INNER": 4096, "KEPT": False, "ROWS": 64, "BLOCK": 16,
    "GRAM_STEP": 32, "JOBS": 8,
}  # fmt: skip
SIZES = {
    "scale": {"WIDTH": 4096, "BIASED": True, "CHUNK": 64, "COLUMNS": 128, "JOBS": 8},
    "gradient": {"WIDTH": 4096, "BIASED": True, "CHUNK": 64, "ROWS": 32, "COLUMNS": 128, "JOBS": 8},
    "sum": {"WIDTH": 4096, "CHUNK": 64, "COLUMNS": 128},
    "products": PRODUCTS | {"column_step": 1},
    "products_float32": PRODUCTS | {"column_step": 1},
    "products_columns": PRODUCTS | {"row_step": 1},
    "lengths": {"WIDTH": 4096, "INNER": 4096, "COLUMNS": 128, "STEP": 32, "column_step": 1},
    "split": {"INNER": 4096, "PARTS": 2, "ROWS": 16, "COLUMNS": 128, "JOBS": 8},
    "norms": {
        "RANK": 64, "WIDTH": 4096, "SHARES": 16, "LENGTHS": 16, "BLOCK": 16, "COLUMNS": 64,
        "JOBS": 8,
    },
}  # fmt: skip
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

    kernel, values = getattr(dora, "_" + kind.partition("_")[0]), dict(SIZES[kind])
    options = {}
    if kind.startswith("products"):
        form = dora._forms[kind != "products_float32"]
        values |= {"COLUMNS": form.columns, "STEP": form.step, "PARTS": form.parts}
        options = {"num_warps": form.warps, "num_stages": form.stages}
    names = [parameter.name for parameter in kernel.params]
    types = dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(INT32, "*i32")
    types |= dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(values, "constexpr")
    types |= {"parts": "*bf16"} if kind in ("split", "products", "products_columns") else {}
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
    found = needs_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), 90)

    assert found.registers <= MAX_REGISTERS
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert kind == "sum" or found.wide_loads > 0
    assert not kind.startswith("products") or found.tensor_core > 0
