"""`lower-adapters` behind frozen operators that are no plain linear."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import assert_equals_peft, hand_written, job, ready, tokens
from tlora_fx.ir.lora_sites import ADD, lowered_sites


class Scaled(nn.Linear):
    """A linear that multiplies what it gives: its result is no linear's."""

    def forward(self, x):
        return super().forward(x) * 0.5


class Behind(nn.Module):
    """A model with one of them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.inner = Scaled(32, 32)
        self.head = nn.Linear(32, 61)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden + torch.tanh(self.inner(hidden)))


@pytest.fixture(scope="module")
def behind():
    """Three jobs at the scaled linear: two plain ones, and DoRA between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        (first,) = hand_written(Behind(), "batch", ["inner"])
    base = first.base
    return ready(
        [
            first,
            job("dora", base, r=3, target_modules=["inner"], use_dora=True),
            job("last", base, r=2, lora_alpha=6, target_modules=["inner"]),
        ]
    )


def test_plain_branches_are_added_to_what_the_operator_gave(behind):
    """One operator for the two of them; DoRA runs as it is, for the reason that it always had."""
    (site,) = (site for graph in behind.group.graphs() for site in lowered_sites(graph))

    assert site.operator is ADD
    assert (site.path, site.jobs) == ("inner", ("one", "last"))
    (told,) = (note for name, note in behind.group.notes if name == "lower-adapters")
    assert told.startswith("inner of job 'dora' runs as it is: its module is no linear")


def test_they_equal_peft(behind):
    """Every job, whatever its kind."""
    assert_equals_peft(behind, [tokens([4, 6]), tokens([5], seed=1), tokens([7], seed=2)], 1e-9)


class Called(nn.Module):
    """Layers whose one linear runs several times, as a function of it and of their input says."""

    def __init__(self, calls, layers):
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(CallsLayer(calls) for _ in range(layers))
        self.head = nn.Linear(32, 61)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class CallsLayer(nn.Module):
    """One of them."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.calls = nn.Linear(32, 32), calls

    def forward(self, hidden):
        return hidden + self.calls(self.inner, hidden)


def _watched(linear, x):
    """A call that learns nothing beside one that does."""
    with torch.no_grad():
        still = linear(x)
    return still + linear(x.sin())


CALLS = {
    "in a row and alone": lambda linear, x: linear(linear(linear(x).tanh())),
    "powers": lambda linear, x: linear(x) + linear(linear(x)),
    "without gradient and with": _watched,
    "apart": lambda linear, x: linear(linear(x).tanh()),
}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("calls", CALLS)
def test_calls_of_one_module_train_one_adapter(calls, layers):
    """If one of them cannot be lowered none is; jobs of other kinds and ranks change nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        (first,) = hand_written(Called(CALLS[calls], layers), "batch", ["inner"])
    others = [
        job("dora", first.base, r=3, target_modules=["inner"], use_dora=True),
        job("last", first.base, r=2, lora_alpha=6, target_modules=["inner"]),
    ]
    model = ready([first, *others])

    lowered = [site for graph in model.group.graphs() for site in lowered_sites(graph)]
    read = {
        node.meta["jobs"][0]
        for graph in model.group.graphs()
        for node in graph.nodes
        if node.op == "get_attr" and ".lora_A." in node.target
    }
    assert not read & {name for site in lowered for name in site.jobs}
    assert bool(lowered) == (calls == "apart")
    assert_equals_peft(model, [tokens([4, 6]), tokens([5], seed=1), tokens([7], seed=2)], 1e-9)
