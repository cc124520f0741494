"""Least squares with coefficients that are never negative.

What is fitted so never falls where a load grows, whatever the noise of a measurement.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TOLERANCE = 1e-12
SMALLEST = 1e-200


def fit(features: Array, values: Array) -> Array:
    """The x >= 0 that comes closest to `features @ x = values`.

    features   [m, n]
    values     [m]
    returns    [n]
    source     Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23
    """
    scale = np.abs(features).max(axis=0)
    # Columns that are nothing get no coefficient: it could be larger than any number.
    nothing = scale < SMALLEST
    scale[nothing] = 1
    scaled = np.where(nothing, 0.0, features / scale)
    columns = scaled.shape[1]
    found = np.zeros(columns)
    passive = np.zeros(columns, dtype=bool)
    limit = TOLERANCE * max(1.0, float(np.abs(scaled.T @ values).max(initial=0.0)))
    for _ in range(3 * columns + 10):
        gradient = scaled.T @ (values - scaled @ found)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= limit:
            break
        passive[int(gradient.argmax())] = True
        found = _settle(scaled, values, found, passive)
    result: Array = found / scale
    return result


def _settle(features: Array, values: Array, found: Array, passive: NDArray[np.bool_]) -> Array:
    """Solve for the passive columns; those that would turn negative leave, one after the other."""
    while True:
        wanted = np.zeros_like(found)
        wanted[passive] = np.linalg.lstsq(features[:, passive], values, rcond=None)[0]
        if not passive.any() or wanted[passive].min() > 0:
            return wanted
        falling = passive & (wanted <= 0)
        steps = found[falling] / np.maximum(found[falling] - wanted[falling], 1e-300)
        found = found + float(steps.min()) * (wanted - found)
        passive &= found > TOLERANCE
        found[~passive] = 0
