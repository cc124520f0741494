"""Functions of a load, fitted to the points of a profile, and tables of them for whole models.

A layer's time is a line of straight pieces in the tokens, whose knots are the measured ones, plus
terms for attention (sum of squared lengths), for each site with adapters, for each adapter on it,
and for tokens times width and times rank there. No coefficient is negative, so more work never
costs less, and what the device took comes out again but for its noise.

Where the host launches what a layer does, that takes as long as the slower of the two: the device,
whose times on small rows are those of CUDA graphs, or the host, which takes as long for few tokens
as for many.

A collective on a ring takes a start, a hop for each further process, and its bytes over the link's
bandwidth. Start, hop and bandwidth are fitted to what a profile measured; where it measured none,
the data sheet stands in, and whoever asks is told that the result is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tlora_fx.cost.hardware import GPUS, LinkTier, gpu_of_device
from tlora_fx.cost.load import Array, Indices, Mask, Rows, Work
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.cost.profile import CollectivePoint, LayerPoint, LayerProfile, Operation, Profile
from tlora_fx.cost.profile_sources import carried

#: Milliseconds to start, and the part of a link's bandwidth that is reached, without measurements.
START_MS = {"node": 0.012, "network": 0.030}
HOP_MS = {"node": 0.001, "network": 0.004}
REACHED = 0.75
#: Columns that are smaller everywhere count as nothing; columns that differ by less are one.
SMALLEST, SAME = 1e-200, 1e-9


def fit_nonnegative(features: Array, values: Array) -> Array:
    """The x >= 0 that comes closest to `features @ x = values`.

    What is fitted so never falls where a load grows, whatever the noise of a measurement. Of
    columns that are multiples of each other the first one gets the coefficient.

    features   [m, n]
    values     [m]
    returns    [n]
    """
    from scipy.optimize import nnls  # takes half a second

    scale = np.abs(features).max(axis=0)
    # Columns that are nothing get no coefficient: it could be larger than any number.
    nothing = scale < SMALLEST
    scale[nothing] = 1.0
    scaled = np.where(nothing, 0.0, features / scale)
    for later in range(1, scaled.shape[1]):
        distance = np.abs(scaled[:, :later] - scaled[:, later, None]).max(axis=0)
        if distance.min() < SAME:
            scaled[:, later] = 0.0
    return np.asarray(nnls(scaled, values)[0] / scale)


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight pieces that never fall.

    knots    ascending; behind the last one values grow as x does, since a rise that was measured
             where launches took longer than the work would promise too much. Before the first one
             the first piece goes on, but never below the line to zero
    values   at the knots
    """

    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Curve through points; a point that lies below an earlier one is lifted to it."""
        ordered = sorted(points)
        values = np.maximum.accumulate([value for _, value in ordered])
        lifted = dict(zip((float(x) for x, _ in ordered), map(float, values), strict=True))
        return cls(tuple(lifted), tuple(lifted.values()))

    def lines(self) -> tuple[Array, Array, Array]:
        """Start of each linear piece, from 0 on, its value there, and its slope."""
        if not self.knots:
            return np.zeros(1), np.zeros(1), np.zeros(1)
        x, y = np.array(self.knots), np.array(self.values)
        inner = np.diff(y) / np.diff(x)
        first = min([y[0] / x[0], *inner[:1]])
        starts, slopes = np.array([0.0, *x]), np.array([first, *inner, y[-1] / x[-1]])
        return starts, np.array([max(0.0, y[0] - first * x[0]), *y]), slopes

    def __call__(self, x: Array | float) -> Array:
        """The value at x; 0 where x is."""
        return Curves.of([self])(x)


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Curves on one grid, so that one search finds the piece of each.

    starts   [p] where each piece begins; the first one holds 0 alone, where all curves are 0
    values   [..., p] at the start of each piece
    slopes   [..., p] of each piece
    """

    starts: Array
    values: Array
    slopes: Array

    @classmethod
    def of(cls, curves: Sequence[Curve], shape: tuple[int, ...] | None = None) -> Curves:
        """The same curves, as an array of some shape."""
        each = [curve.lines() for curve in curves]
        starts = np.unique(np.concatenate([own for own, _, _ in each]))
        values, slopes = np.empty((2, len(each), len(starts)))
        for index, (own, value, slope) in enumerate(each):
            piece = np.searchsorted(own, starts, side="right") - 1
            slopes[index] = slope[piece]
            values[index] = value[piece] + slope[piece] * (starts - own[piece])
        # The smallest number above zero: what lies between it and the first knot.
        starts = np.concatenate([[0.0, np.nextafter(0.0, 1.0)], starts[1:]])
        nothing = np.zeros((len(each), 1))
        shape = (*(shape or (len(each),)), len(starts))
        return cls(
            starts,
            np.hstack([nothing, values]).reshape(shape),
            np.hstack([nothing, slopes]).reshape(shape),
        )

    def find(self, x: Array) -> tuple[Indices, Array]:
        """The piece of each number, and how far behind its start it lies."""
        piece = np.searchsorted(self.starts, x, side="right") - 1
        return piece, x - self.starts[piece]

    def __call__(self, x: Array | float) -> Array:
        """The values of the first one."""
        return self.at((0,), self.find(np.asarray(x, dtype=np.float64)))

    def part(self, index: int) -> Curves:
        """Curves at one index of the first dimension."""
        return Curves(self.starts, self.values[index], self.slopes[index])

    def weighted(self, times: Array) -> Curves:
        """The sum of all, each so many times, where `times` is as long as the first dimensions."""
        axes = times.ndim
        each = (np.tensordot(times, one, axes) for one in (self.values, self.slopes))
        return Curves(self.starts, *each)

    def summed(self, axis: int) -> Curves:
        """The sum over one dimension."""
        return Curves(self.starts, self.values.sum(axis), self.slopes.sum(axis))

    def below(self) -> tuple[float, float]:
        """A start and a rise: a line that all of them lie below."""
        start, knots = float(self.values[..., 1].max()), self.starts[2:]
        rise = np.max((self.values[..., 2:] - start) / knots, initial=0.0)
        return start, float(max(rise, self.slopes[..., -1].max()))

    def at(self, index: tuple[Any, ...], found: tuple[Indices, Array]) -> Array:
        """Values of the curves at an index, where `find` found them."""
        piece, beyond = found
        key = (*index, piece)
        return np.asarray(self.values[key] + self.slopes[key] * beyond)

    def pick(self, index: Indices, x: Array) -> Array:
        """The value at each number of one curve, by its index among [n]."""
        piece = np.searchsorted(self.starts, x, side="right") - 1
        key = index * len(self.starts) + piece
        start, slope = self.values.ravel().take(key), self.slopes.ravel().take(key)
        return np.asarray(start + slope * (x - self.starts.take(piece)))


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity of a layer: a curve in the tokens, and so much for each unit of other work.

    slopes   [5] by the fields of Work
    """

    curve: Curve
    slopes: Array

    @classmethod
    def fitted(cls, points: Sequence[LayerPoint], values: Sequence[float]) -> Term:
        """The term closest to measured values, each weighted by its own size."""
        knots = sorted({float(one.tokens) for one in points})
        rows = [[*_ramps(one.tokens, knots), *_beside(one)] for one in points]
        found = _weighted(np.array(rows), np.array(values), max(values) * 1e-3)
        heights = np.cumsum(found[: len(knots)])
        return cls(Curve(tuple(knots), tuple(map(float, heights))), found[len(knots) :])


NOTHING = Term(Curve(), np.zeros(len(Work._fields)))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Milliseconds and bytes of one kind of layer, as fitted to a profile's points.

    first    the backward where the layer's input needs no gradient
    frozen   the forward where nothing needs a gradient
    hosts    [3] milliseconds of the host by name, of "forward", "backward" and "frozen": so many,
             and for each site and each adapter on it. Nothing where no time of a graph is known
    """

    forward: Term
    backward: Term
    first: Term
    frozen: Term
    saved: Term
    forward_peak: Term
    backward_peak: Term
    hosts: dict[str, Array]

    @classmethod
    def of(cls, profile: LayerProfile, whole: LayerProfile | None = None) -> LayerTimes:
        """Fitted to a profile's points; what was not measured is taken from what is like it.

        whole   the same layer where tp does not cut it, if that is another one: cutting spares the
                host nothing, and bare layers, which tell launches of sites from others, are
                measured whole
        """

        def term(name: str, like: Term | None = None) -> Term:
            known = [pair for pair in pairs if getattr(pair[0], name) is not None]
            values = [getattr(device, name) for _, device in known]
            if like is not None and not known:
                return like
            return Term.fitted([one for one, _ in known], values)

        pairs = [(one, one.as_captured()) for one in profile.points]
        forward, backward, saved = map(term, ("forward_ms", "backward_ms", "saved_bytes"))
        frozen, points = term("frozen_ms", forward), (whole or profile).points
        hosts = {name: _launches(points, f"{name}_ms") for name in ("forward", "backward")}
        known = frozen is not forward
        hosts["frozen"] = _launches(points, "frozen_ms") if known else hosts["forward"]
        return cls(
            forward=forward,
            backward=backward,
            first=term("first_ms", backward),
            frozen=frozen,
            saved=saved,
            forward_peak=term("forward_peak_bytes", saved),
            backward_peak=term("backward_peak_bytes", saved),
            hosts=hosts,
        )


def _launches(points: Sequence[LayerPoint], name: str) -> Array:
    """What the host takes, closest to what was measured where it was slower."""
    waited = [one for one in points if getattr(one, name) is not None and one.waits(name)]
    if not waited:
        return np.zeros(3)
    rows = np.array([[1.0, one.sites, one.job_sites] for one in waited])
    return _weighted(rows, np.array([getattr(one, name) for one in waited]), 0.0)


def _weighted(features: Array, values: Array, least: float) -> Array:
    """Fitted with each value weighted by its size, or as if it were at least so large."""
    weights = 1 / np.maximum(values, max(least, 1e-12))
    return fit_nonnegative(features * weights[:, None], values * weights)


def _beside(point: LayerPoint) -> list[float]:
    return [float(getattr(point, name)) for name in Work._fields]


def _ramps(tokens: float, knots: Sequence[float]) -> list[float]:
    """How much of each piece lies below a number of tokens: a curve as a sum of rises."""
    pieces = [1.0]
    for low, high in pairwise(knots):
        pieces.append(min(max((tokens - low) / (high - low), 0.0), 1.0))
    return pieces


#: Quantities of a layer in tables; of them, what takes time.
QUANTITIES = ("forward", "backward", "saved", "forward peak", "backward peak")
TIMES, SAVED = slice(0, 2), 2


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of a model that cost the same.

    layer   one of them
    role    whether a layer's input needs a gradient ("above"), its adapters alone ("first"), or
            nothing ("below")
    """

    layer: LayerFacts
    role: str


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """Quantities of each kind of layer, for each size of tensor parallelism.

    curves   [q, k, t] of a row's tokens
    slopes   [q, k, t, 5] of what layers do beside, by the fields of Work
    host     [2, k, 3] what launching takes forward and backward, on rows that are no CUDA graph
    exact    [t] whether layers of that size were measured as they are
    """

    curves: Curves
    slopes: Array
    host: Array
    exact: tuple[bool, ...]

    @classmethod
    def of(
        cls, facts: ModelFacts, profile: Profile, kinds: Sequence[Kind], tp: Sequence[int]
    ) -> LayerTables:
        """Fitted to a profile's points, carried to sizes that were not measured."""

        @cache
        def times(structure: str, size: int) -> tuple[LayerTimes, bool]:
            layer = next(one.layer for one in kinds if one.layer.structure == structure)
            own, exact = carried(profile, layer, facts, size)
            whole, _ = carried(profile, layer, facts, 1)
            return LayerTimes.of(own, whole), exact

        each = [[times(kind.layer.structure, size) for size in tp] for kind in kinds]
        roles = [kind.role for kind in kinds]
        terms = [
            [_terms(known, role) for known, _ in own] for own, role in zip(each, roles, strict=True)
        ]
        shape = (len(QUANTITIES), len(kinds), len(tp))
        flat = [size[q] for q in range(shape[0]) for own in terms for size in own]
        hosts = [_hosts(own[0][0], role) for own, role in zip(each, roles, strict=True)]
        return cls(
            Curves.of([term.curve for term in flat], shape),
            np.array([term.slopes for term in flat]).reshape(*shape, len(Work._fields)),
            np.stack(hosts, axis=1),
            tuple(all(exact for _, exact in size) for size in zip(*each, strict=True)),
        )

    def values(self, rows: Rows, quantities: int | slice) -> Array:
        """Quantities of a layer of each kind on rows [q, k, m], as the device takes them."""
        found, every = self.curves.find(rows.tokens), slice(None)
        total = self.curves.at((quantities, every, rows.size), found)
        for field in range(len(Work._fields)):
            total = total + self.slopes[quantities, :, rows.size, field] * rows.each(field)
        return total

    def launches(self, rows: Rows) -> Array:
        """Milliseconds of the host to launch a layer of each kind on rows [2, k, m]."""
        start, site, job_site = (self.host[..., part, None] for part in range(3))
        some = start * (rows.tokens > 0)
        return np.asarray(some + site * rows.each(1) + job_site * rows.each(2))

    def unfused(self, adapter_ms: float) -> LayerTables:
        """The same where adapters run one after the other, each so long in one direction."""
        slopes, host = self.slopes.copy(), self.host.copy()
        slopes[TIMES, ..., 1:] = 0.0
        slopes[TIMES, ..., 2] = host[..., 2] = adapter_ms
        host[..., 1] = 0.0
        return replace(self, slopes=slopes, host=host)


def _terms(times: LayerTimes, role: str) -> tuple[Term, ...]:
    """By QUANTITIES."""
    if role == "below":
        return times.frozen, NOTHING, NOTHING, times.forward_peak, NOTHING
    backward = times.first if role == "first" else times.backward
    return times.forward, backward, times.saved, times.forward_peak, times.backward_peak


def _hosts(times: LayerTimes, role: str) -> Array:
    if role == "below":
        return np.array([times.hosts["frozen"], np.zeros(3)])
    return np.array([times.hosts["forward"], times.hosts["backward"]])


class Line(NamedTuple):
    """Milliseconds of a collective: a start, and so much a byte; numbers, or arrays [m]."""

    start: Array | float = 0.0
    per_byte: Array | float = 0.0

    def __call__(self, size: Array | float) -> Array:
        """Milliseconds for so many bytes; 0 where there are none."""
        return np.where(np.asarray(size) > 0, self.start + self.per_byte * size, 0.0)

    def plus(self, other: Line, part: float = 1.0) -> Line:
        """Line of one operation after another; the other one moves `part` of the bytes."""
        return Line(self.start + other.start, self.per_byte + part * other.per_byte)

    def slower(self, times: float) -> Line:
        """Line of a link that is so many times slower."""
        return Line(self.start * times, self.per_byte * times)


class CollectiveTimes:
    """Milliseconds of collectives on one kind of hardware.

    estimated   whether anything that was asked for came from a data sheet
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.estimated = False
        self._known: dict[tuple[Operation, LinkTier], Array] = {}

    def line(self, operation: Operation, tier: LinkTier, processes: int) -> Line:
        """One collective among so many processes; nothing where a process is alone."""
        if processes < 2:
            return Line()
        key = (operation, tier)
        if key not in self._known:
            self._known[key] = self._coefficients(operation, tier)
        start, hop, per_byte = map(float, self._known[key])
        _, hops, sent = _ring(operation, processes)
        return Line(start + hop * hops, per_byte * sent)

    def ms(
        self, operation: Operation, tier: LinkTier, processes: int, payload_bytes: float
    ) -> float:
        """One collective; nothing where a process is alone or has nothing to say."""
        if payload_bytes <= 0:
            return 0.0
        return float(self.line(operation, tier, processes)(payload_bytes))

    def measured(self, operation: Operation, tier: LinkTier) -> bool:
        """Whether the profile has points of an operation at a distance."""
        return bool(self._points(operation, tier))

    def _points(self, operation: Operation, tier: LinkTier) -> list[CollectivePoint]:
        points = self.profile.collectives
        return [one for one in points if (one.operation, one.tier) == (operation, tier)]

    def _coefficients(self, operation: Operation, tier: LinkTier) -> Array:
        points = self._points(operation, tier)
        if not points:
            self.estimated = True
            gpu = gpu_of_device(self.profile.hardware.gpu) or GPUS["h100"]
            per_byte = 1 / (gpu.link_gbps(tier) * 1e6 * REACHED)
            return np.array([START_MS[tier], HOP_MS[tier], per_byte])
        rows = np.array([_ring(operation, one.processes) for one in points])
        rows[:, 2] *= [one.payload_bytes for one in points]
        return _weighted(rows, np.array([one.ms for one in points]), 1e-6)


def _ring(operation: Operation, processes: int) -> tuple[float, float, float]:
    """A start, the hops, and the part of its payload that a process sends."""
    if operation == "send":
        return 1.0, 0.0, 1.0
    part = {"all-reduce": 2.0, "all-gather": 1.0}[operation]
    return 1.0, math.log2(processes), part * (processes - 1) / processes


@dataclass(frozen=True, slots=True)
class Links:
    """Lines of the collectives in a mesh; of m meshes, arrays [m].

    comm     an all-reduce over tp
    reduce   sums of adapters' gradients over replicas, and of replicated halves over tp
    gather   an all-gather of a sharded base over replicas
    send     from one stage to the next
    copies   whether weights are copied from peers to where layers read them (`peer_copies`)
    """

    comm: Line
    reduce: Line
    gather: Line
    send: Line
    copies: Mask
