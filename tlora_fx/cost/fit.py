"""Functions of a load, fitted to the points of a profile.

A layer's time is a line of straight pieces in the tokens, whose knots are the measured ones, plus
terms for attention (sum of squared lengths), for each site with adapters, for each adapter on it,
and for tokens times width and times rank there. No coefficient is negative, so more work never
costs less, and what the device took comes out again but for its noise.

Where the host launches what a layer does, that takes as long as the slower of the two: the device,
whose times on small rows are those of CUDA graphs, or the host, which takes as long for few tokens
as for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from tlora_fx.cost.profile import LayerPoint, LayerProfile
from tlora_fx.planners.nonnegative import Array, fit


class Work(NamedTuple):
    """What a layer has to do, as a profile's points say it (see LayerPoint)."""

    tokens: float
    squares: float = 0.0
    sites: float = 0.0
    job_sites: float = 0.0
    site_tokens: float = 0.0
    rank_tokens: float = 0.0

    @classmethod
    def of_point(cls, point: LayerPoint) -> Work:
        """The work of a measured point."""
        return cls(*(float(getattr(point, name)) for name in cls._fields))


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight pieces that never fall.

    knots    ascending; behind the last one values grow as x does, since a rise that was measured
             where launches took longer than the work would promise too much. Before the first one
             the first piece goes on, but never below the line to zero
    values   at the knots
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Through points; one that lies below an earlier one is lifted to it."""
        ordered = sorted(points)
        values = np.maximum.accumulate([value for _, value in ordered])
        return cls(tuple(x for x, _ in ordered), tuple(map(float, values)))

    def __call__(self, x: float) -> float:
        """The value at x; 0 where x is."""
        if x <= 0 or not self.knots:
            return 0.0
        proportional = self.values[0] * x / self.knots[0]
        if len(self.knots) == 1:
            return proportional
        if x < self.knots[0]:
            return max(self._line(0, x), proportional)
        if x > self.knots[-1]:
            return self.values[-1] * x / self.knots[-1]
        return float(np.interp(x, self.knots, self.values))

    def _line(self, piece: int, x: float) -> float:
        x0, x1 = self.knots[piece : piece + 2]
        y0, y1 = self.values[piece : piece + 2]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity of a layer: a curve in the tokens, and so much for each unit of other work."""

    curve: Curve
    slopes: Work

    def __call__(self, work: Work) -> float:
        """The quantity for some work; none where there are no tokens."""
        if work.tokens <= 0:
            return 0.0
        other = sum(a * b for a, b in zip(work[1:], self.slopes[1:], strict=True))
        return self.curve(work.tokens) + other

    @classmethod
    def fitted(cls, points: Sequence[tuple[Work, float]]) -> Term:
        """The term closest to measured values, each weighted by its own size."""
        knots = sorted({work.tokens for work, _ in points})
        rows = [[*_ramps(work.tokens, knots), *work[1:]] for work, _ in points]
        values = np.array([value for _, value in points])
        weights = 1 / np.maximum(values, max(float(values.max(initial=0)) * 1e-3, 1e-12))
        features: Array = np.array(rows) * weights[:, None]
        found = fit(features, values * weights)
        heights = np.cumsum(found[: len(knots)])
        curve = Curve(tuple(knots), tuple(map(float, heights)))
        return cls(curve, Work(0.0, *map(float, found[len(knots) :])))


def _ramps(tokens: float, knots: Sequence[float]) -> list[float]:
    """How much of each piece lies below a number of tokens: a curve as a sum of rises."""
    pieces = [1.0]
    for low, high in pairwise(knots):
        pieces.append(min(max((tokens - low) / (high - low), 0.0), 1.0))
    return pieces


class Launches(NamedTuple):
    """Milliseconds of the host for one layer: so many, and for each site and adapter on it."""

    start: float = 0.0
    site: float = 0.0
    job_site: float = 0.0

    def __call__(self, work: Work) -> float:
        """The time for some work, however many tokens it has."""
        if work.tokens <= 0:
            return 0.0
        return self.start + self.site * work.sites + self.job_site * work.job_sites

    @classmethod
    def fitted(cls, points: Sequence[tuple[Work, float]]) -> Self:
        """Closest to what was measured where the host was slower, each weighted by its size."""
        if not points:
            return cls()
        values = np.array([value for _, value in points])
        rows = np.array([[1.0, work.sites, work.job_sites] for work, _ in points])
        weights = 1 / np.maximum(values, 1e-12)
        return cls(*map(float, fit(rows * weights[:, None], values * weights)))


@dataclass(frozen=True, slots=True)
class Timed:
    """What one direction of a layer takes: as long as the slower of both.

    host   nothing where a row runs as a graph, or where no time of a graph is known
    """

    device: Term
    host: Launches

    def __call__(self, work: Work) -> float:
        """Milliseconds for some work."""
        return max(self.device(work), self.host(work))

    @classmethod
    def of(cls, name: str, points: Sequence[LayerPoint], host: Sequence[LayerPoint]) -> Self | None:
        """Fitted to the times of one name; None where there are none.

        host   points of which those that waited for the host tell what it takes
        """
        known = [one for one in points if getattr(one, name) is not None]
        if not known:
            return None
        device = [(Work.of_point(one), getattr(one.as_captured(), name)) for one in known]
        waited = [(Work.of_point(one), getattr(one, name)) for one in host if one.waits(name)]
        return cls(Term.fitted(device), Launches.fitted(waited))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Milliseconds and bytes of one kind of layer.

    first     the backward where the layer's input needs no gradient
    frozen    the forward where nothing needs a gradient
    """

    forward: Timed
    backward: Timed
    first: Timed
    frozen: Timed
    saved: Term
    forward_peak: Term
    backward_peak: Term

    @classmethod
    def of(cls, profile: LayerProfile, whole: LayerProfile | None = None) -> LayerTimes:
        """Fitted to a profile's points; what was not measured is taken from what is like it.

        whole   the same layer where tp does not cut it, if that is another one: cutting spares the
                host nothing, and bare layers, which tell launches of sites from others, are
                measured whole
        """

        def term(get: Callable[[LayerPoint], float | None]) -> Term | None:
            known = [(Work.of_point(one), get(one)) for one in points]
            found = [(work, value) for work, value in known if value is not None]
            return Term.fitted(found) if found else None

        points, host = profile.points, (whole or profile).points
        forward, backward = (Timed.of(name, points, host) for name in ("forward_ms", "backward_ms"))
        saved = term(lambda one: one.saved_bytes)
        assert forward is not None
        assert backward is not None
        assert saved is not None
        first = Timed.of("first_ms", points, ())
        forward_peak = term(lambda one: one.forward_peak_bytes)
        backward_peak = term(lambda one: one.backward_peak_bytes)
        return cls(
            forward=forward,
            backward=backward,
            first=Timed(first.device, backward.host) if first else backward,
            frozen=Timed.of("frozen_ms", points, host) or forward,
            saved=saved,
            forward_peak=forward_peak or saved,
            backward_peak=backward_peak or saved,
        )
