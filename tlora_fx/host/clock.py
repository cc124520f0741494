"""The time of day for what measures how long ago something was, whoever sets the machine's clock.

A machine's clock may be set by hours while a service runs. What was kept a minute ago would have
expired then, or would never expire. This clock reads the time of day once, and goes on from there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """Seconds since the epoch, as of the machine's clock when this one began.

    Processes of one machine to which it is handed agree on it.

    offset   of the machine's monotonic clock
    """

    offset: float

    @classmethod
    def begin(cls) -> SteadyClock:
        """A clock that shows the time of day now."""
        return cls(time.time() - time.monotonic())

    def __call__(self) -> float:
        """The seconds now."""
        return self.offset + time.monotonic()
