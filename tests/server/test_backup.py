"""A service's run is upgraded, backed up while it serves, and restored into another folder."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.scheduler.run_folder import audit
from tests.server.conftest import QUICKSTART, job_file
from tests.server.test_control import (  # noqa: F401  (a fixture)
    ME,
    looks_often,
    made,
    run,
    states,
    until,
)
from tests.server.test_control import done as steps_of
from tlora_fx.errors import NewerFormat
from tlora_fx.scheduler.history import History
from tlora_fx.server.ledger import User
from tlora_fx.server.store import Page, ServiceStore

OLD_FORMATS = Path(__file__).parents[1] / "old_formats"
DOCS = Path(__file__).parents[2] / "docs" / "service.md"


@pytest.fixture
def old(tmp_path):
    """The folder of a run whose ledger has format 1, and whose service's tables have no format."""
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as base:
        base.executescript((OLD_FORMATS / "ledger-1.sql").read_text())
    return tmp_path


def facts(folder):
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        return dict(base.execute("SELECT name, value FROM facts"))


def test_a_store_without_a_format_is_migrated(old):
    """Users, tokens and jobs stay, a token is still required, and the ledger says its formats."""
    store = ServiceStore(old)
    token = "tlora-" + 43 * "x"

    assert {user.name: tokens for user, tokens in store.users().items()} == {"alice": 1}
    assert store.user_of(token).gpu_hours == 100.0
    assert store.tokens_required()
    assert {job.name: (job.state, job.total) for job in store.jobs()} == {
        "alice.done": ("done", 10), "alice.half": ("running", 10), "alice.new": ("queued", 10),
    }  # fmt: skip
    assert store.gpu_hours("alice") == pytest.approx(60 / 3600)
    assert (facts(old)["format"], facts(old)["service_format"]) == ("4", "2")


@pytest.mark.parametrize("version", ["", "1"])
def test_a_store_without_totals_and_removal_is_migrated(old, version):
    """Ended jobs are settled, their GPU-hours counted once, and they are explained and removed."""
    if version:
        with closing(sqlite3.connect(old / "ledger.sqlite")) as base, base:
            base.execute("INSERT INTO facts VALUES ('service_format', ?)", (version,))
            base.execute("INSERT INTO facts VALUES ('version', '0.1')")
    store = ServiceStore(old)
    alice = User("alice")
    assert [job.name for job in store.settle()] == ["alice.half", "alice.new"]

    assert store.standing()[1] == {("alice", "done"): 1}
    assert store.gpu_hours("alice") == pytest.approx(60 / 3600)
    assert [job.number for job in store.page(alice, Page(ended=True))] == [1]
    assert [each.epoch for each in History.of_job(old, "alice.half").epochs] == [1, 2]
    store.rows("INSERT INTO files VALUES (?, '', 'taken')", str(store.file_of(1).absolute()))
    store.remove(alice, "done")
    assert [job.number for job in ServiceStore(old).jobs()] == [2, 3]
    assert store.submit(alice, "new", "", ["alice.new2"], "", "", 0).number == 2
    assert [job.number for job in store.jobs()] == [2, 3, 4]
    assert store.gpu_hours("alice") == pytest.approx(60 / 3600)
    assert facts(old)["service_format"] == "2"


def test_a_store_of_a_newer_format_is_refused(old):
    """And nothing of the service is changed."""
    ServiceStore(old)
    with closing(sqlite3.connect(old / "ledger.sqlite")) as base, base:
        base.execute("UPDATE facts SET value = '3' WHERE name = 'service_format'")
        base.execute("DROP TABLE access")

    with pytest.raises(NewerFormat, match="newer version of tlora-fx"):
        ServiceStore(old)
    assert facts(old)["service_format"] == "3"
    with closing(sqlite3.connect(old / "ledger.sqlite")) as base:
        assert not base.execute("SELECT 1 FROM sqlite_master WHERE name = 'access'").fetchone()


def commands() -> str:
    """What docs/service.md says makes a backup while the service runs."""
    text = DOCS.read_text("utf-8").split("### Backup")[1]
    return text.split("```sh\n")[1].split("```")[0]


def test_a_backup_that_is_made_while_it_serves_is_restored_into_another_folder(tmp_path):
    """The commands of the page; jobs that train, wait or were paused go on, those done stay so."""
    if shutil.which("sqlite3") is None:
        pytest.skip("there is no sqlite3 command")
    it = made(tmp_path / "runs" / "team")
    upload = (QUICKSTART / "data" / "records.jsonl").read_bytes()
    sha256 = hashlib.sha256(upload).hexdigest()
    (it.store.folder / "uploads" / ME.name).mkdir(parents=True)
    (it.store.folder / "uploads" / ME.name / sha256).write_bytes(upload)

    def submit(name, steps):
        text = job_file(name, data="mine.jsonl", max_steps=steps)
        it.intake.submit(ME, name, text, {"mine.jsonl": sha256}, 0)

    for name, steps in (("first", 3), ("long", 400), ("waits", 4)):
        submit(name, steps)

    def script():
        yield from until(lambda: states(it)["first"] == "done" and len(steps_of(it, "long")) > 20)
        subprocess.run(["bash", "-euc", commands()], cwd=tmp_path, check=True)

    run(it, script)
    committed = steps_of(it, "long")[-1]
    # Nothing of the old folder is needed.
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(tmp_path / "backup" / "team", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "audit.jsonl").unlink()
    again = made(tmp_path / "elsewhere")
    assert states(again)["first"] == "done"

    def to_the_end():
        ended = ("done", "failed", "refused", "cancelled")
        yield from until(lambda: all(state in ended for state in states(again).values()))

    run(again, to_the_end)
    assert states(again) == {"first": "done", "long": "done", "waits": "done"}
    trained = [
        step for _, _, what, name, step in audit(again.folder) if (what, name) == ("step", "long")
    ]
    assert trained == list(range(trained[0], 401))
    assert 1 < trained[0] <= committed + 1
    assert steps_of(again, "first") == []
    for path in (again.store.folder / "inbox").iterdir():
        assert str(tmp_path / "runs") not in path.read_text()
