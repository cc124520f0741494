"""Halve a row of states until the first bad one is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "bad", "skip"]


@dataclass(frozen=True, slots=True)
class Bracket:
    """Where a row of states turns bad.

    good    the last state that is known to be good, -1 where none is
    bad     the first state that is known to be bad, the number of states where none is
    """

    good: int
    bad: int

    @property
    def sure(self) -> bool:
        """Whether no state between the two was skipped."""
        return self.bad - self.good == 1


def first_bad(
    states: int, judge: Callable[[int], Verdict], *, last_is_bad: bool = False
) -> Bracket:
    """Find where states turn bad, in at most ceil(log2(states + 1)) runs where none is skipped.

    states        how many there are
    judge         the verdict on one; "skip" where it cannot be told
    last_is_bad   the last one need not be judged
    """
    good, bad = -1, states - 1 if last_is_bad else states
    skipped: set[int] = set()
    while True:
        left = [place for place in range(good + 1, bad) if place not in skipped]
        if not left:
            return Bracket(good, bad)
        middle = (good + bad) // 2
        place = min(left, key=lambda candidate: abs(candidate - middle))
        verdict = judge(place)
        if verdict == "good":
            good = place
        elif verdict == "bad":
            bad = place
        else:
            skipped.add(place)
