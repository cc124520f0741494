"""What a run's folder says of its versions; nothing is trained."""

from __future__ import annotations

import json

import pytest

from tlora_fx.errors import NewerFormat, RunFolderError
from tlora_fx.host.version import __version__
from tlora_fx.runtime.reports.run_view import read_run
from tlora_fx.runtime.run_folder import RunFolder, ask_to_stop

PLACES = ("run.json", "a/status.json")


@pytest.fixture
def folder(tmp_path):
    """A run of job a, which has begun."""
    folder = RunFolder(tmp_path)
    folder.begin(["a"])
    folder.write_status("a", {"status": "running", "step": 3})
    return folder


def edited(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_run_and_status_say_their_format_and_version(folder):
    """Beside what they said before."""
    stamp = {"format": 1, "version": __version__}
    run, status = (json.loads((folder.path / name).read_text()) for name in PLACES)

    assert run == {"jobs": ["a"]} | stamp
    assert status == {"status": "running", "step": 3} | stamp


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.json", lambda folder: folder.require_own(["a"])),
        ("a/status.json", lambda folder: read_run(folder.path)),
        ("a/status.json", lambda folder: ask_to_stop(folder.path, "a")),
    ],
)
def test_a_newer_format_is_refused(folder, name, read):
    """With what to do; the file stays as it is."""
    edited(folder.path / name, format=2, version="9.0")
    before = (folder.path / name).read_bytes()

    with pytest.raises(NewerFormat, match="newer version of tlora-fx") as error:
        read(folder)
    assert error.value.facts["found"] == "format 2, by tlora-fx 9.0"
    assert "upgrade tlora-fx" in error.value.help
    assert (folder.path / name).read_bytes() == before


def test_files_without_a_format_are_read(folder):
    """Older versions wrote none."""
    (folder.path / "run.json").write_text('{"jobs": ["a"]}')
    (folder.path / "a" / "status.json").write_text('{"status": "done", "step": 3}')

    folder.require_own(["a"])
    with pytest.raises(RunFolderError):
        folder.require_own(["b"])
    assert read_run(folder.path)[0].state == "done"


def test_what_was_announced_is_withdrawn_again(tmp_path):
    """And nothing that a job has begun."""
    folder = RunFolder(tmp_path / "run")
    folder.announce(["a", "b"])
    folder.write_status("b", {"status": "running", "step": 1})
    folder.withdraw(["a", "b"])

    assert [path.name for path in folder.path.iterdir()] == ["b"]
