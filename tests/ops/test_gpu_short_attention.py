"""Attention of rows on CUDA, ours and others', against float64 and FlashAttention-2."""

import pytest
import torch

from tlora_fx.ops import attention as operator
from tlora_fx.ops import packed_attention
from tlora_fx.ops.attention import row_backward, row_forward
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import flash_attention_4, short_attention, strict
from tlora_fx.ops.kernels.select import cut_by_jobs

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
    monkeypatch.setattr(short_attention, "LONGEST_FORWARD", 512)
    for group, width in ((4, 128), (1, 64), (6, 80)):
        form = short_attention.Form(tiles, longest_backward=512, windowed=512)
        monkeypatch.setitem(short_attention.FORMS, (arch, torch.bfloat16, group, width), form)


def results(row, leaves=None):
    """out, lse and gradients by the operator."""
    leaves = row.leaves() if leaves is None else leaves
    out, lse = packed_attention(*row.arguments(**dict(zip("qkv", leaves, strict=True))))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return dout, [out.detach(), lse.t(), *torch.autograd.grad(out, leaves, dout)]


def capture(run):
    """A CUDA graph of what was run before, and the results that a replay fills."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filled = run()
    return graph, filled


def kinds(row, longest=None, rule=None):
    """Which kernels take the row, forward and backward."""
    rule = AttentionRule(row.scale, True, row.window, 0.0, 0.0) if rule is None else rule
    bounds, longest = row.arguments()[3], longest or max(row.sequences)
    found = operator.row_kernels(row.q, row.k, bounds, longest, rule, row.arguments()[5])
    named = {"Tiles": "ours", "JobSpans": "flash4"}
    return [named.get(type(kernel).__name__, kernel) for kernel in found]


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


def require_small_errors(row):
    """The results by the operator, which err at most 1.5 times as much as FlashAttention-2's."""
    dout, found = results(row)
    theirs, expected = by_flash(row, dout), in_float64(row, dout)
    for mine, other, wanted in zip(found, theirs, expected, strict=True):
        bound = max(1.5 * float((other.double() - wanted).norm()), 1e-6 * float(wanted.norm()))
        assert float((mine.double() - wanted).norm()) <= bound
    return found


@pytest.mark.parametrize(
    ("heads", "width", "window"), [(HEADS, WIDTH, -1), ((4, 4), 64, 40), ((6, 1), 80, -1)]
)
def test_errors_are_no_larger_than_flashs(made, heads, width, window):
    """At most 1.5 times, of each result; lse is float32."""
    row = made(heads=heads, width=width, window=window)
    found = require_small_errors(row)

    assert found[1].dtype == torch.float32


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


def replayed(first, second):
    """Capture the first row; of both, what a replay and what a run gives, result by result."""
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
    graph, captured = capture(run)
    for row in (first, second):
        assert len(row.q) <= len(kept[0])
        fill(row)
        graph.replay()
        yield from zip(captured, run(), strict=True)


def test_a_captured_row_serves_other_lengths(made):
    """The tables are read on the device; empty sequences at the end change nothing."""
    first, second = made(((256, 256), (256,))), made(((100, 256, 1), (0, 407)))

    assert all(torch.equal(one, other) for one, other in replayed(first, second))


def test_strict_mode_takes_them_at_any_length(made, monkeypatch):
    """So that a long neighbour changes no bit; else the length decides."""
    row = made(((40,), (600,)))
    rule = AttentionRule(row.scale, True, -1, 0.0, 0.0)

    assert kinds(row, 600, rule) == ["flash", "flash"]
    assert kinds(row, 512, rule) == ["ours", "ours"]
    with strict():
        _, beside = results(row)
        alone = made(((40,),))
        alone.q, alone.k, alone.v = (x[:40].clone() for x in (row.q, row.k, row.v))
        assert kinds(row, 600, rule) == ["ours", "ours"]
        out, _ = packed_attention(*alone.arguments())
    assert torch.equal(beside[0][:40], out)
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    assert kinds(row, 512, rule) == ["flash", "flash"]


@pytest.mark.parametrize(("heads", "width"), [((4, 2), 16), ((8, 8), 96)])
@pytest.mark.parametrize("window", [-1, 100])
def test_strict_mode_depends_on_no_neighbour_by_other_kernels(made, heads, width, window):
    """Of FlashAttention-2 too, whose backward else adds up in any order."""
    row = made(((40,), (700, 333)), heads, width, window)
    rule = AttentionRule(row.scale, True, window, 0.0, 0.0)
    assert kinds(row, 700, rule) == ["flash", "flash"]
    _, loose = results(row)
    with strict():
        leaves = row.leaves()
        dout, beside = results(row, leaves)
        for _ in range(3):
            _, same = results(row, leaves)
            assert all(torch.equal(one, other) for one, other in zip(beside, same, strict=True))
        alone = made(((700,),), heads, width, window)
        own = [each[40:740].detach().clone().requires_grad_() for each in leaves]
        out, _ = packed_attention(*alone.arguments(**dict(zip("qkv", own, strict=True))))
        found = torch.autograd.grad(out, own, dout[40:740])
    assert torch.equal(out, beside[0][40:740])
    for one, other in zip(found, beside[2:], strict=True):
        assert torch.equal(one, other[40:740])
    for one, other in zip(beside, loose, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


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


EQUAL = ((256, 256), (256,))


@pytest.fixture
def by_four(monkeypatch):
    """Rows go to FlashAttention-4, whatever was measured, on a GPU that it has kernels for."""
    if operator.support.arch_of(torch.device("cuda")) != 90 or not flash_attention_4.is_installed():
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    widths = (64, 96, 128, 192, 256)
    monkeypatch.setattr(flash_attention_4, "BATCH", dict.fromkeys(widths, (1, 1)))
    for name in ("ONE_JOB", "ONE_JOB_MEAN", "SEVERAL_JOBS"):
        monkeypatch.setattr(flash_attention_4, name, 1)
    return "flash4"


@pytest.fixture(params=["batch", "flash4"])
def batches(request, monkeypatch):
    """Rows of equal sequences go to cuDNN or FlashAttention-4, whatever was measured."""
    monkeypatch.setattr(short_attention, "FORMS", {})
    if request.param == "flash4":
        return request.getfixturevalue("by_four")
    if not torch.backends.cudnn.is_available():
        pytest.skip("needs cuDNN")
    monkeypatch.setattr(operator, "_batches_pay", lambda q: True)
    return "batch"


@pytest.mark.parametrize(
    ("heads", "width"),
    [(HEADS, WIDTH), ((4, 4), 64), ((7, 1), 80), ((6, 2), 96), ((4, 2), 192), ((4, 2), 256)],
)
@pytest.mark.parametrize("jobs", [EQUAL, ((300,),), ((128,), (), (128,))], ids=str)
def test_a_batch_errs_no_more_than_flash(made, batches, heads, width, jobs):
    """One sequence too, lengths that fill no tile, an empty job; at most 1.5 times."""
    row = made(jobs, heads, width)
    row.sequences = tuple(length for length in row.sequences if length)
    if (batches, width) == ("flash4", 80):
        pytest.skip("it serves no such width")
    assert kinds(row) == [batches] * 2
    found = require_small_errors(row)

    assert all(x.is_contiguous() for x in (found[0], found[1].t(), *found[2:]))


@pytest.mark.parametrize("length", [256, 300])
def test_a_nan_stays_in_its_sequence_of_a_batch(made, batches, length):
    """The forward keeps its bits; gradients are summed in no fixed order, of cuDNN's dq alone."""
    row = made(((length,) * 2, (length,)))

    def run(poison):
        leaves = row.leaves()
        for leaf in leaves if poison else ():
            leaf.detach()[length : 2 * length] = float("nan")
        return results(row, leaves)[1]

    clean, beside = run(False), run(True)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), clean, beside, strict=True):
        poisoned = other[length : 2 * length]
        # FlashAttention-4 says -inf of lse.
        silent = (batches, name) == ("flash4", "lse")
        assert (poisoned.isneginf() if silent else poisoned.isnan()).any()
        for span in (slice(length), slice(2 * length, None)):
            if name in ("out", "lse") or (name != "dq" and batches == "batch"):
                assert torch.equal(one[span], other[span])
            torch.testing.assert_close(one[span], other[span])


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("offset", [0, 8, 4])
def test_a_batch_reads_views(made, offset):
    """Of one projection, also where an address is no multiple of 16 bytes, and heads outermost."""
    row = made(EQUAL)
    _, expected = results(row)
    many, few = HEADS
    joined = torch.zeros(len(row.q), (many + 2 * few) * WIDTH + 64 + offset, device="cuda")
    joined = joined.to(torch.bfloat16)
    joined[:, offset:][:, : many * WIDTH] = row.q.flatten(1)
    joined[:, offset:][:, many * WIDTH : (many + few) * WIDTH] = row.k.flatten(1)
    row.q = joined[:, offset:][:, : many * WIDTH].unflatten(1, (many, WIDTH))
    row.k = joined[:, offset:][:, many * WIDTH : (many + few) * WIDTH].unflatten(1, (few, WIDTH))
    row.v = row.v.transpose(0, 1).contiguous().transpose(0, 1)
    leaves = [x.detach().requires_grad_() for x in (row.q, row.k, row.v)]
    _, found = results(row, leaves)

    assert not leaves[0].is_contiguous()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("batches")
def test_a_batch_is_captured(made):
    """A replay on other values equals a launched run."""
    first, second = made(EQUAL), made(EQUAL)
    kept = [x.detach().clone() for x in (first.q, first.k, first.v)]
    rest = first.arguments()[3:]

    def run():
        leaves = [x.requires_grad_() for x in kept]
        out, lse = packed_attention(*leaves, *rest)
        return [out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    graph, captured = capture(run)
    for row in (first, second):
        for mine, other in zip(kept, (row.q, row.k, row.v), strict=True):
            mine.detach().copy_(other.flip(0))
        graph.replay()
        for one, other in zip(captured, run(), strict=True):
            torch.testing.assert_close(one, other)


def test_a_batch_and_our_kernels_read_each_others_results(made, batches):
    """Forwards by one, backwards by the other: out and lse mean the same."""
    row = made(EQUAL)
    bounds, rule = row.arguments()[3], AttentionRule(row.scale, True, -1, 0.0, 0.0)
    tiles = short_attention.Tiles(*(short_attention._tile(64, 64, 4, 2),) * 3)
    q, k, v = row.q, row.k, row.v
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    expected = in_float64(row, dout)[2:]
    other = flash_attention_4.JobSpans() if batches == "flash4" else batches
    for first, then in (
        (tiles, other), (tiles, "flash"), (other, tiles), (other, "flash"),
    ):  # fmt: skip
        out, lse = row_forward(q, k, v, bounds, 256, rule, first)
        grads = row_backward(dout, q, k, v, out, lse, bounds, 256, rule, then)
        for one, wanted in zip(grads, expected, strict=True):
            assert float((one.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())


UNEVEN = ((300, 1, 129, 40),)


@pytest.mark.parametrize(
    ("heads", "width"), [(HEADS, WIDTH), ((4, 4), 64), ((6, 2), 96), ((4, 2), 256)]
)
def test_the_uneven_sequences_of_one_job_go_by_four(made, by_four, heads, width):
    """Errors are at most 1.5 times FlashAttention-2's, and several jobs go elsewhere."""
    row = made(UNEVEN, heads, width)
    assert kinds(row) == [by_four] * 2
    found = require_small_errors(row)

    assert all(x.is_contiguous() for x in (found[0], found[1].t(), *found[2:]))


def test_a_nan_stays_in_its_job(made, by_four):
    """Where no graph holds the row; also behind a job's sequences and before them."""
    row = made(((200, 70), (), (129,), (40, 31)))
    assert by_four not in kinds(row)

    def run(poison):
        leaves = row.leaves()
        for leaf in leaves if poison else ():
            leaf.detach()[270:399] = float("nan")
        with cut_by_jobs():
            assert kinds(row) == [by_four] * 2
            return results(row, leaves)

    (dout, clean), (_, beside) = run(False), run(True)
    for one, other, wanted in zip(clean, beside, in_float64(row, dout), strict=True):
        assert not other[270:399].isfinite().all()
        assert float((one.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())
        for span in (slice(270), slice(399, None)):
            torch.testing.assert_close(one[span], other[span])


def test_a_captured_row_of_one_job_serves_other_lengths(made, by_four):
    """FlashAttention-4 reads the bounds on the device, and skips empty sequences."""
    first, second = made(((256, 214),)), made(UNEVEN)
    assert kinds(second, 512) == [by_four] * 2

    for one, other in replayed(first, second):
        torch.testing.assert_close(one, other)
