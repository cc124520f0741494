"""Sites that nobody adapts start no kernel of ours."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.batches import run
from tlora_fx.ops import multi_lora_linear
from tlora_fx.ops.kernels import launch_cache, select


@pytest.fixture
def started(monkeypatch):
    """The parts of operators whose kernels were started."""
    found = []
    serve = launch_cache.serve
    monkeypatch.setattr(
        launch_cache,
        "serve",
        lambda self, part, args: (found.append(part), serve(self, part, args)),
    )
    return found


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_the_frozen_linear_alone_is_computed(lora, started, bias):
    """Its result and gradient, bit for bit, and zeros for rows that belong to nobody."""
    made = lora((5, 4), (0, 0), features=(32, 48), dtype=torch.float32, bias=bias)
    spare = {"a": torch.randn(8, 32), "b": torch.randn(8, 48)}
    dy = torch.randn(1, 9, 48)
    y, dx, da, db = run(made, dy, **spare)

    x = made.x.detach().clone().requires_grad_()
    wanted = F.linear(x, made.weight, made.bias)
    (gradient,) = torch.autograd.grad(wanted, x, dy)
    assert not started
    assert torch.equal(y, wanted)
    torch.testing.assert_close(dx, gradient)
    assert not da.any()
    assert not db.any()


def test_who_comes_later_is_served(lora, started):
    """The tables are looked at in each call."""
    made = lora((5, 4), (0, 3), features=(32, 48), dtype=torch.float32)
    arguments = list(made.arguments())
    offsets = arguments[5]
    there = offsets.clone()
    offsets.zero_()
    before = multi_lora_linear(*arguments)
    assert not started
    offsets.copy_(there)

    found = multi_lora_linear(*arguments)
    assert started
    assert torch.equal(found[0, :5], before[0, :5])
    torch.testing.assert_close(found, made.reference(made.x, made.a, made.b).float())


def test_in_strict_mode_the_frozen_product_is_as_beside_adapters(lora, started):
    """Its bits depend on nobody who comes or goes."""
    made = lora((5, 4), (0, 0), features=(32, 48), dtype=torch.float32)
    with select.strict():
        multi_lora_linear(*made.arguments(a=torch.zeros(8, 32), b=torch.zeros(8, 48)))
    assert started
