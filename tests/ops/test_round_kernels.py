"""What the kernels at a round's ends compile to: packing of all sites, and the update."""

from __future__ import annotations

import os
import sys

import pytest

from scripts.check_kernels import needs_of

SIZES = {
    "adam._update": {"KIND": "float32", "WIDE": "float32", "PIECE": 2048},
    "pack_strips._pack_strips": {
        "SOURCE": "float32", "TARGET": "bfloat16", "WIDE": "float32", "RANK_BLOCK": 16,
        "STRIP": 512, "COLUMNS": 256, "JOBS": 64,
    },
}  # fmt: skip
POINTERS = {"table": "*i64", "given": "*fp64", "facts": "*fp64"}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is built for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_moves_16_bytes_at_a_time_and_leaves_room_for_others(name):
    """Three programs of 256 threads fit on a multiprocessor of Hopper."""
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora_fx.ops.kernels import adam, pack_strips

    module, function = name.split(".")
    kernel = getattr({"adam": adam, "pack_strips": pack_strips}[module], function)
    names = [parameter.name for parameter in kernel.params]
    values = {
        (names.index(key),): getattr(tl, value) if isinstance(value, str) else value
        for key, value in SIZES[name].items()
    }
    types = POINTERS | dict.fromkeys(SIZES[name], "constexpr")
    signature = {key: types.get(key, "i32") for key in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, key in enumerate(names)
        if signature[key].startswith("*")
    }
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    found = needs_of(compiled, 90)

    assert found.registers <= 80
    assert found.spills == 0
    assert found.count(r"LDG\S*\.128") >= 8
    assert found.count(r"STG\S*\.128") >= 8
