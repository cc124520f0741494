"""`tlora-fx stop` on a folder in which something trains, and on one in which nothing does."""

from __future__ import annotations

import pytest

from tlora_fx.cli import main
from tlora_fx.runtime.run_folder import RunFolder


@pytest.mark.parametrize("trains", [True, False])
def test_who_stops_a_job_of_a_run_that_does_not_train_is_told_so(tmp_path, capsys, trains):
    """The job stops once the run goes on, which no one would guess otherwise."""
    folder = RunFolder(tmp_path)
    folder.write_status("a", {"status": "stopped", "step": 3})
    if trains:
        with folder.held(resume=True), pytest.raises(SystemExit, match="0"):
            main(["stop", str(tmp_path), "a"])
    else:
        with pytest.raises(SystemExit, match="0"):
            main(["stop", str(tmp_path), "a"])
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "asked to stop: a"
    assert lines[1:] == (
        [] if trains else [f"nothing trains in {tmp_path} now: they stop once the run goes on"]
    )
    assert folder.take_stops(["a"]) == ["a"]
