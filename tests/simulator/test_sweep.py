"""Many replays: what is planned, and that each is done once."""

from __future__ import annotations

import pickle

import pytest

from tests import forked
from tests.simulator.replayed import base
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import PolicyOptionWrong, ProfileMismatch, UnknownPolicy
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.simulator.report import Report, page
from tlora_fx.simulator.sweep import (
    SCALES,
    SWEEPS,
    Choices,
    JobSource,
    Scenario,
    plan_of,
    run,
    run_all,
)

FEW = Scenario("megatron", source=JobSource(jobs=12), cluster=Cluster(64))


def test_each_policy_is_replayed_with_each_seed():
    """The seeds are those of the choices too."""
    plan = plan_of(base(seed=3), ("tlora", "megatron"), 2)

    assert [(one.policy, one.seed, one.choices.seed) for one in plan.main] == [
        ("tlora", 3, 3), ("megatron", 3, 3), ("tlora", 4, 4), ("megatron", 4, 4),
    ]  # fmt: skip


def test_sweeps_vary_one_thing_each():
    """Arrivals, GPUs, months or densities, nano-batches of our policy."""
    plan = plan_of(base(), ("tlora", "megatron"), 5, SWEEPS)

    values = {name: tuple(value for value, _ in rows) for name, rows in plan.sweeps.items()}
    assert values == {
        "scale": SCALES,
        "cluster": (32, 64, 128, 256),
        "months": (1.0, 2.0, 4.0),
        "nano": (1, 2, 4, 8),
    }
    assert all(one.seed == 0 for one in plan.scenarios()[10:])
    assert {one.policy for _, row in plan.sweeps["nano"] for one in row} == {"tlora"}


def test_a_trace_with_months_is_replayed_month_by_month():
    """The first three."""
    source = JobSource(trace="some.csv")
    plan = plan_of(Scenario("tlora", source=source), ("tlora",), 1, ("months",), months=6)

    assert [row[0].month for _, row in plan.sweeps["months"]] == [1, 2, 3]


def test_a_replay_that_two_figures_need_is_done_once():
    """128 GPUs of the sweep are the main comparison's."""
    plan = plan_of(FEW, ("megatron",), 1, ("cluster",), sizes=(32, 64))
    done = []

    found = run_all(plan.scenarios(), 1, done.append)
    assert len(plan.scenarios()) == 3
    assert len(found) == len(done) == 2


def test_scenarios_and_outcomes_travel_between_processes():
    """Two processes give what one gives."""
    plan = plan_of(FEW, ("megatron", "mlora-fifo"), 1)

    one = run_all(plan.main, 1)
    with forked.interpreter():
        two = run_all(plan.main, 2)

    assert pickle.loads(pickle.dumps(one)).keys() == two.keys()
    for scenario, outcome in one.items():
        other = two[scenario].summary
        assert other.completion_seconds == outcome.summary.completion_seconds
        assert other.whole == outcome.summary.whole


def test_a_policy_s_options_stand_behind_its_name():
    """As YAML."""
    assert policy_of("megatron:backfill=true").backfill is True
    assert policy_of("mlora-fifo:cap=2").cap == 2
    with pytest.raises(UnknownPolicy):
        policy_of("nothing:at=all")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tlora:payback", "a number"),
        ("tlora:payback=much", "a number"),
        ("tlora:payback=.nan", "a number"),
        ("tlora:breadth=2.5", "a whole number"),
        ("megatron:backfill=1", "true or false"),
        ("mlora-fifo:cap=true", "a number"),
        ("mlora-fifo:cap=0", "at least 1"),
        ("tlora:objective=[", "NAME:OPTION=VALUE"),
    ],
)
def test_an_option_of_another_kind_is_refused(text, said):
    """With the kind that it has."""
    with pytest.raises(PolicyOptionWrong, match=said):
        policy_of(text)


def test_alone_on_a_large_cluster_jobs_last_as_long_as_in_the_trace():
    """Steps times T_solo is the duration, to half a step; none waits beyond a decision."""
    scenario = Scenario(
        "megatron",
        source=JobSource(jobs=20),
        cluster=Cluster(4096),
        choices=Choices(bases=("llama-3-8b",)),
        switch_seconds=0.0,
    )
    outcome = run(scenario)

    lasted = outcome.summary.run_seconds.mean
    assert lasted == pytest.approx(outcome.trace["mean_duration_seconds"], rel=0.01)
    assert outcome.summary.queue_seconds.most <= scenario.horizon


def test_a_gpu_without_measured_profiles_is_refused():
    """Unless estimates are asked for, which the page then says."""
    other = Scenario("megatron", source=JobSource(jobs=5), cluster=Cluster(128, gpu="a100"))
    with pytest.raises(ProfileMismatch):
        run(other)

    plan = plan_of(Scenario(**{
        name: getattr(other, name) for name in ("policy", "source", "cluster")
    }, allow_estimated=True), ("megatron",), 1)  # fmt: skip
    report = Report(plan, run_all(plan.main, 1))
    assert "allow-estimated</code></th><td>yes" in page(report)
