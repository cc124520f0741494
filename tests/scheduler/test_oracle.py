"""The exact grouping of few jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.toy import drawn, state
from tlora_fx.errors import TooManyForOracle
from tlora_fx.scheduler.oracle import best_grouping, subsets
from tlora_fx.scheduler.policies import find_policy


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
    worth = subsets(moment, jobs, objective).worth

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
    """Thirteen jobs of one base are more subsets than it looks at."""
    with pytest.raises(TooManyForOracle, match="13 jobs"):
        find_policy("oracle").decide(state(drawn(13), 128))
