"""Runs of job folders with workers that train nothing: arrivals, mistakes, kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tests.scheduler import run_folder
from tests.scheduler.fake_worker import GATE, adapter_of
from tests.scheduler.fork_here import ForkHere, GuestsHere
from tests.scheduler.run_folder import (
    LONGEST_SECONDS,
    QUICKSTART,
    Heard,
    Prepared,
    audit,
    epochs,
    forked,
    kill,
    records,
    run,
    write_job,
)
from tlora_fx.errors import JobFolderError, ProfileMismatch, RunFolderError
from tlora_fx.runtime.checkpoints.digests import file_digest
from tlora_fx.scheduler import service
from tlora_fx.scheduler.local import recovery
from tlora_fx.scheduler.local.admission import Admission
from tlora_fx.scheduler.local.executor import LocalExecutor
from tlora_fx.scheduler.local.recovery import held
from tlora_fx.scheduler.state import Decision, Group
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.store import ServiceStore


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """Nobody waits a second for a file, nor for a server that imports; processes fork from here."""
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(service, "ForkServer", ForkHere)


def stop_at_work(it):
    """Stop a run of two jobs that trains, once both are known."""
    if it.loop.running and len(it.loop.ended) == 2:
        it.stop()


def run_until_work(folder, **changed):
    """A run of jobs a and b that is stopped once both are known, and before either has ended."""
    gates = {"gates": {"a": 30, "b": 30}}
    run(folder / "jobs", folder / "run", **({"until": stop_at_work} | gates | changed))


def status_of(output, name):
    """How a job's folder says that it stands."""
    return json.loads((output / name / "status.json").read_text())


def require_trained_once(output, steps):
    """Every job is done, was trained from its last commit on each time, and has its adapter."""
    done = {name: (record.status, record.steps) for name, record in records(output).items()}
    assert done == {name: ("done", count) for name, count in steps.items()}
    for name, count in steps.items():
        assert json.loads((output / name / "adapter.json").read_text()) == adapter_of(name, count)
        require_no_step_past_a_commit_twice(output, name)


def require_no_step_past_a_commit_twice(output, name):
    committed = at = 0
    for _, _, what, job, step in audit(output):
        if job != name:
            continue
        if what == "begin":
            assert committed <= step <= at
            at = step
        elif what == "step":
            assert step == at + 1
            at = step
        else:
            committed = max(committed, step)


def test_every_job_of_a_folder_is_trained_once(tmp_path):
    """Whatever groups they were in."""
    steps = {"a": 30, "b": 50, "c": 10, "d": 20}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    run(tmp_path / "jobs", tmp_path / "run")

    require_trained_once(tmp_path / "run", steps)


def test_jobs_are_taken_as_they_appear(tmp_path):
    """Also while others train."""
    write_job(tmp_path / "jobs", "a", 50)
    late = []

    def then(it):
        if not late and it.loop.running:
            late.append(write_job(tmp_path / "jobs", "b", 5))
        elif "b" in it.loop.ended:
            (tmp_path / "run" / GATE).touch()

    run(tmp_path / "jobs", tmp_path / "run", until=then, gates={"a": 30})

    require_trained_once(tmp_path / "run", {"a": 50, "b": 5})


def test_a_job_that_came_joins_the_group_that_runs(tmp_path):
    """The only GPU is taken; sharing it gains more than the pause costs, and no step is lost."""
    write_job(tmp_path / "jobs", "a", 5000, schedule={"max_slowdown": 2.0})
    late = []

    def then(it):
        if not late and it.loop.running:
            late.append(write_job(tmp_path / "jobs", "b", 40, schedule={"max_slowdown": 2.0}))
        if it.loop.ended.get("b"):
            it.stop()

    policy = "tlora:dwell_seconds=0"
    # How long a busy machine takes to start a process is no cost of joining.
    changed = {"slots": 1, "policy": policy, "horizon": 2.0, "learns": False}
    changed["gates"] = {"a": 4000}  # a does not end before b has joined
    run(tmp_path / "jobs", tmp_path / "run", until=then, **changed)

    begun = [(epoch, job, step) for _, epoch, what, job, step in audit(tmp_path / "run")
             if what == "begin"]  # fmt: skip
    of_a = {epoch: step for epoch, job, step in begun if job == "a"}
    (shared,) = {epoch for epoch, job, _ in begun if job == "b"}
    assert of_a == {shared: 0}
    assert epochs(tmp_path / "run")[0].how == "goes on as 2"
    assert records(tmp_path / "run")["b"].status == "done"
    for name in ("a", "b"):
        require_no_step_past_a_commit_twice(tmp_path / "run", name)


def test_a_run_that_goes_on_after_its_clock_was_set_back_goes_on_in_time(tmp_path, monkeypatch):
    """Nobody ends before it began, and who comes now comes after those who waited."""
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)
    run_until_work(tmp_path)
    before, time_of_day = records(tmp_path / "run"), time.time
    monkeypatch.setattr(time, "time", lambda: time_of_day() - 86_400.0)
    write_job(tmp_path / "jobs", "c", 20)
    run(tmp_path / "jobs", tmp_path / "run")

    require_trained_once(tmp_path / "run", {"a": 60, "b": 60, "c": 20})
    jobs = records(tmp_path / "run")
    times = [(job.request.submitted, job.first_started, job.ended) for job in jobs.values()]
    assert [sorted(each) for each in times] == [list(each) for each in times]
    assert jobs["c"].request.submitted > max(job.request.submitted for job in before.values())


def test_a_clock_that_was_ahead_leaves_the_times_of_later_jobs_right(tmp_path, monkeypatch):
    """Also for a service that had its store open before; the run's seconds go on all the same."""
    jobs, output, time_of_day = tmp_path / "jobs", tmp_path / "run", time.time
    for name, days in (("a", 0), ("b", 365), ("c", 0)):
        monkeypatch.setattr(time, "time", lambda ahead=days: time_of_day() + 86_400.0 * ahead)
        store = ServiceStore(output)
        write_job(jobs, name, 5)
        run(jobs, output)

    by_name = records(output)
    assert by_name["a"].ended < by_name["b"].ended < by_name["c"].request.submitted
    assert abs(store.started + by_name["c"].ended - time_of_day()) < 86_400.0


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_is_set_changes_no_decision(tmp_path, monkeypatch, days):
    """A job that comes afterwards joins the group that runs, as it would have; nothing is lost."""
    schedule = {"max_slowdown": 2.0}
    write_job(tmp_path / "jobs", "a", 3000, schedule=schedule)
    time_of_day, late = time.time, []

    def then(it):
        if not late and any(run.started is not None for run in it.loop.running.values()):
            monkeypatch.setattr(time, "time", lambda: time_of_day() + 86_400 * days)
            late.append(write_job(tmp_path / "jobs", "b", 40, schedule=schedule))
        if it.loop.ended.get("b"):
            assert not it.loop.ended.get("a")
            it.stop()

    policy = "tlora:dwell_seconds=0"
    changed = {"slots": 1, "policy": policy, "horizon": 2.0, "learns": False}
    changed["gates"] = {"a": 2000}
    run(tmp_path / "jobs", tmp_path / "run", until=then, **changed)

    for one in epochs(tmp_path / "run"):
        assert 0 <= one.launched <= one.started <= one.ended < LONGEST_SECONDS
    assert records(tmp_path / "run")["b"].status == "done"
    for name in ("a", "b"):
        require_no_step_past_a_commit_twice(tmp_path / "run", name)


def test_a_bad_file_is_told_once_and_left(tmp_path):
    """Its neighbours run; mended, it is taken."""
    write_job(tmp_path / "jobs", "a", 50)
    bad = write_job(tmp_path / "jobs", "b", 5, learning_rat=1.0)
    heard = Heard()
    mended = []

    def mend(it):
        if not mended and any(said[3] for said in heard.said if said[0] == "took"):
            mended.append(write_job(tmp_path / "jobs", "b", 5))
        elif "b" in it.loop.ended:
            (tmp_path / "run" / GATE).touch()

    run(tmp_path / "jobs", tmp_path / "run", heard, until=mend, gates={"a": 30})

    mistakes = [said[3] for said in heard.said if said[0] == "took" and said[3]]
    assert len(mistakes) == 1
    assert "learning_rate" in mistakes[0]
    assert bad.exists()
    require_trained_once(tmp_path / "run", {"a": 50, "b": 5})


def test_a_file_that_is_being_written_waits(tmp_path):
    """A torn file is not read, however valid its first half is."""
    path = write_job(tmp_path / "jobs", "a", 5)
    whole = path.read_text()
    path.write_text(whole[:40])
    grown = []

    def write_on(it):
        if len(grown) < 3:
            grown.append(path.write_text(whole[: 60 + 20 * len(grown)]))
            time.sleep(0.4)
        elif len(grown) == 3:
            grown.append(path.write_text(whole))

    heard = run(tmp_path / "jobs", tmp_path / "run", until=write_on)

    assert [said for said in heard.said if said[0] == "took"] == [("took", "a.yaml", ["a"], "")]


def test_another_job_of_the_same_name_is_told_and_left_out(tmp_path):
    """What was submitted stays as it was."""
    write_job(tmp_path / "jobs", "a", 5)
    write_job(tmp_path / "jobs", "a", 9).rename(tmp_path / "jobs" / "z.yaml")
    write_job(tmp_path / "jobs", "a", 5)
    heard = run(tmp_path / "jobs", tmp_path / "run")

    assert "submitted before" in next(said[3] for said in heard.said if said[1] == "z.yaml")
    require_trained_once(tmp_path / "run", {"a": 5})


def test_a_job_that_cannot_run_is_refused_at_once(tmp_path):
    """With its reason; it is never left pending."""
    write_job(tmp_path / "jobs", "groups", 5)
    write_job(tmp_path / "jobs", "a", 5)
    heard = run(tmp_path / "jobs", tmp_path / "run")

    assert [said[1] for said in heard.said if said[0] == "refused"] == ["groups"]
    assert records(tmp_path / "run")["groups"].status == "refused"


def test_a_refused_job_is_tried_again_when_its_file_changes_or_the_run_starts_anew(
    tmp_path, monkeypatch
):
    """What was missing may be there then; and what is still wrong is told again."""
    write_job(tmp_path / "jobs", "measured-later", 5)
    write_job(tmp_path / "jobs", "groups", 5)
    (tmp_path / "jobs" / "broken.yaml").write_text("jobs: [")
    monkeypatch.setattr(Prepared, "learn", _unmeasured)
    first = run(tmp_path / "jobs", tmp_path / "run")
    monkeypatch.undo()
    again = run(tmp_path / "jobs", tmp_path / "run")

    refused, told = (
        [
            {said[1] for said in heard.said if said[0] == kind and said[-1]}
            for heard in (first, again)
        ]
        for kind in ("refused", "took")
    )
    assert refused == [{"measured-later", "groups"}, {"groups"}]
    assert told == [{"broken.yaml"}] * 2
    found = {name: record.status for name, record in records(tmp_path / "run").items()}
    assert found == {"measured-later": "done", "groups": "refused"}

    write_job(tmp_path / "jobs", "measured-later", 5)  # as it was: it is done
    write_job(tmp_path / "jobs", "mended", 4).replace(tmp_path / "jobs" / "groups.yaml")
    (tmp_path / "jobs" / "broken.yaml").unlink()
    last = run(tmp_path / "jobs", tmp_path / "run")
    assert not [said for said in last.said if said[0] == "refused"]
    assert records(tmp_path / "run")["mended"].status == "done"


def test_a_job_that_began_and_was_refused_later_goes_on_where_it_was(tmp_path):
    """As where a run was started again with too few GPUs, and then with enough."""
    write_job(tmp_path / "jobs", "a", 60)
    run(
        tmp_path / "jobs", tmp_path / "run", gates={"a": 30},
        until=lambda it: any(record.steps > 5 for record in it.ledger.jobs()),
    )  # fmt: skip
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    [record] = ledger.jobs()
    ledger.refuse(record.request, "it asks for 9 GPUs", record.spec)
    assert ledger.jobs()[0].status == "refused"
    ledger.close()

    run(tmp_path / "jobs", tmp_path / "run")

    require_trained_once(tmp_path / "run", {"a": 60})


def _unmeasured(prepared, job, base, shape):
    if job == "measured-later":
        raise ProfileMismatch("base 'base' was not measured")


def test_a_job_has_a_status_before_its_group_begins(tmp_path):
    """Each says how it stands; these workers write nothing themselves."""
    write_job(tmp_path / "jobs", "a", 5)

    run(tmp_path / "jobs", tmp_path / "run", until=lambda it: "a" in it.specs)

    assert status_of(tmp_path / "run", "a").items() >= {"status": "queued", "step": 0}.items()


def test_what_goes_wrong_in_a_group_is_told(tmp_path):
    """Once, though the group goes on and its job is trained."""
    write_job(tmp_path / "jobs", "a", 8)
    heard = run(tmp_path / "jobs", tmp_path / "run", warn_at=3)

    assert [said for said in heard.said if said[0] == "warned"] == [
        ("warned", ("a",), "the disk is full")
    ]
    assert records(tmp_path / "run")["a"].status == "done"


def test_a_run_holds_while_its_disk_is_nearly_full(tmp_path, monkeypatch):
    """Nothing is recorded, and nobody is charged or blamed for the time."""
    write_job(tmp_path / "jobs", "a", 60)
    began, during, missing, clock = [], [], [0], [0.0]
    excused = []
    for kind in (LocalExecutor, Admission):
        monkeypatch.setattr(kind, "excuse", lambda self: excused.append(type(self)))
    monkeypatch.setattr(service, "missing_bytes", lambda path: missing[0])

    def fill_and_free(it):
        if not began and it.loop.running:
            it.ledger._clock = lambda: clock[0]
            it.ledger.skip_time()
            began.append(it.ledger.jobs())
            write_job(tmp_path / "jobs", "b", 5)
            missing[0] = 5 << 20
        elif missing[0]:
            during.append((it.ledger.jobs(), len(it.loop.running), "b" in it.specs))
            if len(during) == 100:
                missing[0], clock[0] = 0, 3600.0

    heard = run(tmp_path / "jobs", tmp_path / "run", Notes(), until=fill_and_free)

    assert during == [(began[0], 1, False)] * 100
    assert [text.partition(":")[0] for what, text, *_ in heard.said if what == "noted"] == [
        "the disk is nearly full", "there is room on the disk again",
    ]  # fmt: skip
    assert excused == [LocalExecutor, Admission]
    assert sum(held_seconds(tmp_path / "run")) < 60.0
    require_trained_once(tmp_path / "run", {"a": 60, "b": 5})


def test_a_run_that_is_to_stop_does_not_wait_for_its_disk(tmp_path, monkeypatch):
    """Its groups are drained."""
    write_job(tmp_path / "jobs", "a", 6000)
    missing = [0]
    monkeypatch.setattr(service, "missing_bytes", lambda path: missing[0])

    def fill_and_stop(it):
        if it.loop.running and missing[0]:
            it.stop()
        missing[0] = len(it.loop.running)

    run(tmp_path / "jobs", tmp_path / "run", until=fill_and_stop)

    assert [record.how for record in epochs(tmp_path / "run")] == ["drained"]


class Notes(Heard):
    """Hears notes too."""

    def noted(self, time, text):
        self.said.append(("noted", text))


def test_a_run_says_that_it_waits_for_another_file(tmp_path):
    """Once, where it does not end at once."""
    write_job(tmp_path / "jobs", "a", 5)
    for linger, told in ((0.5, 1), (0.0, 0)):
        heard = run(tmp_path / "jobs", tmp_path / f"run{told}", Notes(), linger=linger)
        assert sum("no job is left" in said[1] for said in heard.said if said[0] == "noted") == told


def held_seconds(output):
    """Seconds for which each group is charged."""
    with closing(sqlite3.connect(output / "ledger.sqlite")) as base:
        return [held for (held,) in base.execute("SELECT held FROM epochs")]


def test_files_that_block_or_break_the_reader_are_left_and_others_train(tmp_path):
    """A pipe, a link to an endless device, a file of many bytes, numbers that nothing holds."""
    folder = tmp_path / "jobs"
    write_job(folder, "a", 5)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "endless.yaml").symlink_to("/dev/zero")
    (folder / "large.yaml").write_text("a: " + "x" * (1 << 21))
    heard = run(folder, tmp_path / "run")

    mistakes = {said[1]: said[3] for said in heard.said if said[0] == "took" and said[3]}
    assert "no regular file" in mistakes["pipe.yaml"]
    assert "no regular file" in mistakes["endless.yaml"]
    assert "too large" in mistakes["large.yaml"]
    require_trained_once(tmp_path / "run", {"a": 5})


@pytest.mark.parametrize(
    "error", [OverflowError("too large"), RecursionError(), KeyError("\ud800")]
)
def test_whatever_preparing_a_job_raises_the_others_train(tmp_path, monkeypatch, error):
    """The job is refused with what Python says."""
    write_job(tmp_path / "jobs", "a", 5)
    write_job(tmp_path / "jobs", "b", 5)
    plain = Prepared.request

    def breaks(self, job, now):
        if job.name == "b":
            raise error
        return plain(self, job, now)

    monkeypatch.setattr(Prepared, "request", breaks)
    heard = run(tmp_path / "jobs", tmp_path / "run")

    assert [said[1] for said in heard.said if said[0] == "refused"] == ["b"]
    assert type(error).__name__ in records(tmp_path / "run")["b"].reason
    assert records(tmp_path / "run")["a"].status == "done"


def test_a_folder_that_vanishes_ends_no_run(tmp_path):
    """What was submitted is trained."""
    write_job(tmp_path / "jobs", "a", 150)

    def vanish(it):
        if it.loop.running:
            shutil.rmtree(tmp_path / "jobs", ignore_errors=True)

    run(tmp_path / "jobs", tmp_path / "run", until=vanish)

    assert records(tmp_path / "run")["a"].status == "done"


def test_a_job_whose_base_is_gone_at_a_restart_waits_for_the_next_one(tmp_path, monkeypatch):
    """It is told and not refused, and the others go on."""
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)
    run_until_work(tmp_path)
    parked = []

    def restored(self, job):
        if job.name == "b":
            raise FileNotFoundError("the base is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Prepared, "restored", restored)
        patched.setattr(Heard, "parked", lambda self, time, request, why: parked.append(why))
        run(tmp_path / "jobs", tmp_path / "run")
    waiting = records(tmp_path / "run")
    run(tmp_path / "jobs", tmp_path / "run")

    assert parked == ["FileNotFoundError: the base is gone"]
    assert waiting["b"].reason == f"waits for the next start: {parked[0]}"
    assert records(tmp_path / "run")["b"].reason == ""
    assert (waiting["a"].status, waiting["b"].status) == ("done", "queued")
    require_trained_once(tmp_path / "run", {"a": 60, "b": 60})


def test_new_jobs_train_while_those_of_an_earlier_process_are_looked_at(tmp_path, monkeypatch):
    """A base that takes long to look at holds up its own jobs alone."""
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)
    run_until_work(tmp_path)
    write_job(tmp_path / "jobs", "c", 10)

    def restored(self, job):
        while job.name == "b" and not (tmp_path / "go").exists():
            time.sleep(0.01)

    def go(it):
        status = {record.name: record.status for record in it.ledger.jobs()}
        if status.get("c") == "done":
            (tmp_path / "go").touch()

    monkeypatch.setattr(Prepared, "restored", restored)
    run(tmp_path / "jobs", tmp_path / "run", until=go)

    assert (tmp_path / "go").exists()
    require_trained_once(tmp_path / "run", {"a": 60, "b": 60, "c": 10})


@pytest.mark.parametrize("accept", [False, True])
def test_a_job_of_other_data_waits_at_a_restart_unless_that_is_accepted(
    tmp_path, monkeypatch, accept
):
    """Its file holds other samples than its checkpoint was made with; the others go on."""
    file = file_digest(QUICKSTART / "data" / "records.jsonl")
    same, other = ({"path": "records.jsonl", "file": kind, "samples": "x"} for kind in (file, "y"))
    base = {"dtype": "bfloat16", "quantize": None, "seed": 0, "config": {}}
    base |= {"tensors": None, "whole": None}
    described = {"data": {"a": same, "b": other}, "base": base}
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)

    def stop(it):
        if [bool(record.path) for record in it.ledger.jobs()] == [True, True]:
            it.stop()

    run_until_work(tmp_path, until=stop, described=described)
    parked = []
    monkeypatch.setattr(Heard, "parked", lambda self, time, request, why: parked.append(why))
    run(tmp_path / "jobs", tmp_path / "run", accept_changes=accept)
    after = records(tmp_path / "run")

    assert after["a"].status == "done"
    assert after["b"].status == ("done" if accept else "queued")
    assert bool(parked) is not accept
    assert all("other samples" in why for why in parked)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    """Before anything is written."""
    with pytest.raises(JobFolderError):
        run(tmp_path / "jobs", tmp_path / "run")


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """The second is told."""
    write_job(tmp_path / "jobs", "a", 5)
    with held(tmp_path / "run"), pytest.raises(RunFolderError, match="another process"):
        run(tmp_path / "jobs", tmp_path / "run")


def test_a_lock_that_a_killed_run_leaves_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    """What it was just forking holds its files until it executes."""
    listening, telling = os.pipe()
    with held(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.read(listening, 1)
            os._exit(0)
    pauses = []

    def end_the_holder(seconds):
        if not pauses:
            os.write(telling, b".")
            os.waitpid(pid, 0)
        pauses.append(seconds)

    monkeypatch.setattr(recovery, "GRACE_SECONDS", LONGEST_SECONDS)
    monkeypatch.setattr(
        recovery, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end_the_holder)
    )
    with held(tmp_path):
        assert pauses
    for end in (listening, telling):
        os.close(end)


def test_a_stopped_run_goes_on(tmp_path):
    """Every group is drained; the next process forms them anew."""
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)
    run_until_work(tmp_path)
    before = records(tmp_path / "run")
    stopped = [status_of(tmp_path / "run", name) for name in "ab"]
    waiting = []

    def look(it):
        waiting[:] = waiting or [status_of(tmp_path / "run", name) for name in "ab"]

    heard = run(tmp_path / "jobs", tmp_path / "run", until=look)

    assert {record.status for record in before.values()} == {"queued"}
    assert [(told["status"], told["step"]) for told in stopped] == [("stopped", 0)] * 2
    assert [(told["status"], told["step"]) for told in waiting] == [("queued", 0)] * 2
    assert ("went on", 2, 0) in heard.said
    assert not [said for said in heard.said if said[0] == "took"]
    require_trained_once(tmp_path / "run", {"a": 60, "b": 60})


def test_a_group_that_runs_is_charged_for_its_gpus_before_it_ends(tmp_path, monkeypatch):
    """At each heartbeat, so that a run that is killed has counted what came before."""
    monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 0.0)
    write_job(tmp_path / "jobs", "a", 10_000)

    def is_charged(it):
        with closing(sqlite3.connect(it.ledger.path)) as base:
            rows = base.execute("SELECT held FROM epochs WHERE ended IS NULL").fetchall()
        return any(held > 0 for (held,) in rows)

    # A run that charged nothing would train all steps, and its group would end.
    run(tmp_path / "jobs", tmp_path / "run", until=is_charged)

    assert records(tmp_path / "run")["a"].status == "running"


def test_a_run_ends_within_its_grace_whatever_its_workers_do(tmp_path):
    """What it had committed is there for the next start."""
    write_job(tmp_path / "jobs", "a", 60)
    stopped = []

    def stop(it):
        at = [job.steps_done for job in it.loop.active.values()]
        if at and at[0] >= 30 and not stopped:
            stopped.append(it.stop())

    hangs = {"hang_at": 30, "grace_seconds": 0.5}
    run(tmp_path / "jobs", tmp_path / "run", until=stop, **hangs)
    left = records(tmp_path / "run")["a"]
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    [epoch] = ledger.epochs()
    ledger.close()
    run(tmp_path / "jobs", tmp_path / "run")

    assert "did not stop in its grace" in epoch.how
    assert (left.status, left.steps > 0) == ("queued", True)
    require_trained_once(tmp_path / "run", {"a": 60})


@pytest.mark.parametrize("names", ["a", "ab"])
def test_jobs_whose_group_was_killed_as_the_run_stopped_are_not_at_fault(tmp_path, names):
    """However often the run is stopped: no job is given up, and none is put alone."""
    for name in names:
        write_job(tmp_path / "jobs", name, 20, schedule={"max_slowdown": 2.0})
    here = {"slots": 1, "policy": "tlora:dwell_seconds=0", "learns": False}

    def stop(it):
        if len(it.loop.ended) == len(names) and any(
            hangs(tmp_path / "run" / "groups" / f"{epoch:06d}") for epoch in it.loop.running
        ):
            it.stop()

    for _ in range(3):
        run(tmp_path / "jobs", tmp_path / "run", until=stop, hang_at=0, grace_seconds=0.3, **here)
    run(tmp_path / "jobs", tmp_path / "run", **here)

    require_trained_once(tmp_path / "run", dict.fromkeys(names, 20))
    *stopped, last = epochs(tmp_path / "run")
    assert [epoch.jobs for epoch in (*stopped, last)] == [tuple(names)] * 4
    assert all("did not stop in its grace" in epoch.how for epoch in stopped)


def hangs(group):
    """Whether a group's first process has stopped itself."""
    with suppress(FileNotFoundError, ValueError):
        process = int((group / "pid").read_text())
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def test_a_run_whose_folder_is_removed_ends_with_an_error(tmp_path):
    """Nothing that it would write is anywhere."""
    write_job(tmp_path / "jobs", "a", 5000)

    def remove(it):
        # What a worker writes meanwhile may make another folder of this name.
        if it.loop.running and not (tmp_path / "elsewhere").exists():
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(RunFolderError, match="removed or replaced"):
        run(tmp_path / "jobs", tmp_path / "run", until=remove)


def killed_at_random(tmp_path, points, seed, *, gap=2.0, **changed):
    """A run that is killed so often before its end; sometimes with all its workers."""
    chance = random.Random(seed)
    # More than a machine with nothing else to do trains between the kills.
    most = round(100 * gap)
    steps = {f"job-{n}": points * chance.randint(most // 2, most) for n in range(6)}
    jobs, output = tmp_path / "jobs", tmp_path / "run"
    for name in list(steps)[:3]:
        write_job(jobs, name, steps[name], schedule={"max_slowdown": 3.0})
    for point in range(points):
        if point == 1:
            for name in list(steps)[3:]:
                write_job(jobs, name, steps[name], schedule={"max_slowdown": 3.0})
        pid = forked(jobs, output, step_seconds=0.005, **changed)
        time.sleep(chance.uniform(0.05, gap))
        assert kill(pid, workers=chance.random() < 0.3)
    pid = forked(jobs, output, step_seconds=0.005, **changed)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    require_trained_once(output, steps)


def test_a_run_survives_kills(tmp_path, monkeypatch):
    """No job is lost, and none is trained twice past its last commit."""
    monkeypatch.setattr(service, "ForkServer", GuestsHere)
    killed_at_random(tmp_path, 3, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_survives_kills_at_twenty_points(tmp_path, monkeypatch, seed):
    """The same at twenty random points."""
    monkeypatch.setattr(service, "ForkServer", GuestsHere)
    killed_at_random(tmp_path, 20, seed)


@dataclass(frozen=True)
class Shuffling:
    """Forms two groups of whatever there is, others each time: jobs join, leave and move."""

    name: ClassVar[str] = "shuffling"

    seconds: float = 0.5

    def decide(self, state, *, explain=False):
        names = sorted(state.jobs)
        turn = int(state.now / self.seconds)
        sides = ([], [])
        for index, name in enumerate(names):
            sides[(index + (turn >> index % 3)) % 2].append(name)
        groups = []
        for place, side in enumerate(sides):
            same = (g for g in state.groups if set(g.jobs) == set(side) and g.place == (place,))
            if side:
                groups.append(next(same, Group(tuple(side), 1, (place,), 1.0, state.now)))
        return Decision(tuple(groups))


def survives_kills_while_jobs_move(tmp_path, monkeypatch, points, seed):
    monkeypatch.setattr(run_folder, "policy_of", lambda name: Shuffling())
    killed_at_random(tmp_path, points, seed, gap=3.0, horizon=0.3, refresh=1)
    hows = [record.how for record in epochs(tmp_path / "run")]
    assert sum(how.startswith("goes on as") for how in hows) > points


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_of_jobs_that_join_leave_and_move_survives_kills(tmp_path, monkeypatch, seed):
    """At forty random points: no job is lost, and none is trained twice past its last commit."""
    monkeypatch.setattr(service, "ForkServer", GuestsHere)
    survives_kills_while_jobs_move(tmp_path, monkeypatch, 20, seed)


def test_jobs_join_leave_and_move_between_groups_that_train(tmp_path, monkeypatch):
    """All in one run: each is trained once, whatever groups it was in."""
    monkeypatch.setattr(run_folder, "policy_of", lambda name: Shuffling())
    steps = {"a": 150, "b": 250, "c": 200}
    for name, count in steps.items():
        write_job(tmp_path / "jobs", name, count)
    run(tmp_path / "jobs", tmp_path / "run", horizon=0.3, refresh=1, step_seconds=0.01)

    require_trained_once(tmp_path / "run", steps)
