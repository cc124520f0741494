"""What a run's folder says of its versions; nothing is trained."""

from __future__ import annotations

import json

import pytest

from tlora_fx.errors import NewerFormat, RunFolderError
from tlora_fx.host.version import __version__
from tlora_fx.runtime import run_folder
from tlora_fx.runtime.reports.run_view import read_run
from tlora_fx.runtime.run_folder import (
    RunFolder,
    ask_to_stop,
    hold_early,
    require_free,
    require_new,
    require_no_run,
)

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


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_held_early_is_its_runs_alone(tmp_path, there):
    """One run of the process takes it over; another one waits for it as others do."""
    path, other = tmp_path / "run", tmp_path / "other"
    if there:
        path.mkdir()
    with hold_early(path, resume=False), RunFolder(other).held(resume=False):
        with pytest.raises(RunFolderError, match="another process"), hold_early(path, resume=False):
            pass
        for _ in range(2):
            with pytest.raises(RunFolderError, match="another process"):
                require_free(path)
            with RunFolder(path).held(resume=False):
                with pytest.raises(RunFolderError, match="another process"):
                    RunFolder(path).held(resume=False).__enter__()
                with pytest.raises(RunFolderError, match="another process"):
                    require_free(path)
    require_free(path)

    # In which nothing came to be.
    assert path.exists() == there


def test_a_folder_that_is_held_early_stays_with_what_came_to_be(tmp_path):
    path = tmp_path / "run"
    with hold_early(path, resume=False), RunFolder(path).held(resume=False):
        RunFolder(path).begin(["a"])

    assert (path / "run.json").exists()
    with pytest.raises(RunFolderError, match="holds something already"):
        hold_early(path, resume=False).__enter__()
    with hold_early(path, resume=True):
        pass
    assert (path / "run.json").exists()


def test_who_waited_for_a_folder_that_was_removed_makes_it_anew(tmp_path, monkeypatch):
    """The lock that it waited for is nobody's any more."""
    path = tmp_path / "run"
    first = hold_early(path, resume=False)
    first.__enter__()
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: first.__exit__(None, None, None))
    with hold_early(path, resume=False):
        with pytest.raises(RunFolderError, match="another process"):
            require_free(path)
        assert [each.name for each in path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", [run_folder.LEDGER, run_folder.RECORD])
def test_the_folder_of_a_run_is_known_by_its_own_files(tmp_path, name):
    """A project that keeps checkpoints, or a lock that nobody holds, is no run of ours."""
    (tmp_path / "checkpoints" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / run_folder.LOCK).touch()
    require_no_run(tmp_path)
    with pytest.raises(RunFolderError) as refused:
        require_new(tmp_path)
    assert "tlora-fx train" not in str(refused.value)

    (tmp_path / name).touch()
    with pytest.raises(RunFolderError, match="is the folder of a run"):
        require_no_run(tmp_path)


def test_a_run_that_has_only_its_lock_yet_keeps_its_folder(tmp_path):
    """Its own files come a moment later."""
    with (
        hold_early(tmp_path / "run", resume=False),
        pytest.raises(RunFolderError, match="another process is running"),
    ):
        require_no_run(tmp_path / "run")


def test_a_file_in_place_of_a_run_is_called_one(tmp_path):
    """`report jobs.yaml` must not say that nothing has that name."""
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs: []")

    with pytest.raises(RunFolderError) as file:
        read_run(path)
    with pytest.raises(RunFolderError) as nothing:
        read_run(tmp_path / "none")

    assert file.value.facts["found"] == "a file of that name"
    assert nothing.value.facts["found"] == "no folder of that name"
