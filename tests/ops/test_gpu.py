"""The operators on CUDA, against the float64 reference."""

import pytest
import torch

from tlora_fx.ops import (
    keep_mask,
    keyed_dropout,
    multi_lora_linear,
    packed_attention,
    segment_read,
    segment_switch,
    segment_write,
    uniform_at,
)
from tlora_fx.ops.attention import flash_fits_row
from tlora_fx.ops.attention_rule import AttentionRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
JOBS = ((130, 1, 64), (), (0, 257, 5), (128,))
FLASH = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 50},
    {"window": 1000},
    {"causal": False, "window": 33},
]
WRITTEN_OUT = [
    {"softcap": 3.0},
    {"sinks": True},
    {"dropout": 0.2},
    {"window": 40, "softcap": 3.0, "sinks": True},
]


def mask_of(made, columns):
    """The keep mask of a row."""
    rates, segments, keys, token_index, site = made.mask_tables()
    return keep_mask(rates, segments, keys, token_index, site, columns)


def assert_close(pairs, bound):
    """Each result is finite and within the bound, relative to the reference's norm."""
    for found, expected in zip(*pairs, strict=True):
        assert found.isfinite().all()
        # dq and dk are zero where a token sees itself alone
        norm = max(expected.double().norm().item(), 0.1 * expected.numel() ** 0.5)
        assert (found.double() - expected.double()).norm().item() < bound * norm


def attention_results(made):
    """Output, statistics and gradients, and the reference's."""
    leaves = made.leaves()
    out, lse = packed_attention(*made.arguments(**dict(zip("qkv", leaves, strict=True))))
    expected, expected_lse = made.reference(*leaves)
    dout = torch.randn(expected.shape, device=out.device).to(out.dtype)
    found = torch.autograd.grad(out, leaves, dout)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    return (out, lse.detach(), *found), (expected, expected_lse.detach(), *wanted)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rule", FLASH, ids=str)
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 128), ((2, 1), 256)])
def test_attention_equals_the_reference(attention, dtype, rule, heads, width):
    """Unequal and empty sequences, windows, grouped heads: out, lse and gradients."""
    made = attention(JOBS, heads, width, dtype=dtype, device="cuda", **rule)
    made.scale = width**-0.5

    assert_close(attention_results(made), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rule", WRITTEN_OUT, ids=str)
def test_what_flash_cannot_do_is_written_out(attention, dtype, rule):
    """Soft caps, sinks and dropout run on CUDA too."""
    jobs = ((20, 1), (), (0, 17)) if "dropout" in rule else JOBS
    made = attention(jobs, (4, 2), 32, dtype=dtype, device="cuda", **rule)

    assert_close(attention_results(made), BOUNDS[dtype])


def test_halves_go_through_the_varlen_kernel(attention):
    """bf16 without extras takes flash, float32 and soft caps do not."""
    made = attention(((8,),), (2, 1), 64, dtype=torch.bfloat16, device="cuda")
    plain, capped = (AttentionRule(1.0, True, -1, cap, 0.0) for cap in (0.0, 2.0))

    assert flash_fits_row(made.q, made.v, None, plain)
    assert not flash_fits_row(made.q, made.v, None, capped)
    assert not flash_fits_row(made.q.float(), made.v.float(), None, plain)


@pytest.mark.parametrize("rule", [{}, {"window": 50}], ids=str)
def test_rows_of_single_tokens_have_right_statistics(attention, rule):
    """A row whose longest sequence is one token keeps the order of lse."""
    made = attention(((1, 1, 1), (1,)), (8, 2), 64, dtype=torch.bfloat16, device="cuda", **rule)
    out, lse = packed_attention(*made.arguments())
    expected, expected_lse = made.reference(made.q, made.k, made.v)

    assert_close(((out, lse), (expected, expected_lse)), 2e-2)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_stays_in_its_sequence(attention, where):
    """NaN in one job leaves neighbours bitwise unchanged through flash, forward and backward."""
    made = attention(((70,), (60,), (200,)), (8, 2), 64, dtype=torch.bfloat16, device="cuda")

    def run(poison):
        leaves = dict(zip("qkv", made.leaves(), strict=True))
        if poison:
            leaves[where].detach()[70:130] = float("nan")
        out, lse = packed_attention(*made.arguments(**leaves))
        grads = torch.autograd.grad(out, tuple(leaves.values()), torch.ones_like(out))
        # dq is summed by atomics, in no fixed order: it is compared by value
        parts = [torch.cat([p[:70], p[130:]]) for p in (out, lse.t(), *grads)]
        return parts[:2] + parts[3:], parts[2]

    (clean, clean_dq), (beside, beside_dq) = run(False), run(True)
    assert all(torch.equal(first, second) for first, second in zip(clean, beside, strict=True))
    torch.testing.assert_close(clean_dq, beside_dq, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_strided_heads_reach_flash(attention, dtype):
    """q, k and v as views: of one fused projection, and with heads outermost."""
    made = attention(JOBS, (4, 4), 64, dtype=dtype, device="cuda")
    fused = torch.cat([made.q, made.k], -1)
    made.q, made.k = fused.split(64, -1)
    made.v = made.v.transpose(0, 1).contiguous().transpose(0, 1)
    assert packed_attention(*made.arguments())[0].is_contiguous()

    assert_close(attention_results(made), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rates", [(0.0,) * 5, (0.1, 0.0, 0.3, 0.0, 0.2)])
def test_adapters_equal_the_reference(lora, dtype, compute, rates):
    """Unequal, single-token and empty jobs, ranks 1 to 64, a job without adapter."""
    made = lora(
        (100, 1, 0, 57, 30), (16, 1, 8, 64, 0), rates, features=(96, 80), dtype=dtype,
        adapter_dtype=torch.float32, compute=compute, device="cuda",
    )  # fmt: skip
    x, a, b = made.leaves()
    y = multi_lora_linear(*made.arguments(x=x, a=a, b=b))
    expected = made.reference(x, a, b)
    dy = torch.randn(expected.shape, device="cuda").to(y.dtype)
    found = torch.autograd.grad(y, (x, a, b), dy)
    wanted = torch.autograd.grad(expected, (x, a, b), dy.double())
    low = torch.bfloat16 in (dtype, compute)

    assert_close(((y, *found), (expected, *wanted)), BOUNDS[torch.bfloat16 if low else dtype])


@pytest.mark.parametrize("where", ["x", "a", "b"])
def test_a_nan_stays_in_its_adapter(lora, where):
    """NaN in a job's rows or adapters leaves the neighbours bitwise unchanged."""
    made = lora(
        (64, 64, 64), (8, 8, 8), (0.1, 0.1, 0.0), features=(128, 128), dtype=torch.bfloat16,
        adapter_dtype=torch.float32, device="cuda",
    )  # fmt: skip

    def run(poison):
        x, a, b = made.leaves()
        if poison:
            part = {"x": x.detach()[0, 64:128], "a": a.detach()[8:16], "b": b.detach()[8:16]}
            part[where].fill_(float("nan"))
        y = multi_lora_linear(*made.arguments(x=x, a=a, b=b))
        dx, da, db = torch.autograd.grad(y, (x, a, b), torch.ones_like(y))
        tokens, ranks = [*range(64), *range(128, 192)], [*range(8), *range(16, 24)]
        return y[0, tokens], dx[0, tokens], da[ranks], db[ranks]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_dropout_draws_the_cpus_masks(row, dtype):
    """Masks, uniforms and dropped values on CUDA equal the CPU's bit for bit."""
    here, there = (row((300, 0, 211), (0.1, 0.5, 0.6), device=d) for d in ("cpu", "cuda"))
    x = torch.randn(511, 100, dtype=dtype)
    mask = mask_of(there, 1001)
    dropped = keyed_dropout(x.cuda(), *there.mask_tables(), 1)

    assert torch.equal(mask.cpu(), mask_of(here, 1001))
    assert torch.equal(dropped.cpu(), keyed_dropout(x, *here.mask_tables(), 1))
    index = torch.arange(999) + (3 << 33)
    assert torch.equal(uniform_at(index.cuda(), (7, 8)).cpu(), uniform_at(index, (7, 8)))


def test_segments_read_write_and_switch_without_the_device():
    """Segment operators on CUDA tensors take their bounds from the CPU."""
    segments = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    x = torch.randn(1, 6, 4, device="cuda")
    part = segment_read(x, segments, 2, 1)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]], device="cuda")
    switched = segment_switch(x, -x, positions, segments, 3)

    assert torch.equal(part, x[:, 2:])
    assert torch.equal(segment_write(x, -part, segments, 2, 1), switched)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_operators_pass_opcheck_on_cuda(lora, attention, dtype):
    """Schema, fake, autograd registration and AOT dispatch hold on CUDA tensors."""
    made = lora((2, 3), (2, 4), (0.0, 0.0), features=(16, 16), dtype=dtype, device="cuda")
    leaves = dict(zip(("x", "a", "b"), made.leaves(), strict=True))
    torch.library.opcheck(torch.ops.tlora_fx.multi_lora_linear.default, made.arguments(**leaves))
    attended = attention(((9, 2), (4,)), (2, 1), 64, dtype=dtype, device="cuda")
    torch.library.opcheck(packed_attention, attended.arguments())
