"""Why a job is grouped as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduler.toy import drawn, state
from tlora_fx.errors import JobNotInState
from tlora_fx.scheduler.explain import explain
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import Decision, Group


@pytest.fixture
def asked():
    moment = state(drawn(12, seed=4), 64)
    return moment, find_policy("tlora").decide(moment, explain=True)


def test_every_job_is_told_its_group_and_its_alternatives(asked):
    """The first row is what was decided, the others are weighed against it."""
    moment, decision = asked
    for group in decision.groups:
        for name in group.jobs:
            told = explain(moment, decision, name)
            first, *others = told.alternatives

            assert set(first.jobs) == set(group.jobs)
            assert first.seconds == pytest.approx(group.seconds)
            assert all(other.gain is not None or other.why_not for other in others)


def test_what_breaks_a_bound_says_whose(asked):
    """An alternative that slows a job down too much names the job and what it allows."""
    moment, decision = asked
    told = [explain(moment, decision, name) for name in moment.jobs]
    broken = [one for each in told for one in each.alternatives if "allows" in one.why_not]

    assert broken
    for one in broken:
        name = one.why_not.split()[0]
        limit = moment.jobs[name].request.max_slowdown
        assert one.slowdowns[one.jobs.index(name)] > limit


def test_a_waiting_job_hears_its_place_in_the_queue():
    """Where nothing is free, that is why not."""
    moment = state(drawn(20, seed=4), 8)
    decision = find_policy("megatron").decide(moment, explain=True)
    told = explain(moment, decision, decision.waiting[0])

    assert told.standing == f"waits, number 1 of {len(decision.waiting)}"
    assert any("GPUs free" in one.why_not for one in told.alternatives)
    assert any(reason.verdict == "waits" for reason in told.reasons)


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_what_nothing_forbids_could_be_done(gpus):
    """An alternative that says no "why not" has places, for those that it leaves behind too."""
    moment = state(drawn(14, seed=3), gpus)
    decision = find_policy("tlora").decide(moment, explain=True)
    for name in moment.jobs:
        for one in explain(moment, decision, name).alternatives[:-1]:
            if one.why_not or one.what == "as decided":
                continue
            groups = [set(group.jobs) for group in decision.groups]
            touched = [g for g in decision.groups if set(g.jobs) & set(one.jobs)]
            assert groups.count(set(one.jobs)) == 0
            behind = {job for g in touched for job in g.jobs} - set(one.jobs)
            held = sum(group.gpus for group in decision.groups if group not in touched)
            assert held + one.gpus + bool(behind) <= gpus


def test_jobs_that_share_few_gpus_are_not_told_that_each_could_have_its_own():
    """Three jobs on the only GPU: none of them can leave while the others go on."""
    moment = state([replace(one, gpus=1, max_slowdown=9.0) for one in drawn(3, seed=2)], 1)
    one = Group(tuple(moment.jobs), 1, (0,), 0.5, 0.0)
    told = explain(moment, Decision((one,)), one.jobs[0])

    assert [each.what for each in told.alternatives[1:]]
    assert all(each.why_not.startswith("no place is left for") for each in told.alternatives[1:])
    assert all(each.gpus == 1 for each in told.alternatives)


def test_a_job_waits_with_others_and_not_with_itself():
    """The reasons name its company."""
    moment = state(drawn(12, seed=4), 8)
    decision = find_policy("tlora").decide(moment, explain=True)

    assert decision.waiting
    assert all(reason.job not in reason.others for reason in decision.reasons)


def test_who_waits_for_a_group_that_is_new_is_told_so():
    """And the group's own jobs for how long nobody joins them."""
    jobs = [replace(one, gpus=1, max_slowdown=99.0) for one in drawn(2, seed=2)]
    moment = state(jobs, 1)
    first, second = moment.jobs
    alone = Group((first,), 1, (0,), 1.0, moment.now - 20.0)
    moment = replace(moment, groups=(alone,))
    decision = find_policy("tlora").decide(moment, explain=True)
    later = replace(moment, groups=(replace(alone, formed=moment.now - 70.0),))
    joined = find_policy("tlora").decide(later, explain=True)

    assert [str(explain(moment, decision, name)).splitlines()[-1] for name in (first, second)] == [
        "  left alone (its group is new: for 40 s yet)",
        f"  waits (needs 1 free GPU of one place; too new to be joined: {first})",
    ]
    assert [group.jobs for group in joined.groups] == [(first, second)]
    assert not any(reason.verdict == "left alone" for reason in joined.reasons)


def test_it_prints_as_a_table_and_as_short_lines(asked):
    """Both show the same rows."""
    moment, decision = asked
    told = explain(moment, decision, "j0003")

    for row in told.rows():
        assert row[0] in str(told)
        assert row[0] in told.text(narrow=True)


def test_a_job_that_is_not_active_is_an_error(asked):
    """With the nearest name."""
    moment, decision = asked
    with pytest.raises(JobNotInState, match="did you mean 'j0003'"):
        explain(moment, decision, "j003")


def test_the_narrow_form_says_the_same_in_short_lines():
    """Each alternative with its cells and its reason, and CPUs are called so."""
    moment = state(drawn(12, seed=4), 64)
    moment = replace(moment, cluster=replace(moment.cluster, gpu="cpu"))
    decision = find_policy("tlora").decide(moment, explain=True)
    job = decision.groups[0].jobs[0]
    told = explain(moment, decision, job)
    text = told.text(narrow=True)

    assert "GPU" not in text + str(told)
    assert text.splitlines()[0] == str(told).splitlines()[0]
    for alternative in told.alternatives:
        assert f"\n  {alternative.what}\n    {moment.cluster.counted(alternative.gpus)}" in text
        assert not alternative.why_not or f"    why not: {alternative.why_not}\n" in f"{text}\n"
