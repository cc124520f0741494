"""`multi_lora_add` on kernels."""

import pytest
import torch

from tlora_fx.ops import multi_lora_add
from tlora_fx.ops.kernels import dispatch

BOUND = 1e-5
RATES = pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.3, 0.0, 0.2)], ids=["keep", "drop"])


def leaves_of(made):
    """y, x, a and b, asking for gradients."""
    y = torch.nn.functional.linear(made.x, made.weight, made.bias)
    return (y.detach().requires_grad_(), *made.leaves())


def run(made, y, x, a, b, **other):
    """The operator."""
    _, _, _, *tables = made.arguments(x=x, a=a, b=b)
    return multi_lora_add(y, x, *tables, **other)


@pytest.fixture
def launched(monkeypatch):
    """How often kernels served."""
    calls = []
    for name in ("add_forward", "add_input_gradient"):
        real = getattr(dispatch, name)
        monkeypatch.setattr(dispatch, name, lambda *a, r=real, n=name: (calls.append(n), r(*a))[1])
    return calls


@RATES
def test_kernels_give_the_numbers_of_each_job_alone(lora, launched, rates):
    """Sum and gradients, with a job without tokens and one with a single token."""
    made = lora((17, 0, 1), (3, 2, 18), rates, features=(32, 48), dtype=torch.float32)
    y, x, a, b = leaves_of(made)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))

    found = run(made, y, x, a, b, max_rank=18, drops=any(rates))
    grads = torch.autograd.grad(found, (y, x, a, b), dy)

    made.weight, made.bias = torch.zeros_like(made.weight), None
    branches = made.reference(x, a, b)
    expected = torch.autograd.grad(branches, (x, a, b), dy.double())
    assert launched == ["add_forward", "add_input_gradient"]
    assert torch.equal(grads[0], dy)
    for one, other in zip((found, *grads[1:]), (y + branches, *expected), strict=True):
        assert (one.double() - other).norm() <= BOUND * other.norm()


def test_without_dx_the_adapters_gradients_are_the_same(lora, launched):
    """The first layer's input needs no gradient."""
    made = lora((9, 4), (3, 5), (0.3, 0.0), features=(32, 16), dtype=torch.float32)
    y, x, a, b = leaves_of(made)
    both = torch.autograd.grad(run(made, y, x, a, b).sum(), (a, b, x))
    alone = torch.autograd.grad(run(made, y.detach(), x.detach(), a, b).sum(), (a, b))

    assert all(torch.equal(one, other) for one, other in zip(alone, both, strict=False))
    assert len(launched) == 4


def test_odd_sizes_are_left_to_pytorch(lora, launched):
    """Kernels take multiples of 16."""
    made = lora((9, 4), (3, 5), features=(32, 20), dtype=torch.float32)
    y, x, a, b = leaves_of(made)
    run(made, y, x, a, b).sum().backward()

    assert launched == []
    assert a.grad.isfinite().all()
