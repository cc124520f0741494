"""Watchdog of a group: how long it may go without a sign of progress."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tlora_fx.errors import WorkerStalled

#: The least that a group may go without progress.
STEP_SECONDS = 300.0


#: Compiled layers may be compiled anew for rows of another size, in the middle of a step.
COMPILING_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Limits of how long a group may go without progress before it is killed.

    seconds        None: `times` its longest step so far, and at least `least_seconds`
    first_seconds  until its first step is done, which loads, compiles and captures; and while it
                   evaluates or writes a checkpoint
    """

    seconds: float | None = None
    times: float = 20.0
    min_seconds: float = STEP_SECONDS
    first_seconds: float = 1800.0

    def of(self, longest_seconds: float) -> float:
        """Limit for a group whose longest step took so long."""
        if self.seconds is not None:
            return self.seconds
        return max(self.min_seconds, self.times * longest_seconds)


class Watchdog:
    """Knows when a group has gone too long without a sign.

    longest   seconds of its longest step
    """

    def __init__(self, limits: StallLimits) -> None:
        self.limits = limits
        self.longest = 0.0
        self._heard = time.monotonic()
        self._stepped = self._busy = False
        self._asked: float | None = None
        self._grace: float | None = None

    def hear(self, kind: str) -> None:
        """A line of the group's event log came."""
        now = time.monotonic()
        if kind == "progress":
            # The first one ends a time in which it compiled.
            self.longest = max(self.longest, now - self._heard) if self._stepped else 0.0
            self._stepped = True
        self._busy = kind in ("saving", "evaluating")
        self._heard = now

    def asked(self) -> None:
        """The group is to stop."""
        self._asked = time.monotonic()

    def hurry(self, grace_seconds: float) -> None:
        """Limit how long the group has to stop from now on."""
        self._asked, self._grace = time.monotonic(), grace_seconds

    def excuse(self) -> None:
        """Nobody could hear the group until now."""
        self._heard = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that it may go without a sign now."""
        usual = self.limits.of(self.longest)
        busy = self._busy or not self._stepped
        return max(usual, self.limits.first_seconds) if busy else usual

    def reason(self) -> str:
        """Reason why it is to be killed; "" where it is not."""
        now = time.monotonic()
        if self._asked is not None and self._grace is not None:
            if now - self._asked <= self._grace:
                return ""
            what, most = "a group did not stop in its grace", self._grace
        elif now - self._heard <= self.seconds:
            return ""
        else:
            what, most = "a group made no progress and was killed", self.seconds
        silent = f"no sign for {now - self._heard:.1f} s"
        step = f"; its longest step took {self.longest:.1f} s" if self.longest else ""
        return str(WorkerStalled(what, expected=f"at most {most:.4g} s", found=silent + step))
