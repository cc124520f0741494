"""Policies, each by what is its own."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from benchmarks.synthetic_roofline import SyntheticEstimator
from tests.models import error_of
from tests.scheduler.toy import active, checked, demand, drawn, state
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import PluginBroken, PolicyOptionWrong, UnknownPolicy
from tlora_fx.scheduler.policies import POLICIES, find_policy
from tlora_fx.scheduler.policies.oracle import best_grouping
from tlora_fx.scheduler.search.objective import powers
from tlora_fx.scheduler.state import ChangeCosts, Group, JobRequest, SchedulerState, broken


def weighted(moment, decision) -> float:
    jobs = moment.jobs
    return sum(
        jobs[name].solo_seconds / one.seconds for one in decision.groups for name in one.jobs
    )


def small(name: str, **more) -> JobRequest:
    return JobRequest(name, "base", demand(1, 128, 2), 1, 1000, **more)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_found_by_its_name(name):
    """And says whether it stands for fused kernels."""
    policy = find_policy(name)

    assert policy.name == name
    assert isinstance(policy.fused, bool)
    assert policy.decide(state([])).groups == ()


def test_an_unknown_policy_gets_the_nearest_name():
    """With all names that there are."""
    with pytest.raises(UnknownPolicy, match="did you mean 'mlora-fifo'"):
        find_policy("mlora_fifo")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("a_lost_module:Policy", "ModuleNotFoundError"),
        ("fractions:Fraction", "fractions:Fraction is no dataclass"),
        ("math:pi", "math:pi is no class"),
    ],
)
def test_a_broken_policy_of_another_package_says_why(tmp_path, monkeypatch, target, told):
    """Which package, and what is wrong with it; other policies are found beside it."""
    info = tmp_path / "strangers-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[tlora_fx.policies]\nstranger = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    text = error_of(lambda: find_policy("stranger"), PluginBroken)

    assert "policy 'stranger' is broken" in text
    assert "strangers 1.2" in text
    assert told in text
    find_policy("tlora")


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("tlora", {"horizn": 3}, "no option 'horizn'"),
        ("tlora", {"payback": 0}, "payback > 0"),
        ("tlora", {"objective": "fast"}, "weighted"),
        ("mlora-fifo", {"cap": 0}, "at least 1"),
        ("mlora-memory", {"gpus": "all"}, "pooled"),
    ],
)
def test_a_wrong_option_is_named(name, options, told):
    """An option that is not there, and a value that cannot be."""
    with pytest.raises(PolicyOptionWrong, match=told):
        find_policy(name, **options)


def test_megatron_gives_each_job_what_it_asked_for():
    """Alone, first come first served, nobody overtaking."""
    moment = state(drawn(40, seed=2), 32)
    decision = find_policy("megatron").decide(moment)

    assert all(len(one.jobs) == 1 for one in decision.groups)
    started = [one.jobs[0] for one in decision.groups]
    assert started == list(moment.jobs)[: len(started)]
    assert len(find_policy("megatron", backfill=True).decide(moment).groups) >= len(started)


def test_mlora_fills_groups_of_four_in_order_of_arrival():
    """Jobs of one base, whatever their slowdown."""
    moment = state([small(f"s{index}", submitted=index) for index in range(10)], 16)
    decision = find_policy("mlora-fifo").decide(moment)

    assert [len(one.jobs) for one in decision.groups] == [4, 4, 2]
    assert decision.groups[0].jobs == ("s0", "s1", "s2", "s3")
    assert [one.gpus for one in decision.groups] == [4, 4, 2]


@pytest.mark.parametrize(("rows", "together"), [(0.0, True), (40.0, False)])
def test_a_job_that_is_evaluated_much_gets_no_quiet_neighbour(rows, together):
    """Its evaluations would slow the other one down more than that one allows."""
    noisy = small("noisy")
    measured = noisy.demand._replace(evaluation_rows=rows, evaluation_tokens=128 * rows)
    estimator = SyntheticEstimator(Cluster(2))
    jobs = active([small("quiet"), replace(noisy, demand=measured)], estimator)
    moment = SchedulerState(0.0, Cluster(2), estimator, jobs)
    decision = find_policy("tlora").decide(moment)

    assert (len(decision.groups) == 1) == together


def test_mlora_by_memory_stops_where_memory_does():
    """The widest job's GPUs hold as many jobs as fit."""
    big = demand(8, 512, 2)
    jobs = [JobRequest(f"b{index}", "base", big, 1, 100, index) for index in range(12)]
    moment = state(jobs, 16)
    decision = find_policy("mlora-memory", gpus="widest").decide(moment)

    assert len(decision.groups) > 1
    assert max(len(one.jobs) for one in decision.groups) > 1
    assert all(one.gpus == 1 for one in decision.groups)


def test_the_ablations_are_the_same_policies_told_of_other_kernels():
    """Without our kernels it groups as tlora does, without our scheduler as mLoRA does."""
    moment = state(drawn(20, seed=3), 64)

    def groups(name):
        return {one.jobs for one in find_policy(name).decide(moment).groups}

    assert groups("no-kernel-fuser") == groups("tlora")
    assert groups("no-scheduler") == groups("mlora-fifo")
    assert not find_policy("no-kernel-fuser").fused
    assert find_policy("no-scheduler").fused


def test_each_part_of_tlora_can_be_left_out():
    """No sharing; all GPUs that were asked for; nobody overtakes; no graphs."""
    moment = state(drawn(20, seed=3), 18)

    def decided(**options):
        return find_policy("tlora", **options).decide(moment)

    asked = {name: job.request.gpus for name, job in moment.jobs.items()}
    assert any(len(one.jobs) > 1 for one in decided().groups)
    assert all(len(one.jobs) == 1 for one in decided(share=False).groups)
    assert all(
        one.gpus == sum(asked[name] for name in one.jobs) for one in decided(release=False).groups
    )
    started = []
    for backfill in (False, True):
        apart = decided(share=False, release=False, backfill=backfill)
        started.append({name for one in apart.groups for name in one.jobs})
    assert started[0] == set(list(moment.jobs)[: len(started[0])])
    assert started[0] < started[1]
    assert not find_policy("no-graphs").graphs


@pytest.mark.parametrize("objective", ["weighted", "throughput"])
def test_tlora_comes_near_the_exact_optimum(objective):
    """On instances that the exact policy can solve; `benchmarks/optimality.py` has two hundred."""
    parts = []
    for seed in range(8):
        moment = state(drawn(10, seed), 128)
        decision = find_policy("tlora", objective=objective).decide(moment)
        jobs = moment.jobs
        worth = sum(
            (
                jobs[name].solo_seconds
                if objective == "weighted"
                else jobs[name].request.demand.samples
            )
            / one.seconds
            for one in decision.groups
            for name in one.jobs
        )
        parts.append(worth / best_grouping(moment, objective).worth)

    assert min(parts) > 0.85
    assert sum(parts) / len(parts) > 0.96


@pytest.mark.parametrize("count", [1, 2, 3, 16, 64, 128])
@pytest.mark.parametrize("warm", [True, False])
def test_the_paper_policy_evaluates_few_groups(count, warm):
    """At most 2 K log2 K in a round."""
    moment = state(drawn(count, seed=count), 512)
    before = moment.estimator.evaluations
    find_policy("tlora-paper", warm=warm).decide(moment)

    assert moment.estimator.evaluations - before <= 2 * count * log2(count)


def test_grouping_is_never_worse_than_training_apart():
    """Where there is room for all."""
    for seed in range(5):
        moment = state(drawn(12, seed), 128)
        apart = weighted(moment, find_policy("megatron").decide(moment))
        assert weighted(moment, find_policy("tlora").decide(moment)) >= apart - 1e-9
        assert weighted(moment, find_policy("tlora-paper").decide(moment)) >= apart - 1e-9


def test_jobs_that_wait_start_by_sharing():
    """On a full cluster more jobs run than each alone would leave room for, within bounds."""
    moment = state(drawn(60, seed=6), 32)
    apart = find_policy("megatron", backfill=True).decide(moment)
    shared = find_policy("tlora").decide(moment)

    checked(moment, shared)
    assert len(shared.waiting) < len(apart.waiting)
    for one in shared.groups:
        if len(one.jobs) > 1:
            members = [moment.jobs[name] for name in one.jobs]
            assert not broken(members, one.seconds, 0.0, lending=False)


@pytest.mark.parametrize("gpus", [6, 12, 20])
def test_no_gpu_is_idle_beside_a_job_that_could_start_alone(gpus):
    """A job whose group finds no room takes a free GPU by itself."""
    full = 0
    for seed in range(40):
        requests = [one for one in drawn(8, seed=seed) if one.gpus <= gpus]
        moment = state(requests, gpus)
        decision = find_policy("tlora").decide(moment)
        checked(moment, decision)

        idle = gpus - sum(one.gpus for one in decision.groups)
        waiting = [moment.jobs[name].request for name in decision.waiting]
        assert not idle or not any(one.gpus == 1 for one in waiting), seed
        full += bool(waiting) and not idle
    assert full


def test_gpus_beyond_the_knee_are_given_back():
    """Where any step will do, one sample does not hold eight GPUs."""
    tiny = JobRequest("tiny", "base", demand(1, 128, 2), 8, 100)
    moment = state([tiny], 8)
    [group] = find_policy("tlora", knee=10.0).decide(moment).groups

    assert group.gpus < 8


def test_a_running_group_is_left_alone_where_the_switch_costs_more():
    """A newcomer that would gain joins a group only if switching is cheap."""
    first = [small("a")]
    groups = find_policy("tlora").decide(state(first, 8)).groups
    both = [*first, small("b", submitted=999.0)]
    later = {"now": 1000.0, "groups": groups, "horizon": 60.0}
    dear = state(both, 8, switch_seconds=1e6, **later)
    cheap = state(both, 8, switch_seconds=0.0, **later)

    kept = find_policy("tlora", dwell_seconds=0.0).decide(dear)
    merged = find_policy("tlora", dwell_seconds=0.0).decide(cheap)

    assert set(groups) <= set(kept.groups)
    assert not set(groups) <= set(merged.groups)


def test_a_job_joins_a_group_that_keeps_its_gpus_where_only_that_is_cheap():
    """On the GPU that the group has, however dear forming it anew; and its dwell is as short."""
    groups = find_policy("tlora").decide(state([small("a")], 1)).groups
    both = [small("a"), small("b", submitted=10.0)]
    costs = ChangeCosts(0.0, 0.0, 0.0)
    later = {"now": 11.0, "groups": groups, "horizon": 60.0, "switch_seconds": 1e6}
    [group] = find_policy("tlora").decide(state(both, 1, **later, changes=costs)).groups
    [kept] = find_policy("tlora", dwell_seconds=0.0).decide(state(both, 1, **later)).groups

    assert (set(group.jobs), group.place) == ({"a", "b"}, groups[0].place)
    assert kept == groups[0]


def test_a_new_group_is_left_alone_for_a_while():
    """Within its dwell nothing joins it, however cheap."""
    first = [small("a"), small("b")]
    groups = find_policy("tlora").decide(state(first, 8)).groups
    moment = state([*first, small("c")], 8, now=30.0, groups=groups, switch_seconds=0.0)

    assert set(groups) <= set(find_policy("tlora", dwell_seconds=60.0).decide(moment).groups)


def test_a_broken_bound_parts_a_group_within_its_dwell():
    """A deadline that has come near takes a job out at once."""
    jobs = [small("a"), replace(small("b"), deadline=140.0)]
    moment = state(jobs, 8)
    group = Group(("a", "b"), 1, (0,), 0.13, 0.0)
    moment.groups = (group,)
    assert moment.jobs["b"].solo_seconds * 1000 < 140.0 - 1.0
    moment.now = 1.0
    group = replace(group, seconds=moment.jobs["b"].solo_seconds * 1.9)
    moment.groups = (group,)

    decision = find_policy("tlora", dwell_seconds=1e9).decide(moment)

    assert group not in decision.groups
    checked(moment, decision)


@pytest.mark.parametrize("name", ["tlora", "tlora-paper"])
def test_a_wide_job_is_not_overtaken_for_ever(name):
    """Nodes are set aside for a job that has waited too long, though small ones would fit."""
    wide = JobRequest("wide", "base", demand(8, 512, 16), 16, 10, 0.0)
    long = JobRequest("long", "other", demand(8, 512, 16), 8, 100_000, 0.0)
    policy = find_policy(name)
    moment = state([long], 16)
    groups = policy.decide(moment).groups
    late = [
        JobRequest(f"s{index}", "third", demand(8, 512, 16), 1, 10**7, 1e4) for index in range(8)
    ]
    moment = state([wide, long, *late], 16, now=1e4, groups=groups)

    decision = find_policy(name, **({"lending": False} if name == "tlora" else {})).decide(moment)

    running = {job for one in decision.groups for job in one.jobs}
    assert "wide" in running or not running & {one.name for one in late}


def test_powers_end_with_what_was_asked_for():
    """Three GPUs are tried as 1, 2 and 3; nothing above is."""
    import numpy as np

    assert powers(np.array([3.0, 1.0, 8.0])).tolist() == [
        [1.0, 0.0, 1.0],
        [2.0, 0.0, 2.0],
        [0.0, 0.0, 4.0],
        [0.0, 0.0, 0.0],
        [3.0, 1.0, 8.0],
    ]
