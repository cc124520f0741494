"""The numbers of a replay: distributions, thirds, series in bounded memory, JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.looping import Plain, request
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.simulator.metrics import COLUMNS, BucketedSum, Distribution, thirds
from tlora_fx.simulator.replay import OPTIONS, replay


def summary(**options):
    loop = replace(OPTIONS, **options)
    """Of six jobs on four GPUs."""
    jobs = [
        request(f"j{place}", submitted=10.0 * place, steps=50 * (place + 1)) for place in range(6)
    ]
    return replay(jobs, find_policy("megatron"), Plain(), Cluster(4, 4), options=loop).summary


def test_a_distribution_of_nothing_is_all_zero():
    """It has no quantiles."""
    found = Distribution.of([])

    assert (found.count, found.mean, found.quantiles) == (0, 0.0, ())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_quantiles_ascend_from_least_to_most(numbers):
    """They are the CDF, turned over."""
    found = Distribution.of(numbers)

    assert list(found.quantiles) == sorted(found.quantiles)
    assert (found.quantiles[0], found.quantiles[100]) == (min(numbers), max(numbers))
    assert found.count == len(numbers)


@given(st.lists(st.floats(0, 100), min_size=3, max_size=60))
def test_thirds_are_thirds(costs):
    """As many jobs are small as large, and none that is small costs more than one that is not."""
    given_, third = np.array(costs), thirds(np.array(costs))

    counts = np.bincount(third, minlength=3)
    assert counts.max() - counts.min() <= 1
    for a, b in ((0, 1), (1, 2)):
        assert given_[third == a].max() <= given_[third == b].min()


@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 10)), min_size=1, max_size=20
    )
)
def test_a_series_loses_no_amount(flows):
    """However long it grows, its buckets hold what was put in."""
    series = BucketedSum(0.0, buckets=16)
    for start, length, rate in flows:
        series.add(start, start + length, np.full(len(COLUMNS), rate))

    total = sum(length * rate for _, length, rate in flows)
    assert series.sums[:, 0].sum() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert len(series.sums) == 16


def test_a_series_puts_amounts_where_they_flow():
    """Two buckets of 60 s; a flow from 30 to 90 is half in each."""
    series = BucketedSum(0.0, buckets=4)
    series.add(30.0, 90.0, np.ones(len(COLUMNS)))

    assert series.sums[:, 0].tolist() == [30.0, 30.0, 0.0, 0.0]


def test_the_series_of_a_replay_adds_up_to_its_totals():
    """Allocated GPUs, samples and jobs, bucket by bucket, are those of the whole."""
    found = summary()
    series, whole = found.series, found.whole

    def over_time(name):
        return sum(getattr(point, name) * point.seconds for point in series)

    assert over_time("capacity_gpus") == pytest.approx(whole.capacity_gpu_seconds)
    assert over_time("allocated_gpus") == pytest.approx(whole.allocated_gpu_seconds)
    assert over_time("busy_gpus") == pytest.approx(whole.busy_gpu_seconds)
    assert over_time("samples_per_second") == pytest.approx(whole.samples)
    assert over_time("weighted_speedup") == pytest.approx(whole.lone_seconds)
    assert over_time("running_jobs") == pytest.approx(6 * found.run_seconds.mean)
    assert over_time("waiting_jobs") == pytest.approx(6 * found.queue_seconds.mean)


def test_a_summary_is_json():
    """With rates and shares, and every number finite."""
    found = summary().as_json()

    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["whole"]["allocated_share"] == found["whole"]["allocated_share"]
    assert len(found["completion_seconds"]["quantiles"]) == 101


def test_alone_nobody_is_slowed_down():
    """Each job on its own GPUs: slowdown 1, weighted speed-up as many as run."""
    found = summary(switch_seconds=0.0)

    assert found.slowdown.most == pytest.approx(1.0)
    assert found.violations == 0
    assert found.whole.weighted_speedup == pytest.approx(
        found.run_seconds.mean * 6 / found.whole.seconds
    )
    assert found.whole.lone_work_share == pytest.approx(found.whole.allocated_share)


def test_violations_are_jobs_that_others_slow_down_too_much():
    """mLoRA looks at no bound: eight heavy jobs in pairs of groups break theirs."""
    jobs = [request(f"j{place}", max_slowdown=1.05, tokens=4000.0) for place in range(8)]
    policy = find_policy("mlora-fifo", gpus="widest")
    found = replay(jobs, policy, Plain(), Cluster(4, 4)).summary

    assert found.violations == 8
    assert found.violating_job_share == 1.0
    assert found.slowdown.mean > 1.05


def test_switches_are_formations_of_jobs_that_ran_before():
    """Jobs that run from their begin to their end cost no switch."""
    found = summary()

    assert (found.formations, found.switches, found.moves) == (6, 0, 0)
    assert found.whole.switch_gpu_seconds == pytest.approx(6 * found.switch_seconds)
