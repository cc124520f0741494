"""Our attention of short sequences on CUDA, against float64 and the kernel that torch ships."""

import pytest
import torch

from tlora_fx.ops import attention as operator
from tlora_fx.ops import packed_attention
from tlora_fx.ops.attention import AttentionRule, row_backward, row_forward
from tlora_fx.ops.kernels import short_attention, strict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

JOBS = ((130, 1, 64), (0, 257, 5), (33,))
HEADS, WIDTH = (32, 8), 128


@pytest.fixture
def made(attention):
    """A row whose heads are as where our kernels were measured."""

    def make(jobs=JOBS, heads=HEADS, width=WIDTH, window=-1):
        row = attention(jobs, heads, width, dtype=torch.bfloat16, device="cuda", window=window)
        row.scale = width**-0.5
        return row

    return make


@pytest.fixture(autouse=True)
def measured_here(monkeypatch):
    """Also on a GPU, and for heads, where nothing was measured."""
    arch = operator.support.arch_of(torch.device("cuda"))
    tiles = short_attention.FORMS[90, torch.bfloat16, 4, 128].tiles
    for group, width in ((4, 128), (1, 64), (6, 80)):
        form = short_attention.Form(512, tiles, windowed=512)
        monkeypatch.setitem(short_attention.FORMS, (arch, torch.bfloat16, group, width), form)


def results(row, leaves=None):
    """out, lse and gradients by the operator."""
    leaves = row.leaves() if leaves is None else leaves
    out, lse = packed_attention(*row.arguments(**dict(zip("qkv", leaves, strict=True))))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return dout, [out.detach(), lse.t(), *torch.autograd.grad(out, leaves, dout)]


def by_flash(row, dout):
    """The same by the kernel that torch ships."""
    rule = AttentionRule(row.scale, True, row.window, 0.0, 0.0)
    bounds, longest = row.arguments()[3], max(row.sequences)
    out, lse = row_forward(row.q, row.k, row.v, bounds, longest, rule)
    saved = row.q, row.k, row.v, out, lse
    return [out, lse.t(), *row_backward(dout, *saved, bounds, longest, rule)]


def in_float64(row, dout):
    """The same by one dense matrix of scores."""
    leaves = row.leaves()
    out, lse = row.reference(*leaves)
    return [out.detach(), lse.detach().t(), *torch.autograd.grad(out, leaves, dout.double())]


@pytest.mark.parametrize(
    ("heads", "width", "window"), [(HEADS, WIDTH, -1), ((4, 4), 64, 40), ((6, 1), 80, -1)]
)
def test_errors_are_no_larger_than_flashs(made, heads, width, window):
    """At most 1.5 times, of each result; lse is float32."""
    row = made(heads=heads, width=width, window=window)
    dout, found = results(row)
    theirs, expected = by_flash(row, dout), in_float64(row, dout)

    assert found[1].dtype == torch.float32
    for mine, other, wanted in zip(found, theirs, expected, strict=True):
        bound = max(1.5 * float((other.double() - wanted).norm()), 1e-6 * float(wanted.norm()))
        assert float((mine.double() - wanted).norm()) <= bound


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_no_bit_depends_on_neighbours_place_or_run(made, where):
    """Beside NaN, alone, and behind others: out, lse and all gradients."""
    row = made()

    def run(poison):
        leaves = row.leaves()
        if poison:
            leaves["qkv".index(where)].detach()[195:457] = float("nan")
        dout, found = results(row, leaves)
        return dout, found

    (dout, clean), (_, again), (_, beside) = run(False), run(False), run(True)
    alone = made(((33,),))
    alone.q, alone.k, alone.v = (x[-33:].clone() for x in (row.q, row.k, row.v))
    leaves = alone.leaves()
    out, lse = packed_attention(*alone.arguments(**dict(zip("qkv", leaves, strict=True))))
    own = [out.detach(), lse.t(), *torch.autograd.grad(out, leaves, dout[-33:])]

    assert all(torch.equal(one, other) for one, other in zip(clean, again, strict=True))
    for one, other in zip(clean, beside, strict=True):
        assert torch.equal(one[:195], other[:195])
        assert torch.equal(one[457:], other[457:])
    assert beside[0][195:457].isnan().any()
    assert all(torch.equal(one[-33:], other) for one, other in zip(clean, own, strict=True))


def test_a_captured_row_serves_other_lengths(made):
    """The tables are read on the device; empty sequences at the end change nothing."""
    first, second = (
        made(((256, 256), (256,))),
        made(
            (
                (100, 256, 1),
                (0, 411 - 4),
            )
        ),
    )
    kept = [x.detach().clone() for x in (first.q, first.k, first.v)]
    bounds = torch.zeros(9, dtype=torch.int32, device="cuda")
    arguments = list(first.arguments())
    arguments[3], arguments[4] = bounds, torch.tensor(512, dtype=torch.int32)

    def run():
        leaves = [x.requires_grad_() for x in kept]
        out, lse = packed_attention(*leaves, *arguments[3:])
        return [out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def fill(row):
        own = row.arguments()[3]
        bounds[: len(own)].copy_(own)
        bounds[len(own) :].fill_(len(kept[0]))

    fill(first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for row in (first, second):
        assert len(row.q) <= len(kept[0])
        fill(row)
        graph.replay()
        for one, other in zip(captured, run(), strict=True):
            assert torch.equal(one, other)


def test_strict_mode_takes_them_at_any_length(made, monkeypatch):
    """So that a long neighbour changes no bit; else the length decides."""
    row = made(((40,), (600,)))
    rule = AttentionRule(row.scale, True, -1, 0.0, 0.0)

    assert not operator.short_tiles(row.q, row.k, row.arguments()[3], 600, rule)
    assert operator.short_tiles(row.q, row.k, row.arguments()[3], 512, rule)
    with strict():
        _, beside = results(row)
        alone = made(((40,),))
        alone.q, alone.k, alone.v = (x[:40].clone() for x in (row.q, row.k, row.v))
        assert operator.short_tiles(row.q, row.k, row.arguments()[3], 600, rule)
        out, _ = packed_attention(*alone.arguments())
    assert torch.equal(beside[0][:40], out)
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    assert not operator.short_tiles(row.q, row.k, row.arguments()[3], 512, rule)


def test_strided_heads_are_read(made):
    """q, k and v as views of one projection, and with heads outermost."""
    row = made()
    _, expected = results(row)
    fused = torch.cat([row.q, row.k], 1)
    row.q, row.k = fused.split(HEADS, 1)
    row.v = row.v.transpose(0, 1).contiguous().transpose(0, 1)
    leaves = [x.detach().requires_grad_() for x in (row.q, row.k, row.v)]
    _, found = results(row, leaves)

    assert not leaves[0].is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
