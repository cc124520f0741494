"""Fair shares of cycles: equal in tokens, without idling, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.training.cycle import FairShares

BUDGET = 100
SIZES = st.lists(st.integers(1, 250), min_size=1, max_size=6)


@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_a_cycle_is_filled_and_no_more(sizes, seed):
    """What is left out does not fit; one piece that is larger than the budget runs alone."""
    draw, shares = random.Random(seed), FairShares(BUDGET)
    for _ in range(20):
        costs = {f"{n}": draw.choice(sizes) for n in range(draw.randint(1, 5))}
        chosen = shares.choose(costs)
        used = sum(costs[name] for name in chosen)
        assert chosen
        assert used <= BUDGET or len(chosen) == 1
        assert all(used + costs[name] > BUDGET for name in costs.keys() - set(chosen))


@given(sizes=st.lists(SIZES, min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_models_that_always_wait_have_equal_tokens_while_they_contend(sizes, seed):
    """Apart by a few of the largest pieces, unless whoever has fewer has had as many turns.

    A cycle takes one piece of a model, so small ones cannot add up to a large one in the same time.
    """
    draw, shares = random.Random(seed), FairShares(BUDGET)
    had, turns = Counter(), Counter()
    queues = {f"{n}": [draw.choice(own) for _ in range(1000)] for n, own in enumerate(sizes)}
    largest = max(max(own) for own in sizes)
    for _ in range(300):
        costs = {name: own[-1] for name, own in queues.items()}
        chosen = shares.choose(costs)
        for name in chosen:
            had[name] += queues[name].pop()
            turns[name] += 1
        if len(chosen) == len(costs):
            had.clear()  # there was room for all
            turns.clear()
        for one, other in permutations(queues, 2):
            if had[one] < had[other] - 3 * (largest + BUDGET):
                assert turns[one] >= turns[other] - 3


def test_a_small_request_does_not_wait_for_large_ones():
    """It is among the first of the next cycle, though five large ones were there before."""
    shares = FairShares(BUDGET)
    large = {f"large-{n}": 90 for n in range(5)}
    for _ in range(7):
        shares.choose(large)

    assert "small" in shares.choose({**large, "small": 5})[:2]


def test_who_goes_away_after_much_owes_it_still():
    """One that sends its next large piece only when the last is answered gains nothing."""
    shares, had = FairShares(BUDGET), Counter()
    for cycle in range(400):
        costs = {"steady": 60, "other": 60} | ({"leaver": 60} if cycle % 2 else {})
        for name in shares.choose(costs):
            had[name] += 60

    assert had["leaver"] <= had["steady"] + 3 * BUDGET
