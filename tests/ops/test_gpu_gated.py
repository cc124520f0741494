"""A linear that makes the gated activation before it, on CUDA: compiled, against float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ops.token_scale import token_scale
from tlora_fx.ops import keep_mask, multi_lora_gated_linear
from tlora_fx.ops.kernels import extend_weight, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
INNER, OUTER, ROOM = 4128, 512, 64
LENGTHS, RANKS = (700, 1, 0, 129, 1400), (16, 1, 8, 32, 5)
RATES = {"keep": (0.0,) * 5, "drop": (0.05, 0.0, 0.3, 0.1, 0.0)}


@pytest.fixture(autouse=True)
def gates(monkeypatch):
    """What kernels make x of; what a kernel does not write is NaN, or all ones."""
    made, plain = [], launch.KernelCall.shrink

    def empty(shape, *, dtype, device):
        value = float("nan") if dtype.is_floating_point else 255
        return torch.full(shape, value, dtype=dtype, device=device)

    def watched(self, *args, gate=None, **kwargs):
        made.append(gate and gate.activation)
        return plain(self, *args, gate=gate, **kwargs)

    monkeypatch.setattr(launch, "empty", empty)
    monkeypatch.setattr(launch.KernelCall, "shrink", watched)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


@pytest.fixture
def site(lora):
    """Makes a site in bf16, and leaves: gate and up side by side, a, b."""

    def make(lengths=LENGTHS, ranks=RANKS, rates=RATES["keep"], scale=1.0):
        own = lora(
            lengths, ranks, rates, features=(INNER, OUTER), dtype=torch.bfloat16,
            adapter_dtype=torch.float32, compute=torch.bfloat16, device="cuda", bias=False,
        )  # fmt: skip
        own.weight = extend_weight(own.weight, ROOM)
        drawn = torch.Generator().manual_seed(sum(lengths))
        both = scale * torch.randn(1, own.row.tokens, 2 * INNER, generator=drawn)
        return own, (both.to("cuda", torch.bfloat16).requires_grad_(), *own.leaves()[1:])

    return make


def layer(activation, drops, both, *rest):
    """The operator, of a gate and what stands beside it; 1 more, so that compiled code makes it."""
    gate, up = (both + 1).split(INNER, -1)
    return multi_lora_gated_linear(gate, up, activation, *rest, torch.bfloat16, 32, drops)


def with_gradients(y, leaves, dy):
    """A result, and its gradients."""
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def exact(own, leaves, activation):
    """What float64 gives."""
    rates, segments, keys, index, number = own.row.mask_tables()
    keep = keep_mask(rates, segments, keys, index, number, INNER)
    drop = keep * token_scale(rates, segments, own.row.tokens).to("cuda")[:, None]
    both, a, b = leaves
    gate, up = (both.double() + 1).split(INNER, -1)
    return own.reference(ACTIVATIONS[activation](gate) * up, a, b, drop)


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiled_it_is_as_exact_as_pytorch(site, gates, monkeypatch, activation, name):
    """For several numbers of tokens, the largest in slabs of many tokens, in one compilation."""
    drops = name == "drop"
    run = partial(layer, activation, drops)
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, (64, 0, 9, 300, 5), (3000, 0, 1, 700, 9)):
        own, leaves = site(lengths, rates=RATES[name])
        _, *rest = own.arguments(a=leaves[1], b=leaves[2])
        y = exact(own, leaves, activation)
        dy = torch.randn(y.shape, dtype=torch.float64, device="cuda")
        wanted = with_gradients(y, leaves, dy)
        found = with_gradients(compiled(leaves[0], *rest[:-1]), leaves, dy)
        with monkeypatch.context() as patch:
            patch.setenv("TLORA_FX_KERNELS", "off")
            plain = with_gradients(run(leaves[0], *rest[:-1]), leaves, dy)
        for ours, theirs, true in zip(found, plain, wanted, strict=True):
            off, usual = ((one.double() - true).norm() for one in (ours, theirs))
            assert off <= 2 * usual

    assert gates == [activation] * 3


def test_large_gates_neither_overflow_nor_lose_their_sign(site):
    """Where exp is infinite the gate is shut, not a number that is none."""
    own, leaves = site((200,), (4,), (0.0,), scale=60.0)
    _, *rest = own.arguments(a=leaves[1], b=leaves[2])
    for activation in ACTIVATIONS:
        compiled = torch.compile(partial(layer, activation, False), fullgraph=True)
        y = exact(own, leaves, activation)
        found = with_gradients(compiled(leaves[0], *rest[:-1]), leaves, torch.ones_like(y))
        for one, true in zip(found, with_gradients(y, leaves, torch.ones_like(y)), strict=True):
            assert (one.double() - true).norm() <= 2e-2 * true.norm()


@pytest.mark.parametrize("name", RATES)
def test_jobs_stay_apart(site, name):
    """A NaN in one job's gate leaves its neighbours' bits, forward and backward."""
    found = []
    for spoilt in (False, True):
        own, (both, a, b) = site(rates=RATES[name])
        with torch.no_grad():
            both[:, 700:701] += float("nan") if spoilt else 0.0
        _, *rest = own.arguments(a=a, b=b)
        compiled = torch.compile(partial(layer, "silu", name == "drop"), fullgraph=True)
        y = compiled(both, *rest[:-1])
        dy = torch.ones_like(y)
        found.append(with_gradients(y, (both, a, b), dy))
    (y, dboth, da, db), spoilt = found

    others = [*range(700), *range(701, y.shape[1])]
    for one, other in zip((y, dboth), spoilt[:2], strict=True):
        assert torch.equal(one[:, others], other[:, others])
        assert other[:, 700].isnan().all()
    rows = [*range(16), *range(17, len(da))]
    for one, other in zip((da, db), spoilt[2:], strict=True):
        assert torch.equal(one[rows], other[rows])
