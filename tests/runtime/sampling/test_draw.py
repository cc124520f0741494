"""Tokens by temperature, top-k and top-p, against what the words say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_fx.runtime.sampling.draw import CHUNK, DrawOptions, draw_tokens, numbers_of


def by_hand(logits, number, options):
    """One token of one row of distinct logits, in plain Python numbers."""
    if options.temperature == 0:
        return max(range(len(logits)), key=logits.__getitem__)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = order[: options.top_k or len(order)]
    weights = {
        token: np.exp((logits[token] - max(logits)) / options.temperature) for token in order
    }
    total, before, kept = sum(weights.values()), 0.0, []
    for token in order:
        if before >= options.top_p:
            break
        kept.append(token)
        before += weights[token] / total
    left = number * sum(weights[token] for token in kept)
    for token in sorted(kept):
        left -= weights[token]
        if left < 0:
            return token
    return max(kept)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tokens_are_those_of_the_definition(data):
    """Of a few rows at a time, each with its number."""
    options = DrawOptions(
        data.draw(st.sampled_from([0, 0.3, 1.0, 2.5])),
        data.draw(st.sampled_from([0, 1, 2, 5, 100])),
        data.draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
    )
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits, numbers = draw.normal(size=(3, 9)) * 2, draw.random(3)

    drawn = draw_tokens(torch.tensor(logits), torch.tensor(numbers), options)

    expected = [
        by_hand([*row], number, options) for row, number in zip(logits, numbers, strict=True)
    ]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("vocabulary", [CHUNK - 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_large_vocabulary_has_one_distribution_function(vocabulary, share):
    """Of whole chunks without a token too, and at the ends."""
    draw = np.random.default_rng(vocabulary)
    logits = draw.normal(size=(40, vocabulary)) * 3
    logits[draw.random(logits.shape) >= share] = -np.inf
    logits[:, vocabulary // 2] = 0.0
    numbers = np.concatenate([[0.0, np.nextafter(1.0, 0.0)], draw.random(38)])

    drawn = draw_tokens(torch.tensor(logits), torch.tensor(numbers), DrawOptions())

    weights = np.exp(logits - logits.max(1, keepdims=True))
    for row, number, token in zip(weights, numbers, drawn.tolist(), strict=True):
        ends = row.cumsum()
        before, after = ends[token] - row[token], ends[token]
        assert row[token] > 0
        slack = 1e-12 * ends[-1]
        assert before - slack <= number * ends[-1] <= after + slack


@pytest.mark.parametrize("number", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_token_that_is_left_out_is_never_drawn(number):
    """Not at the ends of the distribution either."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])

    drawn = draw_tokens(logits, torch.tensor([number], dtype=torch.float64), DrawOptions())

    assert drawn.item() in (1, 3)


def test_tokens_come_as_often_as_they_are_likely():
    """20,000 numbers of one completion are uniform."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(20000, -1)
    numbers = torch.tensor(numbers_of(7, [1, 2], 0, 0, 20000))

    counts = torch.bincount(draw_tokens(logits, numbers, DrawOptions()), minlength=4) / 20000

    torch.testing.assert_close(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), rtol=0, atol=0.015)


def test_numbers_belong_to_a_seed_a_prompt_and_a_sample():
    """Each of them gives others, and fewer are the beginning of more."""
    asked = [(1, [1, 2], 0, 0), (2, [1, 2], 0, 0), (1, [1, 3], 0, 0), (1, [1, 2], 1, 0)]
    asked += [(1, [1, 2], 0, 1), (-1, [1, 2], 0, 0), (2**70, [1, 2], 0, 0)]

    drawn = [tuple(numbers_of(*each, 4)) for each in asked]

    assert len(set(drawn)) == len(asked)
    assert tuple(numbers_of(*asked[0], 9))[:4] == drawn[0]
