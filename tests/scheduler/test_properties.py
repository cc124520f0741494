"""P1 to P10 of the scheduler for every policy, whatever the cluster and its jobs are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.toy import Roofline, active, checked, request
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.policies import POLICIES, find_policy
from tlora_fx.scheduler.state import Decision, Group, JobRequest, SchedulerState, broken

BOUNDED = ("tlora", "tlora-paper", "no-kernel-fuser", "oracle")
GROUPING = ("tlora", "tlora-paper", "oracle")
CASES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(CASES, max_examples=400)


@st.composite
def jobs(draw, least: int = 1, most: int = 12, bases: tuple[str, ...] = ("one", "two")):
    rng = random.Random(draw(st.integers(0, 10**6)))
    found = []
    for index in range(draw(st.integers(least, most))):
        bound = rng.choice((1.1, 1.5, 1.5, 3.0))
        found.append(
            request(
                f"j{index}",
                rng,
                base=rng.choice(bases),
                submitted=float(rng.randrange(0, 100)),
                steps=rng.choice((1, 50, 1000)),
                max_slowdown=bound,
                max_slowdown_opt_in=rng.choice((0.0, 0.0, bound * 1.5)),
                deadline=rng.choice((None, None, 150.0, 400.0)),
            )
        )
    return found


clusters = st.builds(
    lambda gpus, lost: Cluster(gpus, lost=frozenset(lost) if gpus > 16 else frozenset()),
    st.sampled_from((8, 16, 32, 64, 96)),
    st.sets(st.integers(0, 1), max_size=1),
)


def moment_of(requests: list[JobRequest], cluster: Cluster, **more) -> SchedulerState:
    estimator = Roofline()
    return SchedulerState(100.0, cluster, estimator, active(requests, estimator), **more)


def settled(moment: SchedulerState, decision: Decision) -> SchedulerState:
    """The same moment with what was decided running."""
    return replace(moment, groups=decision.groups)


def later(moment: SchedulerState, decision: Decision, rng: random.Random) -> SchedulerState:
    """Some time on: steps are done, jobs have ended, a node may be lost, new jobs have come."""
    found = dict(moment.jobs)
    for group in decision.groups:
        for name in group.jobs:
            if rng.random() < 0.3:
                del found[name]
    more = [
        request(f"n{rng.randrange(10**9)}", rng, base="one", submitted=moment.now)
        for _ in range(rng.randrange(0, 4))
    ]
    found |= active(more, moment.estimator)
    cluster = moment.cluster
    if rng.random() < 0.2 and cluster.nodes > 2:
        cluster = replace(cluster, lost=frozenset({rng.randrange(cluster.nodes)}))
    stay = {name: group for group in decision.groups for name in group.jobs if name in found}
    groups = tuple(
        replace(group, jobs=tuple(name for name in group.jobs if name in found))
        for group in dict.fromkeys(stay.values())
    )
    return replace(moment, now=moment.now + 60.0, jobs=found, groups=groups, cluster=cluster)


def bounds_hold(moment: SchedulerState, decision: Decision) -> None:
    for group in decision.groups:
        members = [moment.jobs[name] for name in group.jobs]
        if len(members) > 1 and group not in moment.groups:
            assert not broken(members, group.seconds, moment.now)
        assert group.seconds > 0


def policies(*names: str):
    return pytest.mark.parametrize("name", names or POLICIES)


def a_story(name: str, requests: list[JobRequest], cluster: Cluster, seed: int) -> None:
    """Decide, let time pass, decide; P1 to P4 at every turn."""
    rng = random.Random(seed)
    policy = find_policy(name)
    moment = moment_of(requests, cluster)
    for _ in range(4):
        if name == "oracle" and len(moment.jobs) > 12:
            return
        decision = policy.decide(moment)
        checked(moment, decision)
        if name in BOUNDED:
            bounds_hold(moment, decision)
        moment = later(moment, decision, rng)


@policies()
@CASES
@given(jobs(), clusters, st.integers(0, 10**6))
def test_every_decision_can_be_run(name, requests, cluster, seed):
    """P1-P4: nobody lost or twice, one base a group, GPUs disjoint and there, bounds kept."""
    a_story(name, requests, cluster, seed)


@pytest.mark.slow
@policies()
@MANY
@given(jobs(), clusters, st.integers(0, 10**6))
def test_every_decision_can_be_run_many_times(name, requests, cluster, seed):
    """The same over thousands of cases."""
    a_story(name, requests, cluster, seed)


@policies(*GROUPING)
@CASES
@given(jobs())
def test_grouping_is_never_worse_than_apart(name, requests):
    """P5: with room for all, the weighted speed-up is at least the number of jobs."""
    moment = moment_of(requests, Cluster(128))
    decision = find_policy(name).decide(moment)
    found = sum(
        moment.jobs[job].solo_seconds / group.seconds
        for group in decision.groups
        for job in group.jobs
    )

    assert not decision.waiting
    assert found >= len(moment.jobs) * (1 - 0.006)


@policies("tlora", "tlora-paper")
@CASES
@given(jobs())
def test_an_accepted_merge_gains(name, requests):
    """P5 and P6: every recorded merge gains, and there are fewer than there are jobs."""
    decision = find_policy(name).decide(moment_of(requests, Cluster(128)), explain=True)
    merges = [reason for reason in decision.reasons if reason.verdict == "merged"]

    assert all(reason.gain is not None and reason.gain > 0 for reason in merges)
    assert len({reason.gain for reason in merges}) <= max(0, len(requests) - 1)


@policies()
@CASES
@given(jobs(), clusters, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(name, requests, cluster, rng):
    """P7: jobs come in any order, the groups and places are the same."""
    moment = moment_of(requests, cluster)
    shuffled = list(moment.jobs.items())
    rng.shuffle(shuffled)

    one = find_policy(name).decide(moment)
    other = find_policy(name).decide(replace(moment, jobs=dict(shuffled)))

    assert {(frozenset(g.jobs), g.place) for g in one.groups} == {
        (frozenset(g.jobs), g.place) for g in other.groups
    }


@policies()
@CASES
@given(jobs(), clusters)
def test_what_does_not_change_does_not_move(name, requests, cluster):
    """P8: asked again, a policy leaves every group where it is."""
    policy = find_policy(name)
    moment = moment_of(requests, cluster)
    first = policy.decide(moment)
    second = policy.decide(settled(moment, first))

    assert set(second.groups) == set(first.groups)


@policies(*(name for name in POLICIES if name != "tlora-paper"))
@CASES
@given(jobs(), clusters)
def test_a_policy_without_a_past_moves_nothing_either(name, requests, cluster):
    """P8 after a restart: what the last process started stays as it is.

    The paper's policy knows no cost of switching, and what waits is new to it then.
    """
    moment = moment_of(requests, cluster, horizon=60.0, switch_seconds=1e9)
    first = find_policy(name).decide(moment)
    second = find_policy(name).decide(settled(moment, first))

    assert set(first.groups) <= set(second.groups)


@policies()
@CASES
@given(jobs(most=10))
def test_every_job_runs(name, requests):
    """P9: groups end one after another, and everybody has had a turn."""
    gpus = max(one.gpus for one in requests)
    policy = find_policy(name)
    moment = moment_of(requests, Cluster(max(8, gpus)))
    turns = 0
    while moment.jobs:
        decision = policy.decide(moment)
        assert decision.groups
        ended = set(decision.groups[0].jobs)
        left = {job: moment.jobs[job] for job in moment.jobs if job not in ended}
        groups = tuple(decision.groups[1:])
        moment = replace(moment, now=moment.now + 1e4, jobs=left, groups=groups)
        turns += 1

    assert turns <= len(requests)


@policies()
@CASES
@given(jobs(bases=("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"), most=12))
def test_jobs_that_cannot_share_run_apart(name, requests):
    """No two of one base: one job a group, each as fast as alone but for GPUs it gives back."""
    apart = [replace(one, base=f"{one.base}{index}") for index, one in enumerate(requests)]
    moment = moment_of(apart, Cluster(128))
    decision = find_policy(name).decide(moment)

    assert all(len(group.jobs) == 1 for group in decision.groups)
    for group in decision.groups:
        assert group.seconds <= moment.jobs[group.jobs[0]].solo_seconds * 1.0051


def test_a_group_on_a_lost_node_is_formed_anew():
    """What stood there waits or runs elsewhere."""
    [one] = [replace(job, gpus=8) for job in [request("a", random.Random(1))]]
    moment = moment_of([one], Cluster(32, lost=frozenset({0})))
    old = Group(("a",), 8, tuple(range(8)), 0.1, 0.0)

    for name in POLICIES:
        [group] = find_policy(name).decide(replace(moment, groups=(old,))).groups
        assert group != old
        assert not set(group.place) & set(range(8))
