"""A machine's clock that somebody sets while a service runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tlora_fx.host import clock


@dataclass
class SetClock:
    """What `time` says of a machine: the time of day, and seconds that nobody sets."""

    day: float = 1_800_000_000.0
    since: float = 5000.0

    def time(self) -> float:
        return self.day

    def monotonic(self) -> float:
        return self.since

    def pass_by(self, seconds: float) -> None:
        """Let time go by."""
        self.day, self.since = self.day + seconds, self.since + seconds


@pytest.fixture
def machine(monkeypatch):
    """The clock of this machine, by which whatever is opened later goes."""
    own = SetClock()
    monkeypatch.setattr(clock, "time", own)
    return own
