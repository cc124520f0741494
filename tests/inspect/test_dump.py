"""The dump folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.dump import dump

FILES = {"ssm.py", "ssm.txt", "ssm.json", "report.txt"}


@pytest.fixture(scope="module")
def folder(quickstart, tmp_path_factory):
    """A dump of the quickstart in a folder that held something before."""
    path = tmp_path_factory.mktemp("build")
    (path / "mine.txt").write_text("mine")
    (path / "ssm.txt").write_text("old")
    dump(quickstart, path)
    return path


def test_a_dump_leaves_other_files_alone(folder):
    """Four files come, the user's stay, nothing else is left."""
    assert {path.name for path in folder.iterdir()} == FILES | {"mine.txt"}
    assert (folder / "mine.txt").read_text() == "mine"


def test_a_dump_replaces_an_older_one(folder):
    """The new listing, not the old."""
    assert (folder / "ssm.txt").read_text().startswith("SuperModel")


def test_the_code_of_a_dump_is_what_trains(folder, quickstart):
    """Letter by letter."""
    assert (folder / "ssm.py").read_text() == quickstart.source


def test_the_code_of_a_dump_can_be_imported_alone(folder):
    """`import ssm` in the folder gives a class for each graph."""
    code = "import ssm; ssm.Root(); ssm.Layers_0_3(); ssm.Head()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr


def test_a_full_disk_leaves_the_old_files_whole(folder, quickstart, monkeypatch):
    """The error names the folder, and no half file lies there."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlora_fx.durable.os.fsync", full)
    with pytest.raises(DumpNotWritable, match="No space left"):
        dump(quickstart, folder)

    after = {p.name: p.read_bytes() for p in folder.iterdir() if "__pycache__" not in p.name}
    assert after == {name: data for name, data in before.items() if "__pycache__" not in name}


def test_a_file_in_the_way_is_a_clear_error(quickstart, tmp_path):
    """The folder's name is taken by a file."""
    (tmp_path / "build").write_text("")

    with pytest.raises(DumpNotWritable):
        dump(quickstart, tmp_path / "build")
