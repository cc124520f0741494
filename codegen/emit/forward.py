"""The frozen linear and every job's branch: y = x Wᵀ + bias + S B.

A persistent matrix product on tensor cores whose tiles start from the bias and the rank block;
how it walks and what it fetches ahead stands in gemm.py.
"""

from __future__ import annotations

from dataclasses import replace

from tlora_fx.codegen.emit import gemm
from tlora_fx.codegen.source import size
from tlora_fx.codegen.spec import KernelSpec, Tile


def _roles(spec: KernelSpec) -> gemm.Roles:
    return gemm.Roles(
        left="x",
        low="s",
        high="b_packed",
        out="y",
        summed=spec.inner,
        width=spec.outer,
        turned=spec.weight_layout == "out_in",
    )


def default_tile(spec: KernelSpec) -> Tile:
    """Large tiles, smaller for a narrow output."""
    return gemm.default_tile(spec, _roles(spec))


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """What tuning tries, the rule's tile first; all of one depth."""
    return gemm.candidates(spec, _roles(spec))


def source(spec: KernelSpec) -> str:
    """The module's text; dropout is in S already."""
    added = " + bias" if spec.bias else ""
    values = {
        "arguments": "x, weight, bias, s, b_packed, segments, slots, jobs, y",
        "formula": f"{'y + ' if spec.accumulate else ''}x Wᵀ{added} + S B",
    }
    return gemm.source(replace(spec, dropout=False), _roles(spec), values)


def flops(spec: KernelSpec) -> str:
    """Without what ranks are padded by."""
    return "2 M O (I + r)"


def bytes_moved(spec: KernelSpec) -> str:
    """Every matrix read or written once."""
    width = size(spec.dtype)
    again = " + M O" if spec.accumulate else ""
    return f"{width} (M I + I O + M r + R O + M O{again})"


def cost(spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
    """FLOP and bytes of a call, with one job whose rank is the mean."""
    rank = rank_rows // max(tokens, 1)
    moved = tokens * (spec.inner + spec.outer * (2 if spec.accumulate else 1)) + rank_rows
    moved += (spec.inner + rank) * spec.outer
    return 2 * spec.outer * (tokens * spec.inner + rank_rows), size(spec.dtype) * moved
