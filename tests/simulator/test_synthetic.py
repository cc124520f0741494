"""The synthetic trace has AcmeTrace's marginals."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tlora_fx.errors import MarginalsFileError, ReplayChoiceWrong
from tlora_fx.simulator.synthetic import (
    MAX_ARRIVAL_CHANGE,
    Draw,
    fit_of_file,
    generate,
    gpu_table,
    rounder,
    shipped_fit,
)

MARGINALS = Path(__file__).parents[3] / "shared" / "data" / "acme" / "acme_marginals_exact.json"
#: The 99.9th percentile of chi-square for 5, 21 and 23 degrees of freedom.
CHI_SQUARE = {5: 20.5, 21: 46.8, 23: 49.7}


@pytest.fixture(scope="module")
def marginals():
    if not MARGINALS.exists():
        pytest.skip("the exact marginals are not at hand")
    return json.loads(MARGINALS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawn():
    """As many jobs as AcmeTrace has."""
    return generate(shipped_fit(), Draw(450_590, seed=1)).jobs


def chi_square(found, expected):
    found, expected = np.array(found, float), np.array(expected, float)
    return float(((found - expected) ** 2 / expected).sum())


def buckets(jobs):
    counts = Counter(int(np.ceil(np.log2(job.duration_seconds))) for job in jobs)
    return [counts[place] for place in range(22)]


def test_durations_are_acme_s(marginals, drawn):
    """By powers of two, over all jobs."""
    expected = np.diff(marginals["duration_s_le_2^i_counts"]["Seren"], prepend=0)

    assert chi_square(buckets(drawn), expected) < CHI_SQUARE[21]


def test_types_are_acme_s(marginals, drawn):
    """And the durations of each type."""
    found = Counter(job.type for job in drawn)
    expected = marginals["Seren_type_jobs"]

    assert chi_square([found[name] for name in expected], list(expected.values())) < CHI_SQUARE[5]
    for name, cumulative in marginals["Seren_duration_le_2^i_by_type"].items():
        own = np.diff(cumulative, prepend=0)
        mine = buckets(job for job in drawn if job.type == name)
        kept = own > 5
        share = found[name] / own.sum()
        assert chi_square(np.array(mine)[kept], own[kept] * share) < CHI_SQUARE[21]


def test_gpu_counts_are_acme_s(marginals, drawn):
    """And so is the part of GPU-time that jobs of up to so many GPUs take."""
    gpus, jobs, shares = gpu_table(
        marginals["gpu_num_cdf_jobs"]["Seren"], marginals["gpu_num_cdf_gputime"]["Seren"]
    )
    found = Counter(job.gpus for job in drawn)
    assert chi_square([found[count] for count in gpus], jobs) < CHI_SQUARE[23]

    time = Counter()
    for job in drawn:
        time[job.gpus] += job.duration_seconds * job.gpus
    mine = np.cumsum([time[count] for count in gpus]) / time.total()
    assert np.abs(mine - np.cumsum(shares)).max() < 0.1


def test_the_shipped_fit_is_the_fit_of_the_marginals(marginals):
    """To the digits that are written."""
    fitted, shipped = fit_of_file(MARGINALS), shipped_fit()

    assert (fitted.types, fitted.gpus) == (shipped.types, shipped.gpus)
    for name in ("jobs_per_second", "type_shares", "buckets", "log_weights", "tilts"):
        np.testing.assert_allclose(getattr(fitted, name), getattr(shipped, name), atol=2e-6)


def test_a_seed_gives_one_trace_and_another_seed_another():
    """Jobs, arrivals and GPUs."""
    fit = shipped_fit()

    assert generate(fit, Draw(50)).jobs == generate(fit, Draw(50)).jobs
    assert generate(fit, Draw(50)).jobs != generate(fit, Draw(50, seed=1)).jobs


@pytest.mark.parametrize(("intensity", "burstiness"), [(1.0, 1.0), (4.0, 1.0), (1.0, 3.0)])
def test_arrivals_have_the_rate_and_variation_that_were_asked_for(intensity, burstiness):
    """Within what so many draws leave."""
    trace = generate(shipped_fit(), Draw(20_000, intensity, burstiness))

    gaps = np.diff([job.submitted for job in trace.jobs])
    mean = 1 / (shipped_fit().jobs_per_second * intensity)
    assert gaps.mean() == pytest.approx(mean, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1)


def test_it_is_labelled():
    """The trace says that it is synthetic, and what was assumed."""
    trace = generate(shipped_fit(), Draw(10))

    assert trace.synthetic
    assert trace.source.startswith("synthetic")
    assert "AcmeTrace" in trace.source
    assert all(rule.startswith("synthetic") for rule in trace.rules)


def test_a_step_of_the_distribution_is_its_roundest_number():
    """Between 511 and 513 it is 512."""
    assert [rounder(511, 513), rounder(47, 49), rounder(8, 15), rounder(0, 1)] == [512, 48, 12, 1]


@pytest.mark.parametrize(
    "draw", [Draw(0), Draw(1, intensity=1e-300), Draw(1, burstiness=1e308), Draw(1, float("inf"))]
)
def test_what_cannot_be_drawn_is_refused(draw):
    """No jobs, and arrivals that numbers cannot hold."""
    with pytest.raises(ReplayChoiceWrong, match="cannot be drawn"):
        generate(shipped_fit(), draw)


def test_the_greatest_changes_of_arrivals_can_be_drawn():
    """And the least."""
    for intensity, burstiness in itertools.product(
        (1 / MAX_ARRIVAL_CHANGE, MAX_ARRIVAL_CHANGE), repeat=2
    ):
        trace = generate(shipped_fit(), Draw(100, intensity, burstiness))
        assert all(0 <= job.submitted < 1e15 and job.month >= 0 for job in trace.jobs)


@pytest.mark.parametrize("text", ["", "[]", '{"source": "x"}', '{"log_weights": []}'])
def test_files_without_marginals_are_refused(tmp_path, text):
    """Empty, of another form, or without counts."""
    path = tmp_path / "marginals.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(MarginalsFileError):
        fit_of_file(path)
