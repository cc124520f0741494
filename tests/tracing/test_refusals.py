"""What a refusal says of a model that cannot be traced: our words first, torch's as a detail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import Plain, error_of, hand_written
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import BaseNotTraceable, NotTokenParallel


class Failing(Plain):
    """A model whose code does something with the hidden state that no row allows."""

    def __init__(self, what) -> None:
        super().__init__(layers=1)
        self.what = what

    def forward(self, ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False):
        """Logits."""
        return self.head(self.what(self.layers[0](self.embed(ids))))


def raises(hidden: Tensor) -> Tensor:
    """A model's own complaint."""
    raise LookupError("no such thing")


FAILURES = {
    "its code goes on by a number": lambda x: x if x.sum() > 0 else -x,
    "its code goes on by a number that it reads": lambda x: x[:, : torch.tensor(x.shape[1])],
    "its code joins tensors whose sizes do not fit": lambda x: x @ x.new_ones(7, 7),
    "its code needs an input that it is not given": lambda x: x * None.shape[0],
    "its code is called with other arguments": lambda x: raises(x, mask=None),
    "its code fails while a row is traced": raises,
    "its code makes a tensor on the CPU": lambda x: x + torch.arange(x.shape[1])[:, None],
    "its code makes a tensor on the CPU, and not": lambda x: x.where(torch.ones(32) > 0, x),
}


@pytest.mark.parametrize("words", sampled(FAILURES))
def test_a_refusal_is_in_our_words(words):
    """What, the line of model code, what may stand there, what to do; torch's text comes last."""
    text = error_of(lambda: compile(hand_written(Failing(FAILURES[words]))), BaseNotTraceable)
    first, *lines = text.splitlines()
    facts = [line.split("  ")[1] for line in lines if not line.startswith("    ")]

    assert words in first
    assert "Error" not in first
    assert "test_refusals.py" in text
    order = ["source", "expected", "in torch's words", "help"]
    assert [fact for fact in facts if fact in order] == [fact for fact in order if fact in facts]
    assert {"source", "expected", "help"} <= set(facts)


class Keyword(Plain):
    """A model with a module that is called like a keyword of Python."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.add_module("in", nn.Linear(32, 32))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.get_submodule("in")(self.embed(ids)))


def test_a_module_named_like_a_keyword_is_refused_by_name():
    """torch.export writes its graph as Python, in which `self.in` is no attribute."""
    jobs = hand_written(Keyword(), targets=["in"])

    text = error_of(lambda: compile(jobs), BaseNotTraceable)

    assert "has a name that torch.export cannot write as Python" in text
    assert "module            in" in text


def test_an_operator_without_a_rule_is_told_with_what_is_expected():
    """No name of torch's stands alone."""
    jobs = hand_written(Failing(lambda x: torch.roll(x, 1, 0)))

    text = error_of(lambda: compile(jobs), NotTokenParallel)

    assert "an operator that computes each line by itself" in text
    assert "nobody has said how it treats the tokens" in text
