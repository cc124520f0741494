"""Writes in place: new tensors where nobody sees the old memory, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models import Plain, assert_equals_peft, error_of, hand_written, ready, tokens
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import BaseNotTraceable

WIDE = 1e-9


class InPlace(Plain):
    """Writes into its activations."""

    def __init__(self, write) -> None:
        super().__init__(layers=1)
        self.write = write

    def forward(self, ids: Tensor) -> Tensor:
        """Logits without attention."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = self.write(hidden, layer.out(torch.tanh(hidden)))
        return self.head(hidden)


def fresh(x: Tensor, y: Tensor) -> Tensor:
    """Writes into what nobody else sees."""
    y += x
    y.view(-1).mul_(0.5)
    y *= 2
    return y


def aliased(x: Tensor, y: Tensor) -> Tensor:
    """Writes into memory that a view shows later."""
    view = y.view(y.shape[0], -1)
    y += x
    return y + view.view(y.shape)


def part_of_it(x: Tensor, y: Tensor) -> Tensor:
    """Writes into a slice."""
    y[:, 0] = 0
    y[..., 3:5].mul_(2)
    y[..., 1:][:, :, 4].copy_(x[..., 0])
    return x + y


def part_twice(x: Tensor, y: Tensor) -> Tensor:
    """Writes into a slice, and again through the same view and through what a write returns."""
    part = y[..., 3:9]
    part.add_(1)
    part.mul_(x[..., 3:9])
    part[..., 2:4].mul_(3).add_(part[..., :2])
    return x + y


def shown_part(x: Tensor, y: Tensor) -> Tensor:
    """Writes into a slice of memory that a view made before shows later."""
    view = y.view(y.shape[0], -1)
    y[..., 3:5] = 0
    return x + view.view(y.shape)


def copied(x: Tensor, y: Tensor) -> Tensor:
    """Writes into a copy, and reads what it was a copy of."""
    z = y.to(y.dtype, copy=True)
    z += x
    return y + z


def put_together(x: Tensor, y: Tensor) -> Tensor:
    """Fills new memory piece by piece."""
    new = x.new_empty(*x.shape[:-1], 32)
    new[..., :20].copy_(x[..., :20])
    new[..., 20:].copy_(y[..., :12])
    return x + new


def buffered(x: Tensor, y: Tensor) -> Tensor:
    """Writes into the embedding's output, then reads what it was made of again."""
    kept = x.transpose(0, 1)
    x.mul_(2)
    return x + y + kept.transpose(0, 1)


def test_writes_that_nobody_else_sees_become_new_tensors():
    """`y += x` on a fresh tensor trains as PEFT trains it."""

    def once(x: Tensor, y: Tensor) -> Tensor:
        y += x
        y *= 2
        return y

    jobs = hand_written(InPlace(once))
    assert_equals_peft(ready(jobs), [tokens([5, 3], seed=1)], WIDE)


@pytest.mark.parametrize("write", sampled([part_of_it, part_twice, put_together]))
def test_a_write_into_a_part_makes_a_new_whole(write):
    """What reads the memory later reads the whole with the part in it."""
    model = ready(hand_written(InPlace(write)))

    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


@pytest.mark.parametrize("write", sampled([fresh, aliased, shown_part, buffered, copied]))
def test_writes_that_others_see_are_refused(write):
    """A write through or behind a view names operator and line."""
    text = error_of(lambda: compile(hand_written(InPlace(write))), BaseNotTraceable)

    assert "in place" in text
    assert "test_functionalise.py" in text
