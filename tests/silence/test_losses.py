"""No base whose own loss is another one than the jobs' trains without a word."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.silence.losses import (
    OTHER,
    SAME,
    differs,
    drawn,
    of_recipe,
    recipes,
    verdict_on,
    with_loss,
)

#: So many drawn recipes are tried in each run of the tests; `make slow` tries all.
QUICK = 6


@pytest.mark.parametrize("name", OTHER)
def test_another_loss_is_refused(name):
    """Terms, weights, other means, and a gradient alone."""
    module = with_loss(OTHER[name])

    verdict = verdict_on(module)

    assert differs(module)
    assert verdict.startswith("refused: error[T0259]"), verdict


@pytest.mark.parametrize("name", SAME)
def test_the_same_loss_in_other_words_passes(name):
    """By a mask, in chunks, written out."""
    assert verdict_on(with_loss(SAME[name])) == "equal"


def cases():
    """The seeds of sixty recipes."""
    for number in range(60):
        marks = [pytest.mark.slow] if number >= QUICK else []
        yield pytest.param(number, marks=marks, id=f"recipe{number}")


@pytest.mark.parametrize("number", list(cases()))
def test_a_drawn_loss_is_equal_refused_or_told(number):
    """Against the same loss on real numbers."""
    recipe = drawn(number)
    module = with_loss(of_recipe(recipe))

    assert verdict_on(module) != "equal" or not differs(module), recipe


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(recipe=recipes())
def test_many_losses_are_equal_refused_or_told(recipe):
    """The same for others each time."""
    module = with_loss(of_recipe(recipe))

    assert verdict_on(module) != "equal" or not differs(module)
