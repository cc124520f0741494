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
