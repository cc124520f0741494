"""Which kernels rows go through on CUDA, and what ours compile to."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from scripts.check_kernels import MAX_REGISTERS, needs_of
from tlora_fx.codegen.spec import SHARED_BYTES
from tlora_fx.ops import attention
from tlora_fx.ops.attention import row_kernels
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import strict
from tlora_fx.ops.kernels.select import cut_by_jobs

INSTALLED = "tlora_fx.ops.kernels.flash_attention_4.is_installed"
BOUNDS = torch.tensor([0, 2], dtype=torch.int32)
CAUSAL = AttentionRule(0.1, True, -1, 0.0, 0.0)
ONE_JOB, TWO_JOBS = (torch.arange(jobs + 1, dtype=torch.int32) for jobs in (1, 2))


@pytest.fixture(autouse=True)
def without_flash_attention_4(monkeypatch):
    """As on a machine that does not have it."""
    monkeypatch.setattr(INSTALLED, lambda: False)


def heads(many=32, few=8, width=128, dtype=torch.bfloat16):
    """q, k and cu_seqlens of two tokens."""
    return *(torch.zeros(2, count, width, dtype=dtype) for count in (many, few)), BOUNDS


def goes_short(q, k, bounds, longest, rule=CAUSAL):
    """Whether our kernels take both directions of a row; False: neither."""
    forward, backward = (
        not isinstance(kernel, str) for kernel in row_kernels(q, k, bounds, longest, rule, TWO_JOBS)
    )
    assert forward == backward
    return forward


def test_rows_go_short_only_where_that_was_measured(monkeypatch):
    """By type, heads, width and longest sequence; on the CPU as on Hopper."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)

    assert goes_short(*heads(), 8192)
    assert not goes_short(*heads(), 8193)
    assert goes_short(*heads(many=28, few=4), 1024)
    assert kinds(*heads(many=28, few=4), 1025, CAUSAL) == ("ours", "flash")
    assert not goes_short(*heads()[:2], torch.zeros(65536), 100)
    assert not goes_short(*heads(), 600, AttentionRule(0.1, True, 512, 0.0, 0.0))
    assert goes_short(*heads(), 512, AttentionRule(0.1, True, 512, 0.0, 0.0))
    assert not goes_short(*heads(width=256), 100)
    assert not goes_short(*heads(few=2), 100)
    assert not goes_short(*heads(), 300, AttentionRule(0.1, True, 280, 0.0, 0.0))
    assert not goes_short(*heads(dtype=torch.float16), 100)
    assert not goes_short(*heads(), 100, AttentionRule(0.1, False, -1, 0.0, 0.0))


@pytest.fixture
def with_cudnn(monkeypatch):
    """As on a machine that has it."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def equal_row(sequences, longest, tokens=None, **given):
    """The arguments of a row of equal sequences, of which the tables promise no more than that."""
    many, few, _ = heads(**given)
    tokens = sequences * longest if tokens is None else tokens
    q, k = (x[:1].expand(tokens, -1, -1) for x in (many, few))
    return q, k, torch.zeros(sequences + 1, dtype=torch.int32), longest


def kinds(*row, segments=TWO_JOBS):
    """The names of both directions' kernels."""
    names = {"str": str, "Tiles": lambda _: "ours", "JobSpans": lambda _: "flash4"}
    return tuple(names[type(one).__name__](one) for one in row_kernels(*row, segments))


@pytest.mark.usefixtures("with_cudnn")
def test_rows_of_equal_sequences_are_a_batch():
    """Where that was measured to be faster, forwards and backwards by themselves."""
    assert kinds(*equal_row(2, 4096), CAUSAL) == ("batch", "batch")
    assert kinds(*equal_row(4, 256), CAUSAL) == ("batch", "ours")
    assert kinds(*equal_row(4, 160), CAUSAL) == ("ours", "ours")
    assert kinds(*equal_row(1, 9000), CAUSAL) == ("batch", "batch")
    assert kinds(*equal_row(8, 1024, width=64), CAUSAL) == ("batch", "ours")
    assert kinds(*equal_row(4, 160, width=256), CAUSAL) == ("batch", "batch")
    assert kinds(*equal_row(4, 100, width=256), CAUSAL) == ("flash", "flash")
    assert kinds(*equal_row(2, 1024), AttentionRule(0.1, False, -1, 0.0, 0.0)) == ("flash",) * 2
    assert kinds(*equal_row(2, 1024, dtype=torch.float16), CAUSAL) == ("flash",) * 2
    assert kinds(*equal_row(2, 1024, width=32), CAUSAL) == ("flash",) * 2
    assert kinds(*equal_row(2, 1024), AttentionRule(0.1, True, 512, 0.0, 0.0)) == ("flash",) * 2
    assert kinds(*equal_row(2, 1024), AttentionRule(0.1, True, 1024, 0.0, 0.0)) == ("batch",) * 2


@pytest.mark.usefixtures("with_cudnn")
def test_a_row_is_a_batch_only_if_no_sequence_can_be_shorter():
    """One token less than there is room for, or a bound above the longest: some may differ."""
    assert kinds(*equal_row(2, 4096, tokens=8191), CAUSAL) == ("ours", "ours")
    assert kinds(*equal_row(2, 2048, tokens=2048), CAUSAL) == ("ours", "ours")


@pytest.mark.usefixtures("with_cudnn")
def test_the_log_says_once_which_kernels_serve(caplog):
    """By heads, width and direction."""
    attention._say.cache_clear()
    with caplog.at_level("INFO", logger="tlora_fx.ops"):
        for _ in range(2):
            row_kernels(*equal_row(4, 256), CAUSAL, TWO_JOBS)

    assert caplog.messages == [
        "attention of 32 heads, 8 key heads, width 128: forward cuDNN, backward ours"
    ]


@pytest.mark.usefixtures("with_cudnn")
def test_batches_need_a_cudnn_that_is_wanted(monkeypatch):
    """Not in strict mode, where neighbours' lengths must not decide; torch's switch is heeded."""
    with strict():
        assert kinds(*equal_row(2, 4096), CAUSAL) == ("ours", "ours")
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    assert kinds(*equal_row(2, 256), CAUSAL) == ("batch", "batch")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert kinds(*equal_row(2, 4096), CAUSAL) == ("flash", "flash")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8900)
    assert kinds(*equal_row(2, 4096), CAUSAL) == ("flash", "flash")


@pytest.mark.usefixtures("with_cudnn")
def test_rows_of_long_sequences_go_to_flash_attention_4(monkeypatch):
    """Where it is installed: batches, the sequences of one job, and rows that no graph holds."""
    uneven, segments = equal_row(3, 3000, tokens=8000), torch.tensor([0, 3000, 3000, 8000])
    assert kinds(*uneven, CAUSAL, segments=ONE_JOB) == ("ours", "ours")
    monkeypatch.setattr(INSTALLED, lambda: True)

    assert kinds(*equal_row(2, 4096), CAUSAL) == ("flash4",) * 2
    assert kinds(*equal_row(8, 1024), CAUSAL) == ("batch", "flash4")
    assert kinds(*equal_row(8, 1024, width=256), CAUSAL) == ("flash4", "batch")
    assert kinds(*equal_row(16, 512), CAUSAL) == ("batch", "ours")
    assert kinds(*uneven, CAUSAL, segments=ONE_JOB) == ("flash4",) * 2
    for sequences, longest in ((9, 1024), (40, 3000)):
        row = equal_row(sequences, longest, tokens=8000)
        assert kinds(*row, CAUSAL, segments=ONE_JOB) == ("ours",) * 2
    assert kinds(*uneven, CAUSAL, segments=segments) == ("ours", "ours")
    with cut_by_jobs():
        assert kinds(*uneven, CAUSAL, segments=segments) == ("flash4",) * 2
        assert kinds(*uneven, CAUSAL, segments=torch.arange(5)) == ("ours", "ours")
        short = equal_row(9, 2000, tokens=8000)
        assert kinds(*short, CAUSAL, segments=segments) == ("ours",) * 2
        narrow = equal_row(3, 3000, tokens=8000, width=64)
        assert kinds(*narrow, CAUSAL, segments=segments) == ("ours",) * 2
    for other in ({"width": 96}, {"dtype": torch.float16}):
        assert "flash4" not in kinds(*equal_row(2, 4096, **other), CAUSAL)
    for rule in (
        AttentionRule(0.1, False, -1, 0.0, 0.0), AttentionRule(0.1, True, 512, 0.0, 0.0),
    ):  # fmt: skip
        assert "flash4" not in kinds(*equal_row(2, 4096), rule)
    with strict():
        assert kinds(*equal_row(2, 4096), CAUSAL) == ("ours", "ours")


@pytest.mark.usefixtures("with_cudnn")
def test_flash_attention_4_sees_no_job_beside_another(monkeypatch):
    """Its tiles read on behind what it is called for: a batch, or the tokens of a job."""
    monkeypatch.setattr(INSTALLED, lambda: True)
    segments = torch.tensor([0, 3000, 3000, 8000], dtype=torch.int32)
    uneven = equal_row(3, 3000, tokens=8000)
    with cut_by_jobs():
        several, _ = row_kernels(*uneven, CAUSAL, segments)
        one, _ = row_kernels(*uneven, CAUSAL, ONE_JOB)
        batch, _ = row_kernels(*equal_row(2, 4096), CAUSAL, segments)

    assert list(several.slices()) == [slice(0, 3000), slice(3000, 8000)]
    assert list(one.slices()) == [slice(0, 8000)]
    assert batch.bounds == ()


def test_in_strict_mode_length_does_not_decide(monkeypatch):
    """A long neighbour would change a job's bits; TLORA_FX_KERNELS=off does decide."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    with strict():
        assert goes_short(*heads(), 9000)
        assert not goes_short(*heads(width=256), 100)
        monkeypatch.setenv("TLORA_FX_KERNELS", "off")
        assert not goes_short(*heads(), 100)


def test_few_programs_take_fewer_keys_each(monkeypatch):
    """As long as all run at once; in strict mode a neighbour would change a job's bits by that."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    q, k, _ = heads()

    def keys(sequences, longest):
        bounds = torch.zeros(sequences + 1, dtype=torch.int32)
        return row_kernels(q, k, bounds, longest, CAUSAL, TWO_JOBS)[1].key_gradient.columns

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

    assert found.registers <= MAX_REGISTERS
    assert found.spills <= 8
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert found.tensor_core > 0
    assert found.wide_loads > 0
