"""The exact grouping of few jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.toy import drawn, state
from tlora_fx.errors import TooManyForOracle
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.policies.oracle import _partition, best_grouping, worths


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for place in range(len(parts)):
            yield [*parts[:place], [first, *parts[place]], *parts[place + 1 :]]


@pytest.mark.parametrize("objective", ["weighted", "throughput"])
def test_it_finds_what_trying_every_partition_finds(objective):
    """The dynamic program over subsets agrees with brute force."""
    moment = state(drawn(6, seed=5))
    jobs = list(moment.jobs.values())
    worth = worths(moment, jobs, objective)

    every = [sum(worth[sum(1 << i for i in g)] for g in p) for p in partitions(list(range(6)))]

    assert best_grouping(moment, objective).worth == pytest.approx(max(every))


def test_jobs_of_two_bases_are_two_problems():
    """Each base's jobs are grouped among themselves."""
    both = [*drawn(5, seed=1), *drawn(5, seed=1, base="other")]
    both = [
        one if one.base == "base" else type(one)(f"x{one.name}", "other", one.demand, one.gpus, 1)
        for one in both
    ]
    found = best_grouping(state(both, 128))

    assert found.worth == pytest.approx(2 * best_grouping(state(drawn(5, seed=1))).worth)


def test_too_many_jobs_are_refused():
    """Seventeen jobs of one base are more subsets than it looks at."""
    with pytest.raises(TooManyForOracle, match="17 jobs"):
        find_policy("oracle").decide(state(drawn(17), 128))


@given(
    st.integers(1, 9).flatmap(
        lambda count: st.lists(
            st.sampled_from([-inf, 0.0, 1.0, 2.0, 3.5, 7.25]),
            min_size=1 << count,
            max_size=1 << count,
        )
    )
)
def test_whatever_subsets_are_worth_the_best_partition_is_found(worth):
    """Against a plain recursion; its groups are a partition of that worth."""
    count = len(worth).bit_length() - 1
    # Each alone is always allowed, as memory has been looked at before.
    table = [max(one, 0.0) if index.bit_count() == 1 else one for index, one in enumerate(worth)]

    @lru_cache(None)
    def best(mask):
        if not mask:
            return 0.0
        low, found, part = mask & -mask, -inf, mask
        while part:
            if part & low:
                found = max(found, table[part] + best(mask ^ part))
            part = (part - 1) & mask
        return found

    masks, value = _partition(np.array(table), count)
    assert value == best((1 << count) - 1)
    assert sum(masks) == (1 << count) - 1
    assert sum(mask.bit_count() for mask in masks) == count
    assert sum(table[mask] for mask in masks) == value


def test_sixteen_jobs_are_grouped_no_worse_than_by_searching():
    """The default policy comes near, and is never above what is called the best."""
    moment = state(drawn(16, seed=7), 256)
    found = best_grouping(moment)
    greedy = find_policy("tlora").decide(moment)
    worth = sum(
        moment.jobs[name].solo_seconds / group.seconds
        for group in greedy.groups
        for name in group.jobs
    )

    assert sorted(name for group in found.groups for name in group) == sorted(moment.jobs)
    assert 0.8 * found.worth < worth <= found.worth * (1 + 1e-9)
