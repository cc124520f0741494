"""`tlora-fx schedule`: what it says of files that cannot be written."""

from __future__ import annotations

from tests.cli.test_compile import run
from tlora_fx.cli.schedule import NEWEST


def test_a_snapshot_that_cannot_be_written_is_told(tmp_path, capsys):
    """The run's own state stays."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NEWEST).write_text("{}")
    (tmp_path / "file").touch()

    assert run("schedule", "state", tmp_path / "run", "-o", tmp_path / "file" / "saved.json") == 1
    assert "the snapshot cannot be written" in capsys.readouterr().err
    assert (tmp_path / "run" / NEWEST).read_text() == "{}"
