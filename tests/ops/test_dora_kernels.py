"""What DoRA's kernels compile to."""

from __future__ import annotations

import os
import sys

import pytest

from tlora_fx.codegen.compiled_check import MOST_REGISTERS, needs_of
from tlora_fx.codegen.spec import SHARED_BYTES

SIZES = {
    "scale": {"WIDTH": 4096, "BIASED": True, "CHUNK": 64, "COLUMNS": 128},
    "gradient": {"WIDTH": 4096, "BIASED": True, "CHUNK": 128, "ROWS": 32, "COLUMNS": 128},
    "sum": {"WIDTH": 4096, "CHUNK": 128, "COLUMNS": 128},
    "gather": {"RANK": 64, "WIDTH": 4096, "SPLIT": True, "COLUMNS": 1024},
    "norms": {"RANK": 64, "WIDTH": 4096, "PARTS": 3, "BLOCK": 16, "COLUMNS": 128},
}
#: A parameter's type, where it is not the same in all of them.
TABLES = ("segments", "slots", "ranks", "indices")
SINGLE = ("factors", "sums", "rows", "products", "gram", "own", "scales", "a", "b")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is built for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SIZES if kind != "gradient"),
        "gradient",
    ],
)
def test_a_kernel_fits_hopper(kind):
    """Registers, no spills, shared memory; rows of 16 bits are read 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora_fx.ops.kernels import dora

    kernel, values = getattr(dora, f"_{kind}"), SIZES[kind]
    names = [parameter.name for parameter in kernel.params]
    types = dict.fromkeys(("y", "bias", "dy", "dx"), "*bf16") | dict.fromkeys(TABLES, "*i32")
    types |= dict.fromkeys(SINGLE, "*fp32") | dict.fromkeys(values, "constexpr")
    types |= {"out": "*bf16", "norms": "*fp32", "parts": "*bf16" if kind == "gather" else "*fp32"}
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("_step")
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in values.items()}, aligned
    )
    found = needs_of(triton.compile(source, target=GPUTarget("cuda", 90, 32)), 90)

    assert found.registers <= MOST_REGISTERS
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert kind == "sum" or found.wide_loads > 0
