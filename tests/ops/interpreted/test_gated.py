"""A linear that makes the gated activation before it: the numbers of the two operators."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.sampled import sampled
from tlora_fx.ops import multi_lora_gated_linear
from tlora_fx.ops.kernels import extend_weight, launch, packed, select

BOUND = 1e-5
INNER, OUTER, ROOM = 64, 80, 64  # of no other test: calls of equal shapes share recipes
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
RATES = {"keep": (0.0,) * 3, "drop": (0.3, 0.0, 0.2)}


@pytest.fixture
def traced(monkeypatch):
    """Everything runs as if a compiler traced it; what kernels made x of."""
    made, plain = [], launch.KernelCall.shrink

    def shrink(self, *args, gate=None, **kwargs):
        made.append(gate and gate.activation)
        return plain(self, *args, gate=gate, **kwargs)

    def widen(values, columns):
        return F.pad(torch.cat(values, -1), (0, columns), value=float("nan"))

    monkeypatch.setattr(launch.KernelCall, "shrink", shrink)
    monkeypatch.setattr(packed, "is_traced", lambda: True)
    monkeypatch.setattr(packed, "widen", widen)
    return made


@pytest.fixture
def site(lora):
    """Makes a site on a roomy weight, and leaves: a gate and up as columns of one, a, b."""

    def make(rates=RATES["keep"], ranks=(3, 2, 18), lengths=(17, 0, 1)):
        own = lora(lengths, ranks, rates, features=(INNER, OUTER), dtype=torch.float32)
        own.weight = extend_weight(own.weight, ROOM)
        both = torch.randn(1, own.row.tokens, 2 * INNER, generator=torch.Generator().manual_seed(3))
        return own, (both.requires_grad_(), *own.leaves()[1:])

    return make


def applied(own, leaves, activation, drops):
    """What the operator gives for leaves of `site`."""
    both, a, b = leaves
    _, *rest = own.arguments(a=a, b=b)
    gate, up = both.split(INNER, -1)
    return multi_lora_gated_linear(gate, up, activation, *rest, max_rank=18, drops=drops)


def expected(own, leaves, activation):
    """What plain float64 gives."""
    both, a, b = leaves
    gate, up = both.double().split(INNER, -1)
    return own.reference(ACTIVATIONS[activation](gate) * up, a, b)


def with_gradients(y, leaves):
    """A result, and the gradients of what is given."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_close(found, wanted):
    """Each is within the bound of the reference's norm."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= BOUND * other.norm()


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", sampled([None, *select.PLANS]))
def test_a_kernel_makes_x_under_every_plan(site, traced, plan, activation, name):
    """Results and gradients of gate, up, a and b are plain float64's; NaN stands in the room."""
    own, leaves = site(RATES[name])
    with select.force_plan(plan):
        y = applied(own, leaves, activation, name == "drop")
        found = with_gradients(y, leaves)

    assert_close(found, with_gradients(expected(own, leaves, activation), leaves))
    assert traced == [activation]


def test_recipes_start_the_same(site, traced):
    """The second call of a kind is written down, the third started from that, on other tensors."""
    own, leaves = site(lengths=(11, 2, 6))
    for seed in range(3):
        both = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(seed))
        now = (both.requires_grad_(), *leaves[1:])
        found = with_gradients(applied(own, now, "silu", drops=False), now)
        assert_close(found, with_gradients(expected(own, now, "silu"), now))

    assert traced == ["silu", "silu"]


def test_nobody_adapts_the_site(site, traced):
    """Without adapters torch makes x, and cuBLAS multiplies it alone."""
    own, (both, *_) = site(ranks=(0, 0, 0))
    a, b = (torch.zeros(4, size).requires_grad_() for size in (INNER, OUTER))
    leaves = (both, a, b)
    found = with_gradients(applied(own, leaves, "silu", drops=False), leaves)

    nothing = [leaf[:0] for leaf in (a, b)]
    assert_close(found[:2], with_gradients(expected(own, (both, *nothing), "silu"), [both]))
    assert not any(grad.any() for grad in found[2:])
    assert traced == []


@pytest.mark.parametrize("on", [False, True], ids=["untraced", "strict"])
def test_elsewhere_it_is_two_operators(site, traced, monkeypatch, on):
    """Strict mode keeps its own tiles; code that no compiler traces has no room behind x."""
    own, leaves = site()
    monkeypatch.setattr(packed, "is_traced", lambda: on)
    with select.strict(on):
        found = with_gradients(applied(own, leaves, "silu", drops=False), leaves)

    assert_close(found, with_gradients(expected(own, leaves, "silu"), leaves))
    assert traced == [None]


@pytest.mark.parametrize("room", [0, ROOM])
def test_compiled_code_runs_in_strict_mode(site, traced, room):
    """And without room: then torch makes x before the kernels read it."""
    own, (both, a, b) = site()
    _, weight, bias, *_ = own.arguments()
    (gate, up), tables = both.detach().split(INNER, -1), own.arguments()[3:]
    *sites, segments, keys, index, number, dtype = tables
    lists = [[table] for table in sites]
    with select.strict():
        y, _, _, x = torch.ops.tlora_fx.multi_lora_gated_forward(
            gate, up, "silu", [weight], [bias], *lists, segments, keys, index, [number], dtype, 18,
            False, room,
        )  # fmt: skip

    assert x.shape[-1] == INNER + room
    assert_close([y], [expected(own, (both.detach(), a, b), "silu")])
    assert traced == [None]
