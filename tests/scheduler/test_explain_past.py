"""What became of a job can be asked at any time, of a run as of a saved state."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.loop_rig import Scripted
from tests.scheduler.toy import drawn, measured
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import DecisionWrong, JobNotInState, LedgerError, NewerFormat, StateFileError
from tlora_fx.scheduler.executor import Committed, Drained, Failed, Finished
from tlora_fx.scheduler.explain import explain, explained
from tlora_fx.scheduler.history import History, rows_of_run
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.snapshot_file import (
    Snapshot,
    add_history,
    load_history,
    load_snapshot,
    save_snapshot,
)
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, JobRequest, SchedulerState
from tlora_fx.scheduler.store import Ledger

GPUS = 64


@pytest.fixture
def run(tmp_path):
    """The folder of a run: ten jobs, two of which have ended, one that waits, one refused."""
    estimator = measured(Cluster(GPUS))
    requests = drawn(10, seed=4)
    jobs = {
        one.name: ActiveJob(one, estimator.solo(one.base, one.demand, one.gpus)) for one in requests
    }
    policy = find_policy("tlora")
    first = SchedulerState(60.0, Cluster(GPUS), estimator, jobs)
    decision = policy.decide(first)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for one in requests:
        ledger.submit(one, {"data": "a secret"})
    ledger.decide(first.now, decision)
    for epoch, group in enumerate(decision.groups, start=1):
        ledger.launch(group, epoch, None, 61.0)
    shared = max(decision.groups, key=lambda group: len(group.jobs))
    (done, failed), epoch = shared.jobs[:2], decision.groups.index(shared) + 1
    ledger.record(Finished(80.0, epoch, done, float(jobs[done].request.steps)))
    ledger.record(Failed(81.0, epoch, failed, "loss is not finite"))
    left = {name: job for name, job in jobs.items() if name not in (done, failed)}
    later = SchedulerState(120.0, Cluster(GPUS), estimator, left)
    save_snapshot(tmp_path / "state.json", Snapshot(later, policy))
    ledger.decide(later.now, policy.decide(later))
    ledger.submit(JobRequest("late", "base", requests[0].demand, 1, 5, submitted=130.0))
    ledger.refuse(JobRequest("wide", "base", requests[0].demand, 99, 5), "it asks for 99 GPUs")
    ledger.close()
    return tmp_path, (done, failed), decision


def asked(folder, job):
    return explained(load_snapshot(folder / "state.json"), History.of_run(folder), job)


def test_a_job_that_has_ended_is_told_its_last_decision(run):
    """Its end, its groups, what was decided about it last, and what else there was."""
    folder, (done, failed), _ = run
    told = asked(folder, done)

    assert told.startswith(f"{done}: done after ")
    assert "decided at 60.0 s: on " in told
    assert "as decided" in told
    assert ": from 61.0 s" in told
    assert "ended at 80.0 s" in told
    assert asked(folder, failed).startswith(f"{failed}: failed: loss is not finite")


def test_its_alternatives_are_those_of_that_moment(run):
    """The same rows as if it had been asked before it ended."""
    folder, (done, _), decision = run
    moment, history = load_snapshot(folder / "state.json"), History.of_run(folder)
    estimator = moment.state.estimator
    jobs = {
        name: ActiveJob(one.request, estimator.solo(one.request.base, one.request.demand,
                                                    one.request.gpus))
        for name, one in history.jobs.items() if name not in ("late", "wide")
    }  # fmt: skip
    then = str(
        explain(SchedulerState(60.0, Cluster(GPUS), estimator, jobs), decision, done)
    ).splitlines()

    told = asked(folder, done).splitlines()
    assert told[2 : 1 + len(then)] == then[1:]


def moved(moment, cluster):
    """The same moment on another cluster."""
    estimator = replace(moment.state.estimator, cluster=cluster)
    return Snapshot(replace(moment.state, cluster=cluster, estimator=estimator), moment.policy)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gpus=st.integers(1, GPUS).filter(lambda count: count != 8),
    lost=st.frozensets(st.integers(0, GPUS // 8 - 1)),
)
def test_a_past_decision_is_told_although_its_gpus_have_gone(run, gpus, lost):
    """With all GPUs that it used, what is told is what was told before they went."""
    folder, (done, failed), decision = run
    moment, history = load_snapshot(folder / "state.json"), History.of_run(folder)
    used = max(gpu for group in decision.groups for gpu in group.place) + 1
    whole = moved(moment, Cluster(max(gpus, used)))
    there = Cluster(gpus, lost=frozenset(node for node in lost if node < -(-gpus // 8)))
    places = {gpu for group in decision.groups for gpu in group.place}

    for job in (done, failed):
        told = explained(moved(moment, there), history, job, terms=True).splitlines()
        said = [line for line in told if " left now: " in line]
        rest = [line for line in told if line not in said]
        assert bool(said) is not (places <= set(there.present()))
        if said:
            assert rest == explained(whole, history, job, terms=True).splitlines()
            assert f"of which {there.capacity()} " in said[0]


def test_a_machine_that_has_fewer_slots_now_was_one_node_then(run):
    """What was decided on four slots is told as of four in one node."""
    folder, (done, _), _ = run
    moment, history = load_snapshot(folder / "state.json"), History.of_run(folder)
    place = (2, 3)
    decided = history.decisions[0]
    only = replace(decided, groups=(Group((done,), 2, place, 1.0, 60.0),), waiting=())
    past = History({done: history.jobs[done]}, (), (only,))
    two = moved(moment, Cluster(2, 2, 1))
    four = moved(moment, Cluster(4, 4, 1))

    told = explained(two, past, done, terms=True).splitlines()
    assert [line for line in told if " left now: " not in line] == explained(
        four, past, done, terms=True
    ).splitlines()
    assert (
        "  on 4 GPUs, of which 2 are left now: what else there was is told for all of them" in told
    )


def test_a_job_that_was_refused_or_not_seen_yet_has_an_answer(run):
    """The reason of the one; the other waits for a decision."""
    folder, _, _ = run

    assert asked(folder, "wide").startswith("wide: refused: it asks for 99 GPUs")
    assert asked(folder, "late").startswith("late: waits, and no decision has seen it yet")


def test_a_job_that_waits_for_the_next_start_is_told_why(run):
    """Although the newest state, of an earlier process, has a decision about it."""
    folder, _, decision = run
    ledger = Ledger(folder / "ledger.sqlite")
    for epoch, _ in enumerate(decision.groups, start=1):
        ledger.end(epoch, "drained", 130.0)
    job = next(iter(load_snapshot(folder / "state.json").state.jobs))
    ledger.leave(job, "the base is gone\nhelp  bring it back")
    left = asked(folder, job)
    ledger.take_up()
    taken_up = asked(folder, job)
    ledger.close()

    assert left.startswith(f"{job}: waits for the next start: the base is gone\n  help")
    assert "waits for the next start" not in taken_up


def test_what_was_decided_is_told_and_not_what_would_be(run):
    """A policy that is asked again may answer otherwise; the ledger knows what it said."""
    folder, _, _ = run
    moment = load_snapshot(folder / "state.json")
    job = next(iter(moment.state.jobs))
    alone = Group((job,), 1, (3,), moment.state.jobs[job].solo_seconds, 120.0)
    ledger = Ledger(folder / "ledger.sqlite")
    again = moment.policy.decide(moment.state)
    assert any(job in group.jobs and len(group.jobs) > 1 for group in again.groups) or again.waiting
    ledger._base.execute("DELETE FROM decisions WHERE time = 120.0")
    ledger.decide(120.0, Decision((alone,), tuple(n for n in moment.state.jobs if n != job)))
    ledger.close()

    told = asked(folder, job)
    assert told.startswith(f"{job}: alone on 1 GPU")
    assert "asked again without its past, the policy would answer: " in told


def test_a_step_is_told_term_by_term(run):
    """The terms of the group as it was decided add up to its step."""
    folder, (done, _), decision = run
    moment, history = load_snapshot(folder / "state.json"), History.of_run(folder)
    [group] = [group for group in decision.groups if done in group.jobs]
    text = explained(moment, history, done, terms=True)
    lines = text[text.index("  a step of") :].splitlines()
    total, *terms = [line for line in lines[1:] if line.endswith(" ms")]

    assert set(lines[0].removeprefix("  a step of ").split(" on ")[0].split(", ")) == set(
        group.jobs
    )
    assert float(total.split()[-2]) == pytest.approx(group.seconds * 1e3, abs=0.02)
    assert len(terms) >= 2
    assert sum(float(line.split()[-2]) for line in terms) == pytest.approx(
        group.seconds * 1e3, abs=0.1
    )
    waiting = next(iter(moment.state.jobs))
    assert "  a step of" in explained(moment, None, waiting, terms=True)


def test_a_policy_that_fails_is_blamed_by_name(run):
    """With the line at which it failed."""
    state = load_snapshot(run[0] / "state.json").state
    snapshot = Snapshot(state, Scripted(lambda state: json.loads("{")))

    with pytest.raises(DecisionWrong, match=r"'scripted' raised JSON.*\n.*past.py:\d+  .*loads"):
        explained(snapshot, None, next(iter(state.jobs)))


def test_an_unknown_name_is_an_error_with_the_nearest(run):
    """Among those that have ended, too."""
    folder, (done, _), _ = run

    with pytest.raises(JobNotInState, match=f"did you mean '{done}'"):
        asked(folder, done + "0")
    with pytest.raises(JobNotInState, match="name a job of the run"):
        explained(None, History({}), "zzz")


def test_the_past_travels_with_a_saved_state(run, tmp_path):
    """It answers as the folder does; what came with the jobs stays at home."""
    folder, (done, failed), _ = run
    copy = tmp_path / "copy.json"
    copy.write_bytes((folder / "state.json").read_bytes())
    assert load_history(copy) is None
    add_history(copy, rows_of_run(folder))

    assert "a secret" not in copy.read_text()
    for job in (done, failed, "late", "wide"):
        assert explained(load_snapshot(copy), load_history(copy), job) == asked(folder, job)


def test_only_decisions_that_somebody_may_ask_for_are_kept(tmp_path):
    """The newest, and the last one about each job."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for one in drawn(3, seed=1):
        ledger.submit(one)
    names = [one.name for one in drawn(3, seed=1)]
    for time, jobs in ((1.0, names), (2.0, names), (3.0, names[1:]), (4.0, ()), (5.0, ())):
        ledger.decide(time, Decision((), tuple(jobs)))
    ledger.close()

    assert [one.time for one in History.of_run(tmp_path).decisions] == [2.0, 3.0, 5.0]
    assert [row[0] for row in rows_of_run(tmp_path)["decisions"]] == [2.0, 3.0, 5.0]


def test_a_ledger_is_read_while_another_writes_it(tmp_path):
    """Nothing is locked, nothing is written."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    [one] = drawn(1, seed=1)
    ledger.submit(one)
    with ledger._transition() as base:
        base.execute("UPDATE jobs SET steps = 3")
        assert History.of_run(tmp_path).jobs[one.name].steps == 0
    ledger.record(Committed(1.0, 1, {one.name: 4.0}))
    ledger.record(Drained(2.0, 1, {one.name: 5.0}))

    assert History.of_run(tmp_path).jobs[one.name].steps == 5
    ledger.close()


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    """By name; a folder without one has no past."""
    assert History.of_run(tmp_path) is None
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database at all")
    with pytest.raises(LedgerError, match="cannot be read"):
        History.of_run(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    base = sqlite3.connect(tmp_path / "ledger.sqlite")
    base.execute("CREATE TABLE facts (name TEXT, value TEXT)")
    base.execute("INSERT INTO facts VALUES ('format', '99')")
    base.commit()
    base.close()
    with pytest.raises(NewerFormat, match="newer version of tlora-fx"):
        History.of_run(tmp_path)


def test_a_history_that_is_torn_is_refused(run, tmp_path):
    """Rows that are none are no history."""
    copy = tmp_path / "copy.json"
    copy.write_text('{"format": "tlora-fx moment 1", "history": {"jobs": [[1]]}}')

    with pytest.raises(StateFileError):
        load_history(copy)


def test_what_is_read_of_one_job_explains_it_as_the_whole_ledger_does(run):
    """Whether it has ended, runs, waits or was refused; a ledger that was written before too."""
    folder, *_ = run
    snapshot, whole = load_snapshot(folder / "state.json"), History.of_run(folder)
    for _ in range(2):
        for name in whole.jobs:
            told = explained(snapshot, History.of_job(folder, name), name)
            assert told == explained(snapshot, whole, name)
        with sqlite3.connect(folder / "ledger.sqlite") as base:
            base.executescript(
                "DROP TABLE members; DROP TABLE decided; "
                "UPDATE facts SET value = '2' WHERE name = 'format'"
            )
        base.close()
        Ledger(folder / "ledger.sqlite").close()


def test_a_job_is_explained_though_another_of_its_decision_was_removed(run):
    """What else there was then cannot be told."""
    folder, (done, _), _ = run
    snapshot, whole = load_snapshot(folder / "state.json"), History.of_run(folder)
    other = next(name for name in whole.last(done).jobs if name != done)
    with sqlite3.connect(folder / "ledger.sqlite") as base:
        base.execute("DELETE FROM jobs WHERE name = ?", (other,))
    base.close()

    assert "jobs were removed" in explained(snapshot, History.of_job(folder, done), done)
