"""The roofline that was made of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.synthetic_roofline import SyntheticEstimator
from tests.cost.estimators import some
from tlora_fx.cost.load import Demand

JOBS = st.builds(
    some,
    rank=st.sampled_from([2, 4, 8, 16]),
    batch=st.sampled_from([1, 2, 4, 8]),
    length=st.sampled_from([128, 256, 512]),
)
GROUPS = st.lists(JOBS, min_size=1, max_size=10).map(Demand.total)
TIERS = st.sampled_from(["node", "rack"])


def seconds(of, demand, gpus, tier="node"):
    return float(of.seconds("any", demand.row()[None], np.array([gpus]), [tier])[0])


@example(Demand.total([some(batch=8, length=512)] * 8), 1, "node")
@given(GROUPS, st.integers(1, 64), TIERS)
def test_the_terms_add_up(group, gpus, tier):
    """To the seconds that a batch of groups gets; the memory adds up too, and may be too much."""
    of = SyntheticEstimator()
    told = of.explain("any", group, gpus, tier)

    assert sum(told.memory.values()) == pytest.approx(told.memory_bytes)
    if not np.isfinite(seconds(of, group, gpus, tier)):
        assert (told.layout, told.terms) == (None, {})
        assert told.memory_bytes > of.memory_bytes
        return
    assert sum(told.terms.values()) == pytest.approx(seconds(of, group, gpus, tier), rel=1e-12)
    assert told.estimated
    assert 0 < told.busy <= 1


@given(JOBS, JOBS)
def test_two_jobs_take_longer_than_each_and_shorter_than_both(one, other):
    """On one GPU, where nothing is dealt out."""
    of = SyntheticEstimator()
    together = seconds(of, one.plus(other), 1)
    each = seconds(of, one, 1), seconds(of, other, 1)

    assert max(each) < together < sum(each)


def test_the_numbers_of_the_field_notes_prototype_come_out():
    """Two jobs, 8 samples of 256 and 4 of 512 tokens, in a node, and over two with many ranks."""
    of = SyntheticEstimator()
    small = Demand(jobs=2, samples=12, tokens=4096, parameters=2.6e6 * 24)
    large = Demand(jobs=2, samples=16, tokens=8192, parameters=2.6e6 * 32)

    assert seconds(of, small, 4) == pytest.approx(0.23126357650051282, rel=1e-9)
    assert seconds(of, large, 16, "rack") == pytest.approx(0.1318404973702564, rel=1e-9)


def test_what_has_no_room_takes_for_ever():
    """And it is said how much it needs."""
    of = SyntheticEstimator()
    told = of.explain("any", some(batch=1, length=40_000), 1, "gpu")

    assert told.seconds == float("inf")
    assert "needs" in told.why_not


def test_without_a_kernel_fuser_each_job_is_paid():
    """More than in shared kernels."""
    group = Demand.total([some()] * 8)

    assert seconds(SyntheticEstimator(fused=False), group, 1) > seconds(
        SyntheticEstimator(), group, 1
    )


def test_solo_times_are_kept_and_not_counted():
    """Only what policies ask for counts."""
    of = SyntheticEstimator()

    assert of.solo("any", some(), 2) == of.solo("any", some(), 2)
    assert of.evaluations == 0
