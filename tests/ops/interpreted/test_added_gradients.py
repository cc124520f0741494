"""Kernels that add gradients themselves leave what a sum behind them leaves, to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.ops.adapted import Adapted, both
from tlora_fx.ops.kernels import added_gradients, launch
from tlora_fx.parallel.capturing import add_gradients, throw_gradients_away

SHAPE = (32, 48)
#: With a job of more tokens than a chunk has, and without.
LENGTHS = {"short": (4, 0, 9), "long": (4, 0, 600)}


@pytest.fixture
def summed(monkeypatch):
    """How many gradients `add_gradients` has added itself."""
    counts = []
    together = torch._foreach_add_

    def add(ones, others):
        counts.append(len(ones))
        together(ones, others)

    monkeypatch.setattr(torch, "_foreach_add_", add)
    return counts


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_kernels_add_what_is_summed_behind_them(lora, summed, monkeypatch, length, rate):
    """Of jobs with and without tokens; nothing is left for the sum then."""
    made = lora(LENGTHS[length], (3, 2, 4), (rate,) * 3, dtype=torch.float32, features=SHAPE)
    one, two = both(lambda: Adapted(made), monkeypatch)

    assert all(map(torch.equal, one, two))
    assert summed == [2]


def test_a_bank_that_two_operators_read_gets_both_gradients(lora, monkeypatch):
    """Autograd sums the zeros that both give back."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    one, two = both(lambda: Adapted(made, times=2), monkeypatch)

    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_a_bank_that_is_no_parameter_gives_its_gradient_back(lora, summed, monkeypatch):
    """What autograd does on the way to the parameter is not left out."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    one, two = both(lambda: Adapted(made, scaled=True), monkeypatch)

    assert all(map(torch.equal, one, two))
    assert summed == [2, 2]


def test_a_hook_sees_the_gradient(lora, summed):
    """What it returns is what is added."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    model, seen = Adapted(made), []
    model.a.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0)
    before = model.a.grad.clone()
    add_gradients(model(), model, 10**9)

    assert seen
    assert seen[0].count_nonzero()
    assert torch.equal(model.a.grad, before)


def test_gradients_that_are_thrown_away_leave_those_that_there_are(lora):
    """And the zeros that stand for them stay zeros."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    model = Adapted(made)
    before = [model.a.grad.clone(), model.b.grad.clone()]
    throw_gradients_away(model(), model)

    assert all(map(torch.equal, before, [model.a.grad, model.b.grad]))
    assert not added_gradients._targets
    blocks = [block for each in added_gradients._blocks.values() for block in each]
    assert blocks
    assert not any(block.count_nonzero() for block in blocks)


def test_rows_without_adapters_add_nothing(lora, monkeypatch):
    """No job has a rank here: no kernel runs, and nothing is NaN."""
    made = lora((4, 9), (0, 0), dtype=torch.float32, features=SHAPE)
    made.a, made.b = torch.zeros(2, SHAPE[0]), torch.zeros(2, SHAPE[1])
    monkeypatch.setattr(launch.KernelCall, "sum_gradients", None)
    model = Adapted(made)
    before = model.a.grad.clone()
    add_gradients(model(), model, 10**9)

    assert torch.equal(model.a.grad, before)
