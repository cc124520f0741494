"""A clock that goes when it is told to."""

from __future__ import annotations

from tlora_fx.errors import ClockBackwards


class Clock:
    """Simulated time.

    now   seconds
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def go_to(self, time: float) -> None:
        """Time passes.

        raises   ClockBackwards
        """
        if time < self.now:
            raise ClockBackwards(
                "a simulated clock cannot go back",
                expected=f"at least {self.now} s",
                found=f"{time} s",
            )
        self.now = time
