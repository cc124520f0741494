"""Many functions of one number at once, for arrays.

`tlora_fx/cost/fit.py` makes curves of straight pieces, one number at a time. Here all curves of a base
stand on one grid, so that one search finds the piece of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import Array
from tlora_fx.cost.fit import Curve

Places = NDArray[np.intp]
#: Where a curve's last piece ends, and how close to zero its first one begins.
FAR, NEAR = 1e9, 1e-6


@dataclass(frozen=True, slots=True)
class Pieces:
    """Curves on one grid; a curve is named by its number.

    starts   [p] where each piece begins, ascending from 0
    values   [curves * p] at the start of each piece
    slopes   [curves * p] of each piece
    """

    starts: Array
    values: Array
    slopes: Array

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Pieces:
        """The same curves; at 0 they have the value that they come close to."""
        starts = np.unique([0.0, *(knot for curve in curves for knot in curve.knots)])
        ends = np.append(starts[1:], max(FAR, 2 * starts[-1]))
        low = np.array([[curve(max(x, NEAR)) for x in starts] for curve in curves])
        high = np.array([[curve(x) for x in ends] for curve in curves])
        slopes = (high - low) / (ends - starts)
        return cls(starts, low.ravel(), slopes.ravel())

    def find(self, x: Array) -> tuple[Places, Array]:
        """The piece of each of n numbers, and how far behind its start it lies."""
        place = np.searchsorted(self.starts, x, side="right") - 1
        return place, x - self.starts[place]

    def at(self, curve: int | Places, found: tuple[Places, Array]) -> Array:
        """The value of a curve, or of one for each number, where `find` found them."""
        place, beyond = found
        index = place + curve * len(self.starts)
        value: Array = self.values[index] + self.slopes[index] * beyond
        return value


def summed(parts: Sequence[tuple[float, Curve]]) -> Curve:
    """A curve that is the sum of others, each so many times; exact at and between all knots."""
    knots = sorted({knot for _, curve in parts for knot in curve.knots})
    if not knots:
        return Curve((), ())
    # One knot more on either side: what lies beyond the last ones is a line of its own.
    grid = [NEAR, *knots, 2 * knots[-1]]
    values = [sum(times * curve(x) for times, curve in parts) for x in grid]
    return Curve(tuple(grid), tuple(values))


def highest(curves: Sequence[Curve]) -> Curve:
    """The largest of some curves at each of their knots."""
    knots = sorted({knot for curve in curves for knot in curve.knots})
    if not knots:
        return Curve((), ())
    grid = [NEAR, *knots, 2 * knots[-1]]
    return Curve(tuple(grid), tuple(max(curve(x) for curve in curves) for x in grid))
