"""Halving a row of states."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.tools.bisect import first_bad


@pytest.mark.parametrize("states", range(1, 41))
def test_every_culprit_is_found_in_as_few_runs_as_can_be(states):
    """Whichever state is the first bad one, or none."""
    for culprit in range(states + 1):
        runs = []

        def judge(place, culprit=culprit, runs=runs):
            runs.append(place)
            return "bad" if place >= culprit else "good"

        found = first_bad(states, judge)

        assert (found.good, found.bad) == (culprit - 1, culprit)
        assert len(runs) == len(set(runs)) <= ceil(log2(states + 1))


def test_twelve_passes_take_four_runs():
    """Their thirteen states; the fifth run confirms."""
    assert ceil(log2(13 + 1)) + 1 == 5


@given(st.integers(1, 30), st.data())
def test_skipped_states_are_never_blamed_for_sure(states, data):
    """What is told good was judged good, and what is told bad was judged bad."""
    culprit = data.draw(st.integers(0, states))
    skipped = data.draw(st.sets(st.integers(0, states - 1)))
    verdicts = {}

    def judge(place):
        told = "skip" if place in skipped else "bad" if place >= culprit else "good"
        verdicts[place] = told
        return told

    found = first_bad(states, judge)

    assert found.good < culprit <= found.bad
    assert verdicts.get(found.good, "good") == "good"
    assert verdicts.get(found.bad, "bad") == "bad"
    assert set(range(found.good + 1, found.bad)) <= skipped


def test_the_last_state_need_not_be_judged_again():
    """Where it is known to be bad."""
    asked = []

    found = first_bad(3, lambda place: asked.append(place) or "good", last_is_bad=True)

    assert (found.good, found.bad) == (1, 2)
    assert 2 not in asked
