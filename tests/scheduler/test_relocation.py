"""Paths in a ledger follow the run's folder."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.test_store import request
from tlora_fx.scheduler.executor import Committed
from tlora_fx.scheduler.state import Group
from tlora_fx.scheduler.store import Ledger

names = st.text("ab é\"'\\%_", min_size=1, max_size=6).map(lambda text: f"x{text}x")


@given(old=names, new=names)
def test_a_ledger_that_moved_names_paths_where_it_lies(tmp_path_factory, old, new):
    """Whatever the folders are called; other paths stay, also those that end as the old one."""
    top = tmp_path_factory.mktemp("top")
    before, after = top / old, top / f"{new}-2"
    before.mkdir()
    ledger = Ledger(before / "ledger.sqlite")
    spec = {"data": f"{before}/a", "other": f"/far{before}/a", "beside": f"{before}-1/a"}
    ledger.submit(request("a"), spec, f"{before}/inbox/1.yaml")
    ledger.note_file(f"{before}/inbox/1.yaml", "0", "taken")
    ledger.note_file(f"{top}/elsewhere.yaml", "0", "taken")
    ledger.launch(Group(("a",), 1, (0,)), 1, None, 1.0)
    ledger.record(Committed(2.0, 1, {"a": 5}, f"{before}/groups/000001/train"))
    ledger.close()
    shutil.move(before, after)

    for _ in range(2):
        ledger = Ledger(after / "ledger.sqlite")
        [job] = ledger.jobs()
        assert job.spec == spec | {"data": f"{after}/a"}
        assert job.path == f"{after}/groups/000001/train"
        assert ledger.origins() == {"a": f"{after}/inbox/1.yaml"}
        assert ledger.file(f"{after}/inbox/1.yaml") != ("", "")
        assert ledger.file(f"{before}/inbox/1.yaml") == ("", "")
        assert ledger.file(f"{top}/elsewhere.yaml") != ("", "")
        ledger.close()


def test_a_run_whose_folder_was_given_as_a_relative_path_may_move(tmp_path, monkeypatch):
    """Its jobs go on from the checkpoints in the folder where it lies now."""
    monkeypatch.chdir(tmp_path)
    Path("team").mkdir()
    ledger = Ledger(Path("team") / "ledger.sqlite")
    ledger.submit(request("a"))
    ledger.launch(Group(("a",), 1, (0,)), 1, None, 1.0)
    ledger.record(Committed(2.0, 1, {"a": 5}, "team/groups/000001/train"))
    ledger.close()
    shutil.move("team", "other")

    [job] = Ledger(Path("other") / "ledger.sqlite").jobs()
    assert job.path == str(tmp_path / "other" / "groups" / "000001" / "train")


def test_an_older_ledger_that_moved_tells_its_folder_by_its_submissions(tmp_path):
    """Which were read in the inbox of the service."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.submit(request("a"), {"data": "/old/run/service/submitted/1/a.jsonl"})
    ledger.note_file("/old/run/service/inbox/000001.yaml", "0", "taken")
    ledger.close()
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("DELETE FROM facts WHERE name = 'folder'")

    ledger = Ledger(path)
    [job] = ledger.jobs()
    assert job.spec == {"data": f"{tmp_path}/service/submitted/1/a.jsonl"}
    assert ledger.file("/old/run/service/inbox/000001.yaml") == ("", "")
    _, told = ledger.file(f"{tmp_path}/service/inbox/000001.yaml")
    assert told == "taken"
