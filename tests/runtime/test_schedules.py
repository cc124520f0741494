"""Schedules that are written here are those of transformers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from tlora_fx.runtime.optim.schedules import lr_schedule


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=3e-4)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
@given(warmup=st.integers(0, 40), steps=st.integers(1, 200))
def test_a_common_schedule_has_the_rates_and_the_state_of_transformers(name, warmup, steps):
    """At every step, and behind the last one; a checkpoint of either is one of the other."""
    ours = lr_schedule(name, optimizer(), warmup, steps, {})
    theirs = get_scheduler(name, optimizer(), warmup, steps, {})

    for step in range(steps + 3):
        assert ours.lr_lambdas[0](step) == theirs.lr_lambdas[0](step)
    assert ours.get_last_lr() == theirs.get_last_lr()
    assert ours.state_dict() == theirs.state_dict()


def test_arguments_are_those_of_transformers():
    """Also of a schedule that is written here, and with what it refuses."""
    two = lr_schedule("cosine", optimizer(), 0, 8, {"num_cycles": 1.0})

    assert two.lr_lambdas[0](4) == 0
    with pytest.raises(TypeError):
        lr_schedule("linear", optimizer(), 0, 8, {"cycles": 1})
