"""Hand-written models in less usual forms train as alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.sampled import sampled
from tests.silence.cases.forms import FORMS
from tests.silence.modules import HIDDEN, decoder
from tests.silence.oracle import judge


@pytest.mark.parametrize("name", sampled(FORMS))
def test_a_right_form_trains_as_alone(name):
    """In batch form, for it takes no positions."""
    verdict = judge(FORMS[name], "auto")

    assert verdict.outcome == "equal", str(verdict)


def chosen(layer, x):
    """Mixtral's first loop over experts: the tokens of each, gathered and added."""
    flat = x.reshape(-1, HIDDEN)
    out, first = torch.zeros_like(flat), F.one_hot(flat[:, :2].argmax(-1), 2)
    for expert in range(2):
        index = torch.where(first[:, expert] > 0)[0]
        out.index_add_(0, index, flat[index] * (expert + 1))
    return out.view_as(x)


def test_a_loop_over_experts_is_refused_in_one_sentence():
    """It lists places of the row by values."""
    verdict = judge(decoder(chosen), "auto")

    assert verdict.outcome == "refused"
    assert "operator: aten.where.default" in verdict.words
