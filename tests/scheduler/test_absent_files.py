"""Runs with jobs whose base or data cannot be read for a while, and workers that train nothing."""

from __future__ import annotations

import pytest

from tests.scheduler.fake_worker import GONE
from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import Heard, Prepared, audit, epochs, records, run, write_job
from tests.scheduler.test_service import require_trained_once, run_until_work
from tlora_fx.scheduler import service
from tlora_fx.scheduler.loop import Loop
from tlora_fx.scheduler.store import GOES_ON


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """Nobody waits a second for a file, nor for a server that imports; processes fork from here."""
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(service, "ForkServer", ForkHere)


@pytest.fixture
def given(monkeypatch):
    """GPU-seconds that each job has given when it is set aside, and no decision has seen."""
    plain = Loop.set_aside

    def set_aside(self, name):
        if (job := plain(self, name)) is not None:
            job.credit = 7.0
        return job

    monkeypatch.setattr(Loop, "set_aside", set_aside)
    return 7.0


def test_jobs_whose_files_cannot_be_read_wait_for_them_and_go_on(tmp_path, monkeypatch, given):
    """From their last commits; another job trains meanwhile, and nobody is given up."""
    for name in "ab":
        write_job(tmp_path / "jobs", name, 60)
    run_until_work(tmp_path)
    write_job(tmp_path / "jobs", "c", 60)
    gone, heard, reasons = tmp_path / "run" / GONE, [], {}
    gone.mkdir()
    for name in "ab":
        (gone / name).touch()

    def restored(self, job):
        # The files go away once the run has taken up its jobs.
        mark = tmp_path / f"seen-{job.name}"
        if mark.exists() and (gone / job.name).exists():
            raise FileNotFoundError("it is gone")
        mark.touch()

    def bring_back(it):
        active = {each.name: each.reason for each in it.ledger.active_jobs()}
        if active.keys() == {"a", "b"} and all("FileNotFound" in why for why in active.values()):
            reasons.update(active)
            for name in "ab":
                (gone / name).unlink(missing_ok=True)

    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", restored)
    monkeypatch.setattr(
        Heard, "missed_files", lambda self, time, request, why: heard.append((request.name, why))
    )
    run(tmp_path / "jobs", tmp_path / "run", until=bring_back, tries=1)

    assert dict(heard) == dict.fromkeys("ab", "it is gone")
    assert reasons == dict.fromkeys("ab", "waits for its files: FileNotFoundError: it is gone")
    assert {each.reason for each in records(tmp_path / "run").values()} == {""}
    credit = {each.name: each.credit for each in records(tmp_path / "run").values()}
    assert credit == {"a": given, "b": given, "c": 0.0}
    require_trained_once(tmp_path / "run", dict.fromkeys("abc", 60))


def test_a_job_that_waits_for_its_files_does_so_after_a_restart(tmp_path, monkeypatch, given):
    """It is told again, and goes on by itself once they are back."""
    write_job(tmp_path / "jobs", "a", 60)
    gone, heard = tmp_path / "run" / GONE, []
    gone.mkdir(parents=True)
    (gone / "a").touch()

    def restored(self, job):
        if (gone / job.name).exists():
            raise FileNotFoundError("it is gone")

    def waits(it):
        return any(each.reason.endswith("it is gone") for each in it.ledger.active_jobs())

    def bring_back(it):
        looked = (absent := it._absent.get("a")) and absent.pause > service.FILES_SECONDS
        if looked and waits(it):
            (gone / "a").unlink(missing_ok=True)

    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", restored)
    monkeypatch.setattr(
        Heard, "missed_files", lambda self, time, request, why: heard.append(request.name)
    )
    run(tmp_path / "jobs", tmp_path / "run", until=waits)
    assert records(tmp_path / "run")["a"].credit == given
    heard.clear()
    run(tmp_path / "jobs", tmp_path / "run", until=bring_back)

    assert heard == ["a"]
    require_trained_once(tmp_path / "run", {"a": 60})
    assert records(tmp_path / "run")["a"].reason == ""


def test_a_run_that_is_killed_when_files_go_away_waits_for_them_once_it_goes_on(
    tmp_path, monkeypatch
):
    """Killed after it has written that the group failed, and before anything else."""
    write_job(tmp_path / "jobs", "a", 20)
    gone, heard = tmp_path / "run" / GONE / "a", []
    gone.parent.mkdir(parents=True)
    gone.touch()

    def restored(self, job):
        if gone.exists():
            raise FileNotFoundError("it is gone")

    def die(self, now):
        if self.loop.absent:
            raise KeyboardInterrupt

    def bring_back(it):
        looked = (absent := it._absent.get("a")) and absent.pause > service.FILES_SECONDS
        if looked and gone.exists():
            gone.unlink()

    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", restored)
    monkeypatch.setattr(
        Heard, "missed_files", lambda self, time, request, why: heard.append((request.name, why))
    )
    with monkeypatch.context() as patched:
        patched.setattr(service.SchedulerService, "_set_aside", die)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "jobs", tmp_path / "run")
    run(tmp_path / "jobs", tmp_path / "run", until=bring_back)

    assert heard == [("a", "it is gone")]
    require_trained_once(tmp_path / "run", {"a": 20})
    assert records(tmp_path / "run")["a"].reason == ""


def test_a_job_that_waits_for_its_files_goes_on_though_its_job_file_is_removed(
    tmp_path, monkeypatch
):
    """As any that has begun: that is told, once."""
    job, kept = write_job(tmp_path / "jobs", "a", 20), []
    gone = tmp_path / "run" / GONE / "a"
    gone.parent.mkdir(parents=True)
    gone.touch()

    def restored(self, job):
        if gone.exists():
            raise FileNotFoundError("it is gone")

    def remove(it):
        if "a" in it._absent:
            job.unlink(missing_ok=True)
        # A file that was looked for in vain has no origin any more.
        if "a" not in it._origins and "a" in it._absent:
            gone.unlink(missing_ok=True)

    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", restored)
    monkeypatch.setattr(Heard, "kept", lambda self, time, name: kept.append(name))
    run(tmp_path / "jobs", tmp_path / "run", until=remove)

    assert kept == ["a"]
    require_trained_once(tmp_path / "run", {"a": 20})


def test_a_job_whose_files_go_away_before_it_joins_holds_nobody_up(tmp_path, monkeypatch):
    """The group that it should have joined trains on in its process; the job joins it later."""
    write_job(tmp_path / "jobs", "a", 5000, schedule={"max_slowdown": 2.0})
    gone, heard, alone = tmp_path / "run" / GONE / "b", [], []

    def then(it):
        if it.loop.running and not gone.parent.exists():
            gone.parent.mkdir(parents=True)
            gone.touch()
            write_job(tmp_path / "jobs", "b", 40, schedule={"max_slowdown": 2.0})
        if heard and it._absent["b"].pause > service.FILES_SECONDS and gone.exists():
            [b] = [each for each in it.ledger.active_jobs() if each.name == "b"]
            alone.extend([group.group.jobs for group in it.loop.running.values()])
            alone.append((b.status, b.first_started, b.reason))
            gone.unlink()
        if it.loop.ended.get("b"):
            it.stop()

    def restored(self, job):
        if (tmp_path / "run" / GONE / job.name).exists():
            raise FileNotFoundError("it is gone")

    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", restored)
    monkeypatch.setattr(
        Heard, "missed_files", lambda self, time, request, why: heard.append((request.name, why))
    )
    changed = {"slots": 1, "policy": "tlora:dwell_seconds=0", "horizon": 2.0, "learns": False}
    changed["gates"] = {"a": 4000}  # a does not end before b has joined
    run(tmp_path / "jobs", tmp_path / "run", until=then, tries=1, **changed)

    assert heard == [("b", "it is gone")]
    assert alone == [
        ("a",),
        ("queued", None, "waits for its files: FileNotFoundError: it is gone"),
    ]
    took_over = [each for each in epochs(tmp_path / "run") if each.how.startswith(GOES_ON)]
    joined = [epoch for _, epoch, what, job, _ in audit(tmp_path / "run") if what == "begin"]
    assert len(took_over) == 2
    assert len(joined) == 2
    assert [each.jobs for each in epochs(tmp_path / "run")][1:3] == [("a",), ("a", "b")]
    done = records(tmp_path / "run")
    assert (done["b"].status, done["b"].steps, done["a"].status) == ("done", 40, "queued")
