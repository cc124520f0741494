"""Axes of figures: numbers onto pixels, round ticks, numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: What is less stands at the start of a logarithmic axis.
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers onto a line of pixels.

    log      powers of ten; what is not above 0 stands at its start
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a number stands."""
        low, high, given = self.low, self.high, value
        if self.log:
            low, high, given = math.log10(low), math.log10(high), math.log10(max(value, low))
        part = (given - low) / (high - low) if high > low else 0.0
        return self.start + (self.end - self.start) * min(1.0, max(0.0, part))

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        if self.log:
            least, most = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, (most - least) // 6)
            return [10.0**power for power in range(least, most + 1, every)]
        step = round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [step * place for place in range(first, int(self.high / step + 1e-9) + 1)]


def round_step(given: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten that is not less."""
    if not given > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(given))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= given * 0.999)


def axis_of(
    values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = True
) -> Axis:
    """An axis that holds all values.

    zero    a linear axis begins there, else near the least value
    """
    there = [value for value in values if math.isfinite(value) and (value > TINY or not log)]
    if not there:
        return Axis(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    if log:
        low = 10.0 ** math.floor(math.log10(min(there)))
        high = 10.0 ** math.ceil(math.log10(max(there)))
        return Axis(low, max(high, low * 10), start, end, log=True)
    least = 0.0 if zero else min(there)
    step = round_step(((max(there) - least) or 1.0) / 5)
    low = math.floor(least / step + 1e-9) * step
    high = max(math.ceil(max(there) / step - 1e-9) * step, low + step)
    return Axis(low, high, start, end)


def shown(value: float | None) -> str:
    """A number for people, in three digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < 1e-9:
        return "0"
    if 0.01 <= abs(value) < 10_000:
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if abs(value) >= 10_000:
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g}{unit}"
    return f"{value:.1e}"
