"""Our attention of short sequences against float64; Triton's interpreter gets bf16 wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from tlora_fx.codegen.spec import Tile
from tlora_fx.ops.attention import row_backward, row_forward
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import short_attention as short

TILE = Tile(rows=32, columns=16, depth=0, warps=4, stages=1)
TILES = short.Tiles(TILE, TILE, TILE)
JOBS = ((1, 37), (0, 20))


def results(row, longest=0, window=0):
    """out, lse, dq, dk and dv, tokens first; and dout."""
    bounds = torch.tensor([0, *itertools.accumulate(row.sequences)], dtype=torch.int32)
    rule = short.Rule(longest or max(row.sequences), row.scale, window)
    out, lse = short.forward(row.q, row.k, row.v, bounds, rule, TILE)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    saved = row.q, row.k, row.v, out, lse
    return [out, lse.t(), *short.backward(dout, saved, bounds, rule, TILES)], dout


@pytest.mark.parametrize(
    ("heads", "width", "window", "dtype"),
    [
        ((4, 1), 64, 0, torch.float32),
        ((1, 1), 80, 0, torch.float32),
        ((6, 2), 16, 7, torch.float32),
        ((4, 2), 32, 1, torch.float16),
    ],
)
def test_results_and_gradients_equal_the_reference(attention, heads, width, window, dtype):
    """Grouped heads, of which three do not divide a tile's rows; widths, windows, one token."""
    row = attention(JOBS, heads, width, dtype=dtype, window=window or -1)
    found, dout = results(row, window=window)
    leaves = row.leaves()
    out, lse = row.reference(*leaves)
    expected = [out.detach(), lse.detach().t(), *torch.autograd.grad(out, leaves, dout.double())]
    bound = 1e-6 if dtype == torch.float32 else 2e-3

    for mine, wanted in zip(found, expected, strict=True):
        # Of a token that sees itself alone dq and dk are zero.
        norm = max(float(wanted.norm()), 0.1 * wanted.numel() ** 0.5)
        assert float((mine.double() - wanted).norm()) < bound * norm


def test_no_bit_depends_on_neighbours_or_place(attention):
    """Alone, beside NaN, and where a longer sequence is expected; a window too."""
    row = attention(((21, 19), (24,)), (4, 2), 16, window=20, dtype=torch.float32)
    found, _ = results(row, longest=40, window=20)
    own = slice(21, 40)
    alone = attention(((19,),), (4, 2), 16, window=20, dtype=torch.float32)
    alone.q, alone.k, alone.v = (x[own].clone() for x in (row.q, row.k, row.v))
    for x in (row.q, row.k, row.v):
        x[:21], x[40:] = float("nan"), float("nan")
    beside, dout = results(row, window=20)
    bounds, rule = torch.tensor([0, 19], dtype=torch.int32), short.Rule(19, row.scale, 20)
    out, lse = short.forward(alone.q, alone.k, alone.v, bounds, rule, TILE)
    saved = alone.q, alone.k, alone.v, out, lse
    single = [out, lse.t(), *short.backward(dout[own].contiguous(), saved, bounds, rule, TILES)]

    assert beside[0][:21].isnan().all()
    for one, other, third in zip(found, beside, single, strict=True):
        assert torch.equal(one[own], other[own])
        assert torch.equal(one[own], third)


def test_heads_of_a_fused_projection_are_read(attention):
    """By what the operator calls; copied only where a token's heads do not lie side by side."""
    row = attention(((9, 20),), (4, 2), 16, dtype=torch.float32)
    expected, dout = results(row)
    bounds, longest = row.arguments()[3].long(), max(row.sequences)
    rule = AttentionRule(row.scale, True, -1, 0.0, 0.0)
    q, k, _ = torch.cat([row.q, row.k, row.v], 1).split((4, 2, 2), 1)
    v = row.v.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = row_forward(q, k, v, bounds, longest, rule, TILES)
    found = row_backward(dout, q, k, v, out, lse, bounds, longest, rule, TILES)

    assert not k.is_contiguous()
    for one, other in zip([out, lse.t(), *found], expected, strict=True):
        assert torch.equal(one, other)
