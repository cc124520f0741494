"""Failed groups, lost nodes, jobs at fault, and the account of what is lent meanwhile."""

from __future__ import annotations

import pytest

from tests.scheduler.loop_rig import Scripted, rig, together
from tests.scheduler.looping import Plain, request
from tests.simulator.faults import Faults
from tlora_fx.scheduler.loop import RetryPolicy
from tlora_fx.scheduler.state import ActiveJob, FailureRecord
from tlora_fx.scheduler.store import Ledger


def test_after_a_lost_node_jobs_go_on_from_their_commits_elsewhere():
    """A lost node's groups are formed again on what is left, from the last commit."""
    made = rig(gpus=16, faults=Faults(commit_seconds=30.0))
    made.loop.submit(request("a", gpus=8, steps=1000))
    made.go(70.0)
    place = made.loop.running[1].launched.place
    made.executor.lose_node(made.loop.cluster.node(place[0]))
    made.loop.advance(70.0)

    [run] = made.loop.running.values()
    assert not set(run.launched.place) & set(place)
    assert run.jobs["a"].steps_done == pytest.approx(60 / (0.5 + 1 / 8))


def test_a_job_that_fails_alone_again_and_again_is_given_up():
    """Three failures without progress between, and it is done with, for a reason."""
    ledger = Ledger()
    made = rig(ledger=ledger)
    made.loop.submit(request("a"))
    for _ in range(3):
        made.loop.advance(made.clock.now)
        assert not made.loop.idle
        made.executor.fail_group(max(made.loop.running), "out of memory")
        made.go(made.clock.now)
        made.go(made.clock.now + 60.0)

    assert made.loop.idle
    assert "failed 3 times alone: out of memory" in made.loop.ended["a"]
    assert [row.status for row in ledger.jobs()] == ["failed"]


@pytest.mark.parametrize(
    ("kills", "given_up"),
    [("kkkk", 0), ("kkkkk", 5), ("fkkf", 0), ("fkkff", 5), ("ffkf", 4), ("kkf", 0)],
)
def test_a_job_that_is_killed_from_outside_has_more_tries(kills, given_up):
    """Five in a row, of which its own failures are three at most."""
    retries = RetryPolicy(3)
    job = ActiveJob(request("a"), 1.0)
    for kill in kills:
        lost = retries.failed([job], killed=kill == "k")
    assert [retries.failures(one.name) for one in lost] == ([given_up] if given_up else [])

    job.steps_done = 5.0
    assert not retries.failed([job], killed=True)
    assert retries.failures("a") == 1


def test_jobs_that_died_with_their_fork_server_are_neither_given_up_nor_suspected():
    """However often that happens: they go on in the company that they had."""
    made = rig(Scripted(together("a", "b")))
    for name in "ab":
        made.loop.submit(request(name, steps=1000))
    for _ in range(12):
        made.go(made.clock.now + 20.0)
        [epoch] = made.loop.running
        made.executor.fail_group(epoch, blameless=True)
        made.loop.advance(made.clock.now)
    made.go(made.clock.now + 20.0)

    assert not any(made.loop.ended.values())
    assert not any(made.loop.retries.suspects(name) for name in "ab")
    assert [run.group.jobs for run in made.loop.running.values()] == [("a", "b")]


@pytest.mark.parametrize("how", ["set aside", "cancelled", "cancelled while set aside"])
def test_a_job_that_is_set_aside_is_given_up_for_its_failures_before(how):
    """Those of a job that was cancelled are not counted for another of its name."""
    made = rig()
    made.loop.submit(request("a", steps=1000))
    for last in (False, False, True):
        made.go(made.clock.now + 60.0)
        absent = {"a": "its data is gone"} if last else {}
        made.executor.fail_group(max(made.loop.running), blameless=last, absent=absent)
        made.loop.advance(made.clock.now)
    assert made.loop.absent == {"a": "its data is gone"}
    if "set aside" in how:
        assert made.loop.set_aside("a").name == "a"
    if "cancelled" in how:
        made.loop.cancel("a")
    assert made.loop.idle
    made.loop.submit(request("a", steps=1000))
    made.go(made.clock.now + 60.0)
    made.executor.fail_group(max(made.loop.running))
    made.loop.advance(made.clock.now)

    assert ("failed 3 times alone" in made.loop.ended["a"]) is (how == "set aside")


def test_failures_count_though_another_process_goes_on():
    """A job that was suspected runs alone there, and is given up as if nothing had happened."""
    ledger = Ledger()
    made = rig(Scripted(together("a", "b")), ledger=ledger)
    for name in "ab":
        made.loop.submit(request(name, steps=1000))
    for names in ("ab", "a", "a"):
        made.go(made.clock.now + 60.0)
        [epoch] = [e for e, run in made.loop.running.items() if run.group.jobs == tuple(names)]
        made.executor.fail_group(epoch, "out of memory")
        made.loop.advance(made.clock.now)
    again = rig(Scripted(together("a", "b")), ledger=ledger)
    for name in "ab":
        again.loop.submit(request(name, steps=1000))
    assert (again.loop.retries.suspects("a"), again.loop.retries.suspects("b")) == (True, False)
    assert ledger.failures("b").shared == 1
    again.loop.cancel("b")
    again.loop.advance(0.0)
    assert [run.group.jobs for run in again.loop.running.values()] == [("a",)]
    again.executor.fail_group(max(again.loop.running), "out of memory")
    again.loop.advance(0.0)

    assert again.loop.ended["a"] == "failed: its group failed 3 times alone: out of memory"
    assert ledger.failures("a") is None


@pytest.mark.parametrize(("killed", "stays"), [(0, True), (2, False)])
def test_suspicion_of_jobs_that_were_killed_ends_with_their_process(killed, stays):
    """Where machines die often, jobs train together again; their failures are counted on."""
    retries = RetryPolicy(3)
    retries.restore("a", FailureRecord(alone=2, killed=killed, shared=3, suspect=True))

    assert retries.suspects("a") is stays
    assert retries.failures("a") == 2


def test_progress_in_another_process_forgives_failures():
    """And what is forgiven is forgiven in the next one too."""
    ledger = Ledger()
    made = rig(ledger=ledger)
    made.loop.submit(request("a", steps=1000))
    for _ in range(2):
        made.go(made.clock.now + 60.0)
        made.executor.fail_group(max(made.loop.running))
        made.loop.advance(made.clock.now)
    again = rig(ledger=ledger, faults=Faults(commit_seconds=10.0))
    again.loop.submit(request("a", steps=1000))
    again.go(60.0)
    again.executor.fail_group(max(again.loop.running))
    again.loop.advance(60.0)

    assert (again.loop.retries.failures("a"), ledger.failures("a").alone) == (1, 1)


def test_failures_of_groups_in_earlier_processes_put_no_job_alone_for_good():
    """Progress ends suspicion, however many processes saw one such failure each."""
    ledger = Ledger()
    for _ in range(4):
        made = rig(ledger=ledger, faults=Faults(commit_seconds=10.0))
        for name in "ab":
            made.loop.submit(request(name, steps=1000))
        jobs = [made.loop.active[name] for name in "ab"]
        made.loop.retries.failed(jobs)
        made.loop.retries.committed({job.name: job.steps_done + 1.0 for job in jobs})

    assert not any(made.loop.retries.suspects(name) for name in "ab")


@pytest.mark.parametrize("how", ["drains", "fails"])
def test_what_a_job_has_given_is_written_when_its_group_ends(how):
    """No decision may come after it: the run may be over."""
    ledger = Ledger()
    made = rig(Scripted(together("a", "b")), refresh=0, ledger=ledger)
    made.loop.submit(request("a", steps=1000, max_slowdown=1.0, max_slowdown_opt_in=3.0, gpus=2))
    made.loop.submit(request("b", steps=1000, max_slowdown=3.0))
    made.go(100.0)
    if how == "fails":
        made.executor.fail_group(1, blameless=True)
        made.loop.stopping = True
    else:
        made.loop.drain_all(100.0)
    made.loop.advance(100.0)

    credit = {job.name: job.credit for job in ledger.active_jobs()}
    assert credit["a"] == pytest.approx(100.0 * 2 * (1 - 1 / 1.5))
    assert credit["b"] == pytest.approx(-credit["a"])


def test_a_job_that_is_set_aside_knows_what_it_has_given():
    """Also since the last decision; its neighbour goes on with what it took."""
    made = rig(Scripted(together("a", "b")), refresh=0)
    made.loop.submit(request("a", steps=1000, max_slowdown=1.0, max_slowdown_opt_in=3.0, gpus=2))
    made.loop.submit(request("b", steps=1000, max_slowdown=3.0))
    made.go(100.0)
    made.executor.fail_group(1, blameless=True, absent={"a": "its data is gone"})
    made.loop.advance(100.0)

    # a alone on its two GPUs takes 1 s a step, both together 1.5 s.
    assert made.loop.set_aside("a").credit == pytest.approx(100.0 * 2 * (1 - 1 / 1.5))


def test_failures_with_progress_between_are_forgiven():
    """A job that gets further each time is not given up."""
    made = rig(faults=Faults(commit_seconds=10.0))
    made.loop.submit(request("a", steps=1000))
    for _ in range(6):
        made.go(made.clock.now + 60.0)
        made.executor.fail_group(max(made.loop.running), "lost its disk")
        made.loop.advance(made.clock.now)
    made.go(10_000.0)

    assert made.loop.ended["a"] == "done"


@pytest.mark.parametrize(("policy", "gpus"), [("tlora", 1), ("mlora-fifo", 8)])
def test_jobs_of_a_failed_group_run_alone(policy, gpus):
    """Nobody knows who was at fault, so each is tried by itself, under any policy."""
    made = rig(policy, gpus=gpus, estimator=Plain(fixed=1.0, each=1e-5))
    for name in "ab":
        made.loop.submit(request(name, steps=1000))
    made.go(120.0)
    [(epoch, run)] = made.loop.running.items()
    assert len(run.group.jobs) == 2
    made.executor.fail_group(epoch)
    made.loop.advance(120.0)
    made.go(130.0)

    assert all(len(run.group.jobs) == 1 for run in made.loop.running.values())
    made.go(10_000.0)
    assert made.loop.idle


def test_a_job_at_fault_ends_and_its_neighbours_go_on():
    """Its group is not formed anew."""
    made = rig(Scripted(together("a", "b")))
    for name in "ab":
        made.loop.submit(request(name))
    made.go(50.0)
    made.executor.fail_job(1, "a", "its data is gone")
    made.loop.advance(50.0)

    assert made.loop.ended["a"] == "failed: its data is gone"
    assert list(made.loop.running) == [1]
    assert made.loop.running[1].group.jobs == ("b",)


def test_a_job_that_lends_is_credited_while_its_group_runs():
    """What it gives past its bound stands in its credit, and its neighbour owes it."""
    made = rig(Scripted(together("a", "b")))
    made.loop.submit(request("a", steps=1000, max_slowdown=1.0, max_slowdown_opt_in=3.0, gpus=2))
    made.loop.submit(request("b", steps=1000, max_slowdown=3.0))
    made.go(100.0)
    jobs = made.loop.state(100.0).jobs

    # a alone on its two GPUs takes 1 s a step, both together 1.5 s.
    assert jobs["a"].credit == pytest.approx(100.0 * 2 * (1 - 1 / 1.5))
    assert jobs["b"].credit == pytest.approx(-jobs["a"].credit)


def test_a_job_taken_up_again_keeps_its_credit():
    """As the ledger of a run that died had it."""
    made = rig()
    made.loop.submit(request("a"), steps_done=50.0, credit=12.0)

    assert made.loop.active["a"].credit == 12.0
    assert made.loop.credits.balance("a") == 12.0
