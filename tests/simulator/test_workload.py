"""Jobs of a trace, by choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.errors import ReplayChoiceWrong, TraceEmpty
from tlora_fx.scheduler.state import JobRequest
from tlora_fx.simulator.sweep import (
    Choices,
    batch_by_gpus,
    checked,
    option_rows,
    workload_of,
)
from tlora_fx.simulator.synthetic import Draw, generate, shipped_fit
from tlora_fx.simulator.traces import Trace, TraceJob


class Quarter:
    """Each step takes a quarter of a second; nothing of more than 64 samples fits."""

    def solo(self, base, demand, gpus):
        return 0.25 if demand.samples <= 64 else float("inf")


def trace(*jobs):
    return Trace(tuple(jobs), "by hand", "acme")


def made(given, cluster=None, **choices):
    return workload_of(given, checked(Choices, choices), cluster or Cluster(128), Quarter())


ONE = TraceJob("a", 100.0, 60.0, 8, "Eval", "COMPLETED")
TWO = TraceJob("b", 160.0, 0.0, 1, "SFT", "FAILED")


def test_steps_reproduce_the_duration_of_a_job_alone():
    """At least one step; no duration is one step."""
    found = made(trace(ONE, TWO)).requests

    assert [(job.name, job.gpus, job.steps) for job in found] == [("a", 8, 240), ("b", 1, 1)]


def test_submissions_are_counted_from_the_first_job():
    """And scaled; without rebasing they are the trace's."""
    assert [job.submitted for job in made(trace(ONE, TWO)).requests] == [0.0, 60.0]
    assert [job.submitted for job in made(trace(ONE, TWO), scale=2.0).requests] == [0.0, 30.0]
    assert [job.submitted for job in made(trace(ONE, TWO), rebase=False).requests] == [100.0, 160.0]


def test_jobs_beyond_the_cluster_are_left_out_and_counted():
    """Or, on request, given all of it."""
    large = ONE._replace(name="l", gpus=16)

    found = made(trace(ONE, large), Cluster(8))
    assert [job.name for job in found.requests] == ["a"]
    assert found.dropped.by_rule == {"larger than the cluster of 8 GPUs": 1}
    assert made(trace(ONE, large), Cluster(8), too_large="clip").requests[1].gpus == 8


def test_jobs_without_gpus_are_left_out_and_counted():
    """Or, on request, given one."""
    none = ONE._replace(name="n", gpus=0)

    assert made(trace(ONE, none)).dropped.by_rule == {"asks for no GPU": 1}
    assert made(trace(ONE, none), cpu_jobs="one-gpu").requests[1].gpus == 1


def test_types_and_states_choose_jobs():
    """What is not asked for is counted."""
    found = made(trace(ONE, TWO), types=("SFT",))
    assert [job.name for job in found.requests] == ["b"]
    assert found.dropped.by_rule == {"a type that is not asked for: Eval": 1}
    assert [job.name for job in made(trace(ONE, TWO), states=("COMPLETED",)).requests] == ["a"]


def test_a_trace_of_which_nothing_is_left_is_refused():
    """With the reasons."""
    with pytest.raises(TraceEmpty, match="larger than the cluster of 4 GPUs"):
        made(trace(ONE), Cluster(4))


def test_jobs_that_fit_nowhere_are_left_out():
    """As the estimator says."""
    found = made(trace(ONE, TWO), batches=(4, 128), ranks=(8,), seed=2)

    kept, dropped = len(found.requests), found.dropped.by_rule.total()
    assert kept + dropped == 2
    assert set(found.dropped.by_rule) <= {"does not fit into the memory of its GPUs"}


def test_what_is_drawn_is_uniform():
    """Bases, ranks and batches, within what 4,000 draws leave."""
    jobs = generate(shipped_fit(), Draw(4000))
    found = made(jobs)

    for of, values in (
        (lambda job: job.base, ("llama-3-8b", "qwen3-8b")),
        (lambda job: job.demand.samples, (1.0, 2.0, 4.0, 8.0)),
        (lambda job: job.demand.rank_tokens / job.demand.site_tokens, (2.0, 4.0, 8.0, 16.0)),
    ):
        counts = Counter(of(job) for job in found.requests)
        assert set(counts) == set(values)
        share = 1 / len(values)
        assert all(abs(count / len(found.requests) - share) < 0.03 for count in counts.values())


def test_a_batch_by_gpus_is_the_largest_not_above_them():
    """And the smallest where all are above."""
    assert [batch_by_gpus((1, 2, 4, 8), gpus) for gpus in (1, 3, 8, 64)] == [1, 2, 8, 8]
    assert batch_by_gpus((4, 8), 1) == 4

    found = made(trace(ONE, TWO), batch_rule="gpus").requests
    assert [job.demand.samples for job in found] == [8.0, 1.0]


def test_samples_are_like_gsm8k_s():
    """Typical lengths have the asked mean; drawn ones come near it, and p95 near 228."""
    jobs = generate(shipped_fit(), Draw(3000))

    typical = made(jobs).requests
    assert all(abs(job.demand.tokens / job.demand.samples - 130) <= 1 for job in typical)
    drawn = made(jobs, lengths="drawn", batches=(1,)).requests
    lengths = sorted(job.demand.tokens for job in drawn)
    assert sum(lengths) / len(lengths) == pytest.approx(130, rel=0.03)
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(228, rel=0.06)
    assert lengths[-1] <= 422
    assert all(job.longest == job.demand.tokens for job in drawn)


def test_a_job_stays_the_same_job_whatever_else_is_left_out():
    """A smaller cluster has the same jobs, less those that are too large."""
    jobs = generate(shipped_fit(), Draw(500))
    large = {job.name: job for job in made(jobs, rebase=False).requests}
    small = made(jobs, Cluster(4), rebase=False).requests

    assert 0 < len(small) < len(large)
    assert all(large[job.name] == job for job in small)


def test_our_own_trace_is_replayed_as_it_is_written():
    """No draw touches it."""
    request = JobRequest("a", "llama-3-8b", demand_of("llama-3-8b", 4, 2, [100]), 8, 7, 100.0)
    own = replace(trace(ONE), requests={"a": request}, format="own")

    assert made(own, seed=3, rebase=False).requests == (request,)
    assert made(own).requests == (replace(request, submitted=0.0),)


def test_a_deadline_moves_with_its_job():
    """It stays as far behind the submission."""
    request = JobRequest(
        "a", "llama-3-8b", demand_of("llama-3-8b", 4, 2, [100]), 8, 7, 100.0, deadline=150.0
    )
    own = replace(trace(ONE), requests={"a": request}, format="own")

    (found,) = made(own, scale=2.0).requests
    assert (found.submitted, found.deadline) == (0.0, 50.0)


@given(seed=st.integers(0, 10**6))
def test_a_seed_gives_the_same_jobs(seed):
    """Twice."""
    jobs = generate(shipped_fit(), Draw(20, seed=seed))

    assert made(jobs, seed=seed).requests == made(jobs, seed=seed).requests


@pytest.mark.parametrize(
    "choices",
    [
        {"scale": 0.0},
        {"bases": ()},
        {"ranks": (0,)},
        {"mean_tokens": 1.0},
        {"max_tokens": 100},
        {"max_slowdown": 0.9},
        {"too_large": "keep"},
        {"lengths": "long"},
    ],
)
def test_choices_that_make_no_sense_are_refused(choices):
    """With the option's name."""
    with pytest.raises(ReplayChoiceWrong, match="--" + next(iter(choices)).replace("_", "-")):
        made(trace(ONE), **choices)


def test_every_choice_is_told():
    """With its value; a new choice is described."""
    told = {name.replace("-", "_") for name, _, _ in option_rows(Choices, Choices())}

    assert told | {"seed"} == set(Choices.__dataclass_fields__)
