"""A disk that takes nothing more, a folder that is read-only: our own error, and nothing lost."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import signal
import sqlite3
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.scheduler.run_folder import records, run, write_job
from tests.server.conftest import job_file
from tests.server.test_serve import serving, wait
from tlora_fx.cli import main
from tlora_fx.errors import LedgerError, StorageFailed
from tlora_fx.runtime.workers.protocol import WorkerConfig
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import Intake
from tlora_fx.server.view import Metrics

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refusing(error):
    def refuse(*given, **named):
        raise error

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_request_that_the_disk_does_not_take_is_answered_by_our_own_error(
    asked, monkeypatch, caplog, number
):
    """An upload and a submission: 507, one line in the log, and nothing has changed."""
    it = asked()
    before, error = it.state(), OSError(number, os.strerror(number))
    content = b"{}"
    with monkeypatch.context() as changes, caplog.at_level(logging.ERROR):
        changes.setattr(Path, "open", refusing(error))
        sha256 = hashlib.sha256(content).hexdigest()
        upload = it.ask("PUT", f"/api/v1/files/{sha256}", content=content)
        changes.setattr(Path, "mkdir", refusing(error))
        submitted = it.submit(job_file("a"))

    for answer in (upload, submitted):
        assert (answer.status_code, answer.json()["code"]) == (507, "T0960")
        assert answer.json()["facts"]["reason"] == os.strerror(number)
    assert [record.exc_info for record in caplog.records] == [None, None]
    assert it.state() == before
    assert it.submit(job_file("a")).status_code == 201


def test_nothing_is_taken_while_the_disk_is_nearly_full(asked, monkeypatch):
    """What was taken before is answered as before; reads and orders to jobs go on."""
    it = asked()
    it.submit(job_file("a"), key="before")
    before = it.state()
    with monkeypatch.context() as changes:
        changes.setattr("tlora_fx.server.submission.missing_bytes", lambda path: 3 << 20)
        upload = it.ask("PUT", f"/api/v1/files/{hashlib.sha256(b'{}').hexdigest()}", content=b"{}")
        refused = it.submit(job_file("b"))
        again = it.submit(job_file("a"), key="before")
        assert it.state() == before
        paused = it.ask("POST", "/api/v1/jobs/a/pause")

    for answer in (upload, refused):
        assert (answer.status_code, answer.json()["code"]) == (507, "T0960")
        assert answer.json()["facts"]["reason"] == "3 MiB too few are free"
    assert (again.status_code, again.json()["replayed"]) == (200, True)
    assert paused.status_code == 202
    assert it.submit(job_file("b")).status_code == 201


def test_an_upload_that_fills_the_disk_is_refused_in_its_middle(asked, monkeypatch):
    """Nothing of it is kept."""
    it = asked()
    missing = iter([0, 0, 1])
    monkeypatch.setattr("tlora_fx.server.submission.missing_bytes", lambda path: next(missing))
    answer = it.ask("PUT", f"/api/v1/files/{'0' * 64}", content=iter([b"x", b"y", b"z"]))

    assert answer.status_code == 507
    assert not list(it.service.store.folder.glob("uploads/*/*"))


def test_a_change_that_the_ledger_does_not_take_is_answered_by_507(asked, caplog):
    """One line in the log; the same request is taken once there is room."""
    it = asked()
    it.submit(job_file("a"))
    store, full = it.service.store, "database or disk is full"
    plain = store._transition

    @contextmanager
    def transition(*given):
        with store._reading():
            raise sqlite3.OperationalError(full)
        yield

    store._transition = transition
    with caplog.at_level(logging.ERROR):
        answer = it.ask("POST", "/api/v1/jobs/a/pause")
        it.service.view._settled["a"] = float("-inf")
        it.service.view.metrics["a"] = Metrics(it.folder / "a" / "metrics.jsonl")
        it.refresh()
        it.service.view._settled["a"] = float("-inf")
        it.refresh()
    store._transition = plain

    assert (answer.status_code, answer.json()["code"]) == (507, "T0960")
    assert answer.json()["facts"]["reason"] == full
    ours = [record for record in caplog.records if record.name.startswith("tlora_fx")]
    assert [record.exc_info for record in ours if record.levelno >= logging.ERROR] == [None]
    assert it.ask("POST", "/api/v1/jobs/a/pause").status_code == 202


def test_an_accepted_submission_reaches_the_scheduler_once_there_is_room(asked, monkeypatch):
    """The ledger has it, its job file could not be written: it is written later, once."""
    it = asked()
    with monkeypatch.context() as changes:
        changes.setattr(Path, "write_bytes", refusing(FULL))
        # What was sent is written as text here.
        changes.setattr("tlora_fx.server.submission.Intake._read", read_without_writing)
        answer = it.submit(job_file("a"))
        assert not list(it.service.store.inbox.glob("*.yaml"))
        it.service.intake.hand_over()

    assert answer.status_code == 201
    assert not list(it.service.store.inbox.glob("*.yaml"))
    it.service.intake.hand_over()
    (written,) = it.service.store.inbox.glob("*.yaml")
    content = written.read_bytes()
    written.unlink()
    it.service.intake.hand_over()
    assert b"max_steps" in content
    assert not list(it.service.store.inbox.glob("*.yaml"))


def test_job_files_that_waited_for_room_are_written_in_their_order(asked, monkeypatch):
    """Also where another submission comes when there is room again: the first one stays first."""
    it = asked()
    intake, write, written = it.service.intake, Intake._write, []
    # All but one of the tries find no room.
    room = iter([False, False, False, True, True, True])

    def try_to_write(self, submission):
        if not next(room):
            raise FULL
        write(self, submission)
        written.append(submission.number)

    monkeypatch.setattr(Intake, "_write", try_to_write)
    for name in "abc":
        assert it.submit(job_file(name), key=name).status_code == 201
    assert not written
    intake.hand_over()

    assert written == [1, 2, 3]


def read_without_writing(self, user, folder, text, files, priority):
    from tlora_fx.config.job_file import load_job_file

    folder.mkdir(mode=0o700)
    path = folder / "jobs.yaml"
    path.write_text(text)
    return load_job_file(path).jobs


@pytest.mark.parametrize("kind", ["run", "service"])
def test_a_ledger_that_was_full_takes_the_next_change(tmp_path, kind):
    """The failed change is undone, whole; the connection goes on."""
    ledger, store = Ledger(tmp_path / "ledger.sqlite"), ServiceStore(tmp_path)
    base = ledger._base if kind == "run" else store._base
    [pages] = base.execute("PRAGMA page_count").fetchone()

    def insert(name, size):
        of = ledger._transition() if kind == "run" else store._transition("u", "", "")
        with of as inside:
            inside.execute("INSERT INTO facts VALUES (?, ?)", (name, "x" * size))

    base.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="full"):
        insert("large", 1_000_000)
    base.execute("PRAGMA max_page_count = 1000000")

    assert not base.in_transaction
    insert("small", 10)
    names = {name for (name,) in base.execute("SELECT name FROM facts")}
    assert {"large", "small"} & names == {"small"}


@contextmanager
def small_disk(folder: Path, megabytes: int):
    """A file system of its own, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nobody may mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    path = folder / "fill"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with path.open("wb", buffering=0) as file, suppress(OSError):
        # A worker may write meanwhile: what was free is not enough, or too much.
        for _ in range(free // 4096 + 1):
            file.write(bytes(4096))
    return path


def wait_for_line(log: Path, text: str) -> None:
    """Wait until a service has said something in its log."""
    end = time.monotonic() + 300
    while text not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_service_whose_disk_is_full_waits_and_goes_on(tmp_path):
    """In the same process: what trains waits, submissions are refused, every step is done once."""
    with small_disk(tmp_path / "run", 64) as folder:
        body = {"job_file": job_file("a", max_steps=400, max_length=32, save_steps=20)}
        with serving(folder) as (process, client):
            client.post("/submissions", json=body, headers={"Idempotency-Key": "one"})
            wait(client, lambda jobs: any(job["step"] >= 3 for job in jobs.values()))
            filled = fill(folder)
            wait_for_line(tmp_path / "log", "the disk is nearly full")
            time.sleep(10.0)
            step = client.get("/jobs/a").json()["step"]
            refused = client.post("/submissions", json=body, headers={"Idempotency-Key": "two"})
            time.sleep(5.0)
            assert client.get("/jobs/a").json()["step"] == step
            assert client.get("/jobs/a").json()["state"] == "running"
            filled.unlink()
            jobs = wait(client, lambda jobs: {job["state"] for job in jobs.values()} == {"done"})
            groups = client.get("/groups").json()
            assert process.poll() is None
        rows = (folder / "a" / "metrics.jsonl").read_text().splitlines()

    assert (refused.status_code, refused.json()["code"]) == (507, "T0960")
    assert jobs["a"]["step"] == 400
    assert len(groups) == 1
    assert [line.count('"loss"') for line in rows if '"loss"' in line] == [1] * 400
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_service_that_is_stopped_while_its_disk_is_full_goes_on_later(tmp_path):
    """Its job continues from its last commit."""
    with small_disk(tmp_path / "run", 64) as folder:
        body = {"job_file": job_file("a", max_steps=200, max_length=32, save_steps=20)}
        with serving(folder, "--grace", "2s") as (process, client):
            client.post("/submissions", json=body, headers={"Idempotency-Key": "one"})
            wait(client, lambda jobs: any(job["step"] >= 3 for job in jobs.values()))
            filled = fill(folder)
            wait_for_line(tmp_path / "log", "the disk is nearly full")
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        assert "Traceback" not in (tmp_path / "log").read_text()
        filled.unlink()
        with serving(folder) as (_, client):
            wait(client, lambda jobs: {job["state"] for job in jobs.values()} == {"done"})
        rows = (folder / "a" / "metrics.jsonl").read_text().splitlines()

    assert [line.count('"loss"') for line in rows if '"loss"' in line] == [1] * 200


@pytest.mark.parametrize("command", ["serve", "run", "train", "tokens add alice"])
def test_a_read_only_folder_is_our_error_at_the_start(tmp_path, capsys, command):
    """Whoever would write there; the error names the folder or its file."""
    jobs = tmp_path / "jobs" / "a.yaml"
    jobs.parent.mkdir()
    jobs.write_text(job_file("a"))
    given = {"run": [str(jobs.parent)], "train": [str(jobs)]}.get(command, [])
    with small_disk(tmp_path / "run", 16) as folder:
        if command != "train":
            ServiceStore(folder)._base.close()
        mounted = ["mount", "-o", "remount,ro", str(folder)]
        if subprocess.run(mounted, capture_output=True, check=False).returncode:
            pytest.skip("nobody may mount a file system here")
        with pytest.raises(SystemExit) as stopped:
            main([*command.split(), *given, "-o", str(folder)])

    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert "error[T0" in said
    assert str(folder) in said


def test_a_run_that_cannot_write_its_orders_ends_with_our_error(tmp_path, monkeypatch):
    """Which names the file; started again it goes on."""
    write_job(tmp_path / "jobs", "a", 5)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "groups/000001")
    with monkeypatch.context() as changes:
        changes.setattr(WorkerConfig, "write", refusing(full))
        with pytest.raises(StorageFailed, match="No space left") as told:
            run(tmp_path / "jobs", tmp_path / "run")
    assert told.value.facts["file"] == "groups/000001"

    run(tmp_path / "jobs", tmp_path / "run")
    assert records(tmp_path / "run")["a"].status == "done"
