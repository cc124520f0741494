"""When rows of short sequences go through our own kernels, and what those compile to."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tlora_fx.codegen.compiled_check import MOST_REGISTERS, needs_of
from tlora_fx.codegen.spec import SHARED_BYTES
from tlora_fx.ops.attention import AttentionRule, short_tiles
from tlora_fx.ops.kernels import strict

BOUNDS = torch.tensor([0, 2], dtype=torch.int32)
CAUSAL = AttentionRule(0.1, True, -1, 0.0, 0.0)


def heads(many=32, few=8, width=128, dtype=torch.bfloat16):
    """q, k and cu_seqlens of two tokens."""
    return *(torch.zeros(2, count, width, dtype=dtype) for count in (many, few)), BOUNDS


def test_rows_go_short_only_where_that_was_measured(monkeypatch):
    """By type, heads, width and longest sequence; on the CPU as on Hopper."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)

    assert short_tiles(*heads(), 4096, CAUSAL)
    assert not short_tiles(*heads(), 4097, CAUSAL)
    assert not short_tiles(*heads(few=32), 257, CAUSAL)
    assert not short_tiles(*heads()[:2], torch.zeros(65536), 100, CAUSAL)
    assert not short_tiles(*heads(), 600, AttentionRule(0.1, True, 512, 0.0, 0.0))
    assert short_tiles(*heads(), 512, AttentionRule(0.1, True, 512, 0.0, 0.0))
    assert not short_tiles(*heads(width=256), 100, CAUSAL)
    assert not short_tiles(*heads(few=16), 100, CAUSAL)
    assert not short_tiles(*heads(dtype=torch.float16), 100, CAUSAL)
    assert not short_tiles(*heads(), 100, AttentionRule(0.1, False, -1, 0.0, 0.0))


def test_in_strict_mode_length_does_not_decide(monkeypatch):
    """A long neighbour would change a job's bits; TLORA_FX_KERNELS=off does decide."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    with strict():
        assert short_tiles(*heads(), 9000, CAUSAL)
        assert not short_tiles(*heads(width=256), 100, CAUSAL)
        monkeypatch.setenv("TLORA_FX_KERNELS", "off")
        assert not short_tiles(*heads(), 100, CAUSAL)


def test_few_programs_take_fewer_keys_each(monkeypatch):
    """As long as all run at once; in strict mode a neighbour would change a job's bits by that."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    q, k, _ = heads()

    def keys(sequences, longest):
        bounds = torch.zeros(sequences + 1, dtype=torch.int32)
        return short_tiles(q, k, bounds, longest, CAUSAL).key_gradient.columns

    assert [keys(1, 256), keys(2, 256), keys(1, 1024)] == [16, 64, 64]
    with strict():
        assert keys(1, 256) == keys(2, 256) == 64


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is built for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        pytest.param("forward", 64, marks=pytest.mark.slow),
        pytest.param("query_gradient", 64, marks=pytest.mark.slow),
        ("key_gradient", 64),
        ("key_gradient", 8),
    ],
)
def test_a_kernel_fits_hopper(kind, heads):
    """Registers, next to no spills, shared memory, tensor cores."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora_fx.ops.kernels import short_attention as short

    tiles = short.FORMS[90, torch.bfloat16, 4, 128].tiles_for(heads, 256)
    kernel, tile = getattr(short, f"_{kind}"), getattr(tiles, kind)
    values = {"GROUP": 4, "WIDTH": 128, "PADDED": 128, "WINDOWED": False}
    values |= {"ROWS": tile.rows, "KEYS": tile.columns}
    types = dict.fromkeys(values, "constexpr") | {"scale": "fp32", "bounds": "*i32"}
    types |= dict.fromkeys(("lse", "delta"), "*fp32")
    types |= dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16")
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("_step")
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in values.items()}, aligned
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = needs_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), 90)

    assert found.registers <= MOST_REGISTERS
    assert found.spills <= 8
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert found.tensor_core > 0
    assert found.wide_loads > 0
