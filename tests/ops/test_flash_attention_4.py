"""What FlashAttention-4 is called with, by functions of its signature in plain torch."""

from __future__ import annotations

import inspect
import itertools
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tlora_fx.ops.attention import row_backward, row_forward
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import flash_attention_4
from tlora_fx.ops.kernels.flash_attention_4 import JobSpans

RULE = AttentionRule(0.3, True, -1, 0.0, 0.0)
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def attend(q, k, v, scale):
    """out [L, H, D] and lse [H, L] of one sequence."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def sequences(tensor, options):
    """What stands beside each other in a row, or a batch."""
    bounds = options.get("cu_seqlens_q")
    if bounds is None:
        return range(len(tensor))
    assert options["cu_seqlens_k"] is bounds
    assert bounds.dtype == torch.int32
    lengths = bounds.diff()
    assert (lengths >= 0).all()
    assert (bounds[0], bounds[-1]) == (0, len(tensor))
    assert lengths.max() <= options["max_seqlen_q"] == options["max_seqlen_k"] <= len(tensor)
    return [slice(a, b) for a, b in itertools.pairwise(bounds.tolist()) if a < b]


def fake_forward(q, k, v, **options):
    """Writes to `out`, and returns it with lse [H, T], or [B, H, L]."""
    assert options["causal"]
    assert options["return_lse"]
    out, batch = options.get("out", torch.empty_like(q)), q.dim() == 4
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]) if batch else (q.shape[1], q.shape[0]))
    for span in sequences(q, options):
        out[span], total = attend(q[span], k[span], v[span], options["softmax_scale"])
        lse[span if batch else (slice(None), span)] = total
    return out, lse, None, None


def fake_backward(q, k, v, out, dout, lse, **options):
    """Gradients, written where they shall be, else with the strides of q, k and v."""
    assert options["causal"]
    assert lse.is_contiguous()
    grads = [
        options.get(name, torch.empty_like(x)) for name, x in (("dq", q), ("dk", k), ("dv", v))
    ]
    for span in sequences(q, options):
        leaves = [x[span].detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            result, total = attend(*leaves, options["softmax_scale"])
            parts = torch.autograd.grad(result, leaves, dout[span])
        torch.testing.assert_close(result.detach(), out[span])
        expected = lse[span] if q.dim() == 4 else lse[:, span]
        torch.testing.assert_close(total.detach(), expected)
        for grad, part in zip(grads, parts, strict=True):
            grad[span] = part
    return (*grads, None)


def takes(function, names):
    """The function with parameters of these names, as the package's have them."""
    kind = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in sorted(names)])
    return function


@pytest.fixture
def fake_package(monkeypatch):
    """A package of its name, with these functions."""
    module = ModuleType(flash_attention_4.MODULE)
    for function, (name, names) in zip(
        (fake_forward, fake_backward), flash_attention_4.FUNCTIONS.items(), strict=True
    ):
        setattr(module, name, takes(function, names))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, flash_attention_4.MODULE, module)
    flash_attention_4._functions.cache_clear()
    yield module
    flash_attention_4._functions.cache_clear()


@pytest.mark.usefixtures("fake_package")
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("lengths", "bounds"),
    [
        ((6, 6, 6), ()),
        ((5, 1, 9), (0, 15)),
        ((5, 1, 9, 3), (0, 6, 6, 15, 18)),
        ((2, 7, 4), (0, 2, 9, 13)),
    ],
    ids=["a batch", "one job", "jobs, an empty one, and padding", "a sequence each"],
)
def test_it_is_called_for_the_parts_of_a_row(lengths, bounds, heads_first):
    """Results and gradients are those of each sequence by itself, and contiguous."""
    tokens, longest = sum(lengths), max(lengths)
    torch.manual_seed(0)
    q, dout = torch.randn(2, tokens, HEADS, WIDTH)
    k, v = torch.randn(2, tokens, KEY_HEADS, WIDTH)
    if heads_first:
        q, k, v, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cuts = itertools.pairwise(cu_seqlens.tolist())
    pieces = [attend(*(x[a:b] for x in leaves), RULE.scale) for a, b in cuts]
    expected = torch.cat([out for out, _ in pieces])
    expected.backward(dout)

    out, lse = row_forward(q, k, v, cu_seqlens, longest, RULE, JobSpans(bounds))
    saved = q, k, v, out, lse
    grads = row_backward(dout, *saved, cu_seqlens, longest, RULE, JobSpans(bounds))

    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, torch.cat([total for _, total in pieces], 1).detach())
    for grad, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad)
    assert all(x.is_contiguous() for x in (out, lse, *grads))


@pytest.mark.parametrize("lost", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_a_package_of_another_version_is_not_used(fake_package, lost, caplog, monkeypatch):
    """The log says what it lacks."""
    assert flash_attention_4.is_installed()
    monkeypatch.setattr(fake_package, lost, changed := lambda q, k: None)
    changed.__name__ = lost
    flash_attention_4._functions.cache_clear()

    assert not flash_attention_4.is_installed()
    assert f"{lost} of this version takes no causal" in caplog.text
    monkeypatch.delattr(fake_package, lost)
    flash_attention_4._functions.cache_clear()
    assert not flash_attention_4.is_installed()
    assert f"no attribute '{lost}'" in caplog.text


@pytest.mark.usefixtures("fake_package")
def test_a_switch_leaves_it_out(monkeypatch):
    """Wherever it does not run."""
    monkeypatch.setenv("TLORA_FX_FLASH4", "0")

    assert not flash_attention_4.is_installed()


@pytest.mark.usefixtures("fake_package")
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.cute", "cutlass"])
def test_a_package_that_is_missing_is_not_used(name, caplog, monkeypatch):
    """There is nothing to say, unless it is one that FlashAttention-4 needs."""

    def missing(_):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(flash_attention_4, "import_module", missing)

    assert not flash_attention_4.is_installed()
    assert (name in caplog.text) == (name == "cutlass")


def test_the_reference_is_torchs():
    """What the functions above compute is scaled dot product attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*rows, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, 0.3)[0], expected[0].transpose(0, 1))
