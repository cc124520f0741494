"""The metrics file of a job."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from tlora_fx.errors import MetricsError
from tlora_fx.host import storage
from tlora_fx.runtime.run_folder import MetricsLog, read_metrics


def filled(path: Path, steps: int) -> MetricsLog:
    """A log with steps 1 to `steps`."""
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append(
            step=step, loss=1 / step, grad_norm=0.5, learning_rate=1e-4, tokens=9, seconds=0.1
        )
    return log


def test_each_step_is_on_disk_at_once(tmp_path):
    """A line can be read before the log is closed, exact to the last bit."""
    filled(tmp_path / "job" / "metrics.jsonl", 3)

    records = read_metrics(tmp_path / "job" / "metrics.jsonl")

    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[2] == {
        "step": 3,
        "loss": 1 / 3,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "tokens": 9,
        "seconds": 0.1,
    }


def test_further_fields_stand_behind_the_others(tmp_path):
    """Whoever knows the first ones alone reads on as before."""
    log = MetricsLog(tmp_path / "m")
    speed = {"tokens_per_second": math.nan, "phases": {"data": 1.5}}
    log.append(
        step=1, loss=1.0, grad_norm=0.5, learning_rate=1e-4, tokens=9, seconds=0.1, more=speed
    )

    [record] = read_metrics(tmp_path / "m")
    assert list(record)[:6] == ["step", "loss", "grad_norm", "learning_rate", "tokens", "seconds"]
    assert (record["tokens_per_second"], record["phases"]) == (None, {"data": 1.5})


def test_resuming_drops_later_and_torn_lines(tmp_path):
    """After a resume at step 2 the file holds steps 1 and 2, and goes on with 3."""
    path = tmp_path / "metrics.jsonl"
    filled(path, 4).close()
    with path.open("ab") as file:
        file.write(b'{"step": 5, "lo')
    log = MetricsLog(path)

    log.truncate_after(2)
    log.append(step=3, loss=7.0, grad_norm=0.0, learning_rate=0.0, tokens=1, seconds=0.0)

    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_at_the_kept_step_is_dropped(tmp_path):
    """A line without its newline is torn even where its JSON is whole."""
    path = tmp_path / "metrics.jsonl"
    filled(path, 2).close()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))

    MetricsLog(path).truncate_after(2)

    assert [record["step"] for record in read_metrics(path)] == [1]


def test_truncating_a_file_that_is_not_there_is_nothing(tmp_path):
    """A job that never logged can be resumed."""
    MetricsLog(tmp_path / "metrics.jsonl").truncate_after(0)

    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_stays_json(tmp_path):
    """NaN and infinity become null, which every JSON reader takes."""
    log = MetricsLog(tmp_path / "m")
    log.append(step=1, loss=math.nan, grad_norm=math.inf, learning_rate=0.1, tokens=1, seconds=0.0)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_a_folder_in_the_way_is_our_error(tmp_path):
    """What the disk refuses is said with the file's name."""
    with pytest.raises(MetricsError, match=str(tmp_path)):
        filled(tmp_path, 1)


@pytest.mark.parametrize("where", ["mkdir", "open"])
def test_a_line_waits_for_room_in_a_process_that_may_wait(tmp_path, monkeypatch, where):
    """The first line too, with which the file comes; in any other process it is our own error."""
    plain, tries = getattr(Path, where), []

    def full_twice(self, *given, **named):
        tries.append(self)
        if len(tries) <= 2:
            raise OSError(errno.ENOSPC, "full")
        return plain(self, *given, **named)

    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.0)
    log = MetricsLog(tmp_path / "a" / "metrics.jsonl")
    with monkeypatch.context() as changes:
        changes.setattr(Path, where, full_twice)
        with pytest.raises(MetricsError):
            log.append_evaluation(1, {"eval_loss": 1.0})
        with storage.waits_for_room():
            log.append_evaluation(2, {"eval_loss": 2.0})

    assert len(tries) == 3
    assert [line["step"] for line in read_metrics(log.path)] == [2]
