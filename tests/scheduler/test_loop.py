"""The online loop over a simulated executor: what is decided when, and what becomes of jobs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.scheduler.loop_rig import Counting, Scripted, rig, together
from tests.scheduler.looping import Plain, request
from tlora_fx.errors import ClockBackwards, DecisionWrong, ReplayOptionWrong, SubmittedTwice
from tlora_fx.scheduler.executor import Drained
from tlora_fx.scheduler.state import ChangeCosts, Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.simulator.replay import Clock


def test_a_job_runs_at_once_where_gpus_are_free():
    """A job that arrives between two horizons does not wait for the next one."""
    made = rig(horizon=1000.0)
    made.loop.submit(request("a"))
    made.go(10.0)
    made.loop.submit(request("b", submitted=10.0))
    made.go(10.0)

    assert [run.group.jobs for run in made.loop.running.values()] == [("a",), ("b",)]


@pytest.mark.parametrize(("at_once", "begins"), [("never", 200.0), ("end", 150.0)])
def test_the_end_of_a_job_lets_the_next_one_begin(at_once, begins):
    """GPUs that come free are given to those who wait, unless only horizons count."""
    made = rig(gpus=1, horizon=200.0, at_once=at_once)
    for name in "ab":
        made.loop.submit(request(name))
    made.go(begins - 0.1)
    assert "b" not in {name for run in made.loop.running.values() for name in run.jobs}

    made.go(begins)
    assert [run.time for run in made.loop.running.values()] == [begins]


@pytest.mark.parametrize("at_once", ["never", "end"])
def test_without_at_once_a_job_waits_for_the_horizon(at_once):
    """Unless arrivals prompt a decision, they wait for the next one."""
    made = rig(horizon=1000.0, at_once=at_once)
    made.loop.submit(request("a", steps=10_000))
    made.go(10.0)
    made.loop.submit(request("b", submitted=10.0))
    made.go(999.0)
    assert len(made.loop.running) == 1

    made.go(1000.0)
    assert len(made.loop.running) == 2


def test_a_job_ends_when_its_steps_do():
    """A job of 100 steps of 1.5 s alone is done after 150 s, and its GPUs are free."""
    made = rig()
    made.loop.submit(request("a"))
    made.go(149.9)
    assert not made.loop.idle

    made.go(150.0)
    assert made.loop.idle
    assert made.loop.ended["a"] == "done"


def test_forming_a_group_costs_the_switch():
    """Progress begins `switch_seconds` after the launch."""
    made = rig(switch_seconds=20.0)
    made.loop.submit(request("a"))
    made.go(20.0)
    assert made.loop.state(20.0).jobs["a"].steps_done == 0

    made.go(35.0)
    assert made.loop.state(35.0).jobs["a"].steps_done == pytest.approx(10)


def test_a_group_goes_on_when_one_of_its_jobs_ends():
    """Nothing is launched anew, and the one that is left runs at its own speed."""
    callback = Counting()
    made = rig(Scripted(together("a", "b")), switch_seconds=20.0, callback=callback)
    made.loop.submit(request("a", steps=10))
    made.loop.submit(request("b", steps=20))
    made.go(1000.0)

    # 10 steps of 0.5 + 2000 tokens / 2 GPUs, then 10 of 0.5 + 1000 / 2.
    assert made.loop.idle
    assert callback.ends == [pytest.approx(20 + 10 * 1.5), pytest.approx(20 + 10 * 1.5 + 10 * 1.0)]
    assert callback.launches == 1


def test_groups_that_stay_are_left_alone():
    """A decision that says the same again stops and starts nothing."""
    policy = Scripted(lambda state: [Group(("a",), 1, (3,))])
    made = rig(policy, refresh=1)
    made.loop.submit(request("a", steps=1000))
    made.loop.submit(request("b", steps=1000))
    made.go(600.0)

    assert len(policy.seen) > 5
    assert list(made.loop.running) == [1]


def test_a_group_waits_for_the_gpus_of_one_that_drains():
    """A group on another's place is launched once that one has stopped, from where it stopped."""
    say = lambda state: [  # noqa: E731
        Group(("a",), 1, (0,)) if state.now < 60 else Group(("b",), 1, (0,))
    ]
    made = rig(Scripted(say))
    made.loop.submit(request("a"))
    made.go(30.0)
    made.loop.submit(request("b", submitted=30.0))
    made.go(90.0)

    assert [run.group.jobs for run in made.loop.running.values()] == [("b",)]
    assert made.loop.active["a"].steps_done == pytest.approx(40)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": 9}, "it asks for 9 GPUs and the cluster has 8"),
        ({"gpus": 0}, "it asks for 0 GPUs"),
        ({"steps": 0}, "it has 0 steps"),
        ({"tokens": 3000.0}, "no layout fits into the memory of 1 GPUs; 2 would do"),
        ({"tokens": 1e6}, "no layout fits into memory, on 1 GPUs or on all 8"),
    ],
)
def test_a_job_that_can_never_run_is_refused_with_a_reason(changes, reason):
    """It is told at submission, and never stays pending."""
    made = rig(estimator=Plain(fits=2000.0), ledger=Ledger())

    assert made.loop.submit(request("a", **changes)) == reason
    assert made.loop.idle
    assert made.loop.ledger is not None
    assert [(row.status, row.reason) for row in made.loop.ledger.jobs()] == [("refused", reason)]


def test_a_name_is_submitted_once():
    """A second job of that name is an error, even when the first is done."""
    made = rig()
    made.loop.submit(request("a"))
    with pytest.raises(SubmittedTwice, match="job 'a' was submitted before"):
        made.loop.submit(request("a"))


def test_the_window_holds_the_oldest_jobs():
    """A policy sees at most `runnable` jobs, in order of submission, whoever came first."""
    policy = Scripted()
    made = rig(policy, runnable=3)
    for place in (5, 1, 4, 2, 3):
        made.loop.submit(request(f"j{place}", submitted=-float(place)))
    made.go(0.0)

    assert list(policy.seen[-1].jobs) == ["j5", "j4", "j1"]
    assert [job.name for job in made.loop.window.waiting()] == ["j3", "j2"]


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([Group(("a",), 1, (0,)), Group(("b",), 1, (0,))], "GPU 0 is also of"),
        ([Group(("a",), 1, (8,))], "GPU 8 is not there"),
        ([Group(("a",), 1, (0,)), Group(("a", "b"), 1, (1,))], "job 'a' is also in"),
        ([Group(("nobody",), 1, (0,))], "job 'nobody' is not active"),
        ([Group(("a", "c"), 1, (0,))], "bases one, two in one group"),
        ([Group(("a",), 2, (0,))], "1 jobs on 1 GPUs"),
    ],
)
def test_a_decision_that_cannot_be_run_is_refused(groups, found):
    """A policy may be anybody's; what it says is looked at before it is done."""
    made = rig(Scripted(lambda state: groups))
    for name in "ab":
        made.loop.submit(request(name))
    made.loop.submit(request("c", base="two"))

    with pytest.raises(DecisionWrong, match=found):
        made.loop.advance(0.0)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        (lambda state: [job.request for job in state.jobs], "policy 'scripted' raised Attribute"),
        (lambda state: json.loads("{"), r"test_loop.py:\d+  .*json.loads"),
    ],
)
def test_a_policy_that_fails_is_blamed_by_name(says, found):
    """With the line at which it failed."""
    made = rig(Scripted(says))
    made.loop.submit(request("a"))

    with pytest.raises(DecisionWrong, match=found):
        made.loop.advance(0.0)


def test_what_is_no_decision_is_refused(monkeypatch):
    """A list of groups is none."""
    policy = Scripted()
    monkeypatch.setattr(policy, "decide", lambda state, explain=False: [])
    made = rig(policy)
    made.loop.submit(request("a"))

    with pytest.raises(DecisionWrong, match=r"expected  a tlora_fx.scheduler.state.Decision"):
        made.loop.advance(0.0)


def test_told_to_stop_it_drains_and_starts_nothing():
    """After `drain_all` the loop becomes quiet, with every job's steps known."""
    made = rig()
    made.loop.submit(request("a"))
    made.go(30.0)
    made.loop.drain_all(30.0)
    made.go(90.0)

    assert made.loop.quiet
    assert made.loop.active["a"].steps_done == pytest.approx(20)
    assert made.loop.next_due(90.0) is None


def test_a_loop_over_an_old_ledger_uses_new_epochs():
    """After a restart no formation gets a number that an old one had."""
    ledger = Ledger()
    first = rig(ledger=ledger)
    first.loop.submit(request("a"))
    first.go(30.0)
    second = rig(ledger=ledger)
    second.loop.submit(request("a"), steps_done=10.0)
    second.go(30.0)

    assert list(second.loop.running) == [2]
    assert second.loop.state(30.0).jobs["a"].steps_done == pytest.approx(30)


def test_it_is_asked_again_though_nothing_happens():
    """Jobs grow late by waiting: after `refresh` horizons the policy may think again."""
    policy = Scripted(together("a"))
    made = rig(policy, horizon=10.0, refresh=5)
    for name in "ab":
        made.loop.submit(request(name, steps=10_000))
    made.go(101.0)

    assert [state.now for state in policy.seen] == [0.0, 50.0, 100.0]


@pytest.mark.parametrize(
    "options", [{"horizon": 0.0}, {"runnable": 0}, {"refresh": -1}, {"tries": 0}]
)
def test_options_that_make_no_sense_are_refused(options):
    """They are named with what they may be."""
    with pytest.raises(ReplayOptionWrong, match="horizon > 0"):
        rig(**options)


def test_the_clock_does_not_go_back():
    """Simulated time only passes."""
    clock = Clock(5.0)
    with pytest.raises(ClockBackwards):
        clock.go_to(4.0)


CHANGES = ChangeCosts(join=2.0, leave=1.0, move=4.0)


def by_time(*phases):
    """A policy that wants what stands at the last time that is over: (time, groups of names)."""

    def say(state):
        wanted = [groups for time, groups in phases if time <= state.now][-1]
        return [
            next(
                (g for g in state.groups if set(g.jobs) == set(names) and g.place == (gpu,)),
                Group(tuple(names), 1, (gpu,), 1.5, state.now),
            )
            for gpu, names in enumerate(wanted)
            if names and set(names) <= set(state.jobs)
        ]

    return Scripted(say)


def test_a_job_joins_a_running_group_for_the_price_of_a_join():
    """The group does not end: it stands still for two seconds, and is another epoch then."""
    made = rig(by_time((0, ["a"]), (60, ["ab"])), switch_seconds=20.0, changes=CHANGES, refresh=1)
    for name in "ab":
        made.loop.submit(request(name))
    made.loop.advance(0.0)
    made.go(60.0)
    [run] = made.loop.running.values()
    before = run.jobs["a"].steps_done

    assert (run.origin, run.came, run.went) == (1, ("b",), ())
    assert before == pytest.approx(40 / 1.5)
    made.go(70.0)
    made.loop.state(70.0)
    assert run.jobs["a"].steps_done - before == pytest.approx(8 / 2.5)
    assert run.jobs["b"].steps_done == pytest.approx(8 / 2.5)


def test_two_groups_exchange_jobs_though_each_waits_for_the_other():
    """Those that leave go first; nobody is drained, and no job is lost."""
    ledger = Ledger()
    policy = by_time((0, ["ab", "cd"]), (60, ["ac", "bd"]))
    made = rig(policy, changes=CHANGES, ledger=ledger, refresh=1)
    for name in "abcd":
        made.loop.submit(request(name, steps=1000))
    made.loop.advance(0.0)
    made.go(70.0)

    assert {run.group.jobs for run in made.loop.running.values()} == {("a", "c"), ("b", "d")}
    hows = [record.how for record in ledger.epochs()]
    assert [how for how in hows if how and not how.startswith("goes on as")] == []
    assert {record.status for record in ledger.jobs()} == {"running"}


def test_a_job_that_ends_while_another_is_about_to_join_leaves_the_group_to_it():
    """The successor is formed anew without it, and the group that ended did not fail."""
    policy = by_time((0, ["a"]), (60, ["ab"]), (61, ["b"]))
    made = rig(policy, changes=CHANGES, refresh=1)
    asked = []
    made.executor.change = lambda *arguments: asked.append(arguments)
    made.loop.submit(request("a", steps=50))
    made.loop.submit(request("b", steps=10))
    made.loop.advance(0.0)
    made.go(76.0)
    [(_, epoch, launch)] = asked
    assert made.loop.ended == {"a": "done", "b": ""}
    assert [run.group.jobs for run in made.loop.running.values()] == [()]

    made.executor._places[launch.epoch] = made.executor._places[epoch]
    made.executor._events.append(Drained(76.0, epoch, {}))
    alone = replace(launch.group, jobs=("b",))
    made.executor.launch(replace(launch, group=alone, jobs=launch.jobs[1:]))
    made.go(200.0)
    assert made.loop.ended == {"a": "done", "b": "done"}
    assert made.loop.idle


def test_a_job_that_is_held_leaves_its_group_which_trains_on():
    """Without a stop; it joins again when it is let go."""
    made = rig(by_time((0, ["ab"])), changes=CHANGES, refresh=1)
    for name in "ab":
        made.loop.submit(request(name, steps=1000))
    made.loop.advance(0.0)
    made.go(30.0)
    assert made.loop.hold("b")
    made.loop.advance(30.0)

    [run] = made.loop.running.values()
    assert (run.origin, run.group.jobs, run.went) == (1, ("a",), ("b",))
    assert made.loop.held["b"].steps_done == pytest.approx(30 / 2.5)


def test_jobs_that_are_held_together_leave_their_group_together():
    """One of them is parked: nobody lets it go before it is compared."""
    made = rig(by_time((0, ["abc"])), changes=CHANGES, refresh=1)
    for name in "abc":
        made.loop.submit(request(name, steps=1000))
    made.loop.advance(0.0)
    made.go(30.0)
    made.loop.hold("b")
    made.loop.park("c")
    made.loop.advance(30.0)
    made.loop.let_go("c")

    [run] = made.loop.running.values()
    assert (run.group.jobs, run.went) == (("a",), ("b", "c"))
    assert made.loop.held.keys() == {"b", "c"}
    made.loop.unpark("c")
    assert made.loop.held.keys() == {"b"}


def test_a_job_that_moves_trains_again_after_the_seconds_of_a_move():
    """Who it moves to trains on meanwhile, and stands still for the join alone."""
    policy = by_time((0, ["ab", "c"]), (60, ["a", "cb"]))
    made = rig(policy, changes=CHANGES, refresh=1)
    for name in "abc":
        made.loop.submit(request(name, steps=1000))
    made.loop.advance(0.0)
    made.go(60.0)
    made.loop.state(60.0)
    jobs = dict(made.loop.window.jobs)
    before = {name: job.steps_done for name, job in jobs.items()}
    made.go(73.5)
    made.loop.state(73.5)

    done = {name: job.steps_done - before[name] for name, job in jobs.items()}
    assert done["a"] == pytest.approx(12.5 / 1.5)
    assert done["b"] == pytest.approx(7.5 / 2.5)
    assert done["c"] == pytest.approx(4 / 1.5 + 7.5 / 2.5)


@pytest.mark.parametrize("then", [["", "cb"], ["ab", ""]])
def test_who_is_on_the_way_is_not_lost_when_the_others_end_or_stop(then):
    """The group that it moves to ends first, or is drained: the job trains there, or elsewhere."""
    policy = by_time((0, ["ab", "c"]), (60, ["a", "cb"]), (62, then), (90, ["a", "b", "c"]))
    made = rig(policy, changes=CHANGES, refresh=1, horizon=1.0)
    for name, steps in {"a": 60, "b": 90, "c": 41}.items():
        made.loop.submit(request(name, steps=steps))
    made.loop.advance(0.0)
    made.go(600.0)

    assert made.loop.ended == {"a": "done", "b": "done", "c": "done"}
    assert made.loop.idle
