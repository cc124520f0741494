"""The input's gradient through frozen weight and branches: dx = dy W + mask ∘ (dS A).

`forward` with inner and outer exchanged. With dropout the rank block, which comes first, is masked
by the bits that `shrink` drew, before W's part is added; how it walks and what it fetches ahead
stands in gemm.py.
"""

from __future__ import annotations

from dataclasses import replace

from tlora_fx.codegen.emit import gemm
from tlora_fx.codegen.source import size
from tlora_fx.codegen.spec import KernelSpec, Tile


def _roles(spec: KernelSpec) -> gemm.Roles:
    return gemm.Roles(
        left="dy",
        low="ds",
        high="a_packed",
        out="dx",
        summed=spec.outer,
        width=spec.inner,
        turned=spec.weight_layout == "in_out",
    )


def default_tile(spec: KernelSpec) -> Tile:
    """Large tiles, smaller for a narrow input."""
    return gemm.default_tile(spec, _roles(spec))


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """What tuning tries, the rule's tile first; all of one depth."""
    return gemm.candidates(spec, _roles(spec))


def source(spec: KernelSpec) -> str:
    """The module's text; the bias has no part in it."""
    branch = "mask ∘ (dS A)" if spec.dropout else "dS A"
    values = {
        "arguments": "dy, weight, ds, a_packed, segments, slots, thresholds, bits, jobs, dx",
        "formula": f"{'dx + ' if spec.accumulate else ''}dy W + {branch}",
    }
    return gemm.source(replace(spec, bias=False), _roles(spec), values)


def flops(spec: KernelSpec) -> str:
    """Without what ranks are padded by."""
    return "2 M I (O + r)"


def bytes_moved(spec: KernelSpec) -> str:
    """Every matrix read or written once, masks a bit an element."""
    width = size(spec.dtype)
    again = " + M I" if spec.accumulate else ""
    masks = " + M I / 8" if spec.dropout else ""
    return f"{width} (M O + I O + M r + R I + M I{again}){masks}"


def cost(spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
    """FLOP and bytes of a call, with one job whose rank is the mean."""
    rank = rank_rows // max(tokens, 1)
    moved = tokens * (spec.outer + spec.inner * (2 if spec.accumulate else 1)) + rank_rows
    moved += (spec.outer + rank) * spec.inner
    masks = tokens * -(-spec.inner // 8) if spec.dropout else 0
    return 2 * spec.inner * (tokens * spec.outer + rank_rows), size(spec.dtype) * moved + masks
