"""What a group's last checkpoint still holds of a job that left it says nothing of its end."""

from __future__ import annotations

from tests.scheduler import fake_worker
from tlora_fx.scheduler.executor import Failed
from tlora_fx.scheduler.local.group import RunningGroup
from tlora_fx.scheduler.local.watchdog import StallLimits, Watchdog


class Ended:
    """Processes that have all ended."""

    def code(self, worker):
        return 0


def group(epoch, jobs, folder, committed):
    folder.mkdir(parents=True)
    return RunningGroup(
        epoch, jobs, folder, Ended(), (1,), float, committed, Watchdog(StallLimits()),
        folder.parent / "first" / "train",
    )  # fmt: skip


def test_a_job_that_is_to_come_back_has_not_failed(tmp_path):
    """It left the group, trained on elsewhere, and the group ended before it came back."""
    running = group(265, ("b",), tmp_path / "265", {"b": 9})
    running.successor = group(267, ("b", "a"), tmp_path / "267", {"b": 9, "a": 8})
    worker = object.__new__(fake_worker._Fake)
    worker.output, worker.root, worker.rounds, worker.successor = running.output, tmp_path, 1, None
    worker.order = type("Order", (), {"options": {}})()
    worker.specs = {}
    worker.jobs = {
        "a": {"step": 5, "value": 0, "status": "paused", "reason": ""},
        "b": {"step": 10, "value": 0, "status": "done", "reason": ""},
    }
    worker.writer = type("Writer", (), {"write": lambda self, kind, **more: None})()
    worker.save()

    events = list(running.events(0.0))

    assert [event for event in events if isinstance(event, Failed)] == []
