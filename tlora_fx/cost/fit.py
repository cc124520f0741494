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

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import Array as Array_imported
from tlora_fx.cost.hardware import GIB, GPUS, Tier, gpu_of_device
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.cost.profile import LayerPoint, LayerProfile, Operation, Profile
from tlora_fx.cost.profile_sources import carried

# Least squares with coefficients that are never negative.
#
# What is fitted so never falls where a load grows, whatever the noise of a measurement.


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


# How long processes take to talk, by operation, number of processes, bytes and distance.
#
# A ring's time is a start, a hop for each further process, and its bytes over the link's
# bandwidth: all-reduce sends 2 (p - 1) / p of its payload, all-gather (p - 1) / p, a send all of
# it. Start, hop and bandwidth are fitted to what a profile measured; where it measured none, the
# data sheet stands in, and whoever asks is told that the result is an estimate.


#: Milliseconds to start, and the part of a link's bandwidth that is reached, without measurements.
START_MS = {"node": 0.012, "network": 0.030}
HOP_MS = {"node": 0.001, "network": 0.004}
REACHED = 0.75


class CollectiveTimes:
    """Milliseconds of collectives on one kind of hardware.

    estimated   whether anything that was asked for came from a data sheet
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.estimated = False
        self._known: dict[tuple[Operation, Tier], Array] = {}

    def ms(self, operation: Operation, tier: Tier, processes: int, payload_bytes: float) -> float:
        """One collective; nothing where a process is alone or has nothing to say."""
        if processes < 2 or payload_bytes <= 0:
            return 0.0
        key = (operation, tier)
        if key not in self._known:
            self._known[key] = self._coefficients(operation, tier)
        return float(self._known[key] @ _features(operation, processes, payload_bytes))

    def measured(self, operation: Operation, tier: Tier) -> bool:
        """Whether the profile has points of an operation at a distance."""
        points = self.profile.collectives
        return any((one.operation, one.tier) == (operation, tier) for one in points)

    def _coefficients(self, operation: Operation, tier: Tier) -> Array:
        points = [
            one for one in self.profile.collectives
            if (one.operation, one.tier) == (operation, tier)
        ]  # fmt: skip
        if not points:
            self.estimated = True
            gpu = gpu_of_device(self.profile.hardware.gpu) or GPUS["h100"]
            per_byte = 1 / (gpu.link_gbps(tier) * 1e6 * REACHED)
            return np.array([START_MS[tier], HOP_MS[tier], per_byte])
        rows = [_features(operation, one.processes, one.payload_bytes) for one in points]
        values = np.array([one.ms for one in points])
        weights = 1 / np.maximum(values, 1e-6)
        return fit(np.array(rows) * weights[:, None], values * weights)


def _features(operation: Operation, processes: int, payload_bytes: float) -> Array:
    part = {"all-reduce": 2.0, "all-gather": 1.0, "send": 1.0}[operation]
    ring = 1.0 if operation == "send" else (processes - 1) / processes
    hops = 0.0 if operation == "send" else math.log2(processes)
    return np.array([1.0, hops, part * ring * payload_bytes])


# Many functions of one number at once, for arrays.
#
# `tlora_fx/cost/fit.py` makes curves of straight pieces, one number at a time. Here all curves of
# a base stand on one grid, so that one search finds the piece of each.


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

    starts: Array_imported
    values: Array_imported
    slopes: Array_imported

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Pieces:
        """The same curves; at 0 they have the value that they come close to."""
        starts = np.unique([0.0, *(knot for curve in curves for knot in curve.knots)])
        ends = np.append(starts[1:], max(FAR, 2 * starts[-1]))
        low = np.array([[curve(max(x, NEAR)) for x in starts] for curve in curves])
        high = np.array([[curve(x) for x in ends] for curve in curves])
        slopes = (high - low) / (ends - starts)
        return cls(starts, low.ravel(), slopes.ravel())

    def find(self, x: Array_imported) -> tuple[Places, Array_imported]:
        """The piece of each of n numbers, and how far behind its start it lies."""
        place = np.searchsorted(self.starts, x, side="right") - 1
        return place, x - self.starts[place]

    def at(self, curve: int | Places, found: tuple[Places, Array_imported]) -> Array_imported:
        """The value of a curve, or of one for each number, where `find` found them."""
        place, beyond = found
        index = place + curve * len(self.starts)
        value: Array_imported = self.values[index] + self.slopes[index] * beyond
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


# What a profile says of a base, as tables that many groups are costed with at once.
#
# Everything that does not depend on a group is computed here, once a base: curves by tensor-
# parallel size on common grids, slopes for the work that adapters bring, sizes, and the optimizer.
# Times are milliseconds.


TP = (1, 2, 4, 8)
#: As tlora_fx/cost/memory.py has them: what is not given out, and the part lost in gaps.
RESERVED_GIB, GAPS = 1.5, 0.04
#: Milliseconds that one adapter adds to one linear, forward and backward, where no kernel is
#: fused: each adapter is two small products in turn. Measured: benchmarks/results/
#: site-2026-11-22.json, row layer-8, arm `loop` in eager mode, (21.68 - 9.49) ms over 56 adapters.
UNFUSED_MS = 0.2177
#: Names of the curves of a row's tokens; the number of a curve is its place times the sizes of tp.
ROW_CURVES = ("forward", "backward", "root", "saved", "forward peak", "backward peak", "root saved")
LOSS_CURVES = ("forward", "backward", "saved", "peak")
#: Slopes of a term beside its curve.
SLOPES = ("squares", "sites", "job_sites", "site_tokens", "rank_tokens")


@dataclass(frozen=True, slots=True)
class BaseFit:
    """Tables of one base on one kind of GPU.

    Those by tp have a row for each of `tp` where small rows run as CUDA graphs, and then one for
    each of `tp` where they do not (see Plan.captures).

    row, loss, host     curves: of a row's tokens, of its targets, of a round's tokens
    forward, backward   [tp, 5] milliseconds by SLOPES of all layers
    forward_host, backward_host   [tp, 6] of the host, however many tokens: of a row, by SLOPES;
                        nothing where rows run as CUDA graphs
    saved               [tp, 5] bytes by SLOPES of all layers
    forward_peak, backward_peak   [tp, 5] bytes by SLOPES of the dearest layer
    narrower            [tp] an adapter's columns in one process, over all of them
    optimizer           milliseconds a job, a tensor, a number
    sites               linears of a layer that may have adapters
    columns             of these linears, in and out
    exact               [tp] whether layers of that size were measured as they are
    peak_flops          operations a second: of the data sheet, else of the fastest row measured
    """

    facts: ModelFacts
    profile: Profile
    tp: tuple[int, ...]
    row: Pieces
    loss: Pieces
    host: Pieces
    forward: Array_imported
    backward: Array_imported
    forward_host: Array_imported
    backward_host: Array_imported
    saved: Array_imported
    forward_peak: Array_imported
    backward_peak: Array_imported
    narrower: Array_imported
    optimizer: tuple[float, float, float]
    sites: int
    columns: float
    exact: tuple[bool, ...]
    peak_flops: float

    @classmethod
    def of(cls, facts: ModelFacts, profile: Profile, tp: Sequence[int] = TP) -> BaseFit:
        """Fitted to a profile's points as the planners fit them, small rows as CUDA graphs.

        tp   sizes of tensor parallelism that may be chosen; what cannot be cut is left out
        """
        sizes = tuple(size for size in tp if divides(facts, size))
        profiles = (profile.as_captured(), profile)
        every = [_LayersAt.of(facts, one, size) for one in profiles for size in sizes]
        root = [_root(one) for one in profiles for _ in sizes]
        loss = [_loss(one) for one in profiles]
        curves = [[one.curves[name] if name in one.curves else beside[name]
                   for one, beside in zip(every, root, strict=True)]
                  for name in ROW_CURVES]  # fmt: skip
        host = Curve.through([(float(one.tokens), one.ms) for one in profile.host])
        shapes = _adapted(facts)
        columns = float(sum(inner + outer for inner, outer in shapes))
        cut = [sum(narrow(inner + outer, facts.hidden, size) for inner, outer in shapes)
               for _ in profiles for size in sizes]  # fmt: skip
        return cls(
            facts=facts,
            profile=profile,
            tp=sizes,
            row=Pieces.of([curve for own in curves for curve in own]),
            loss=Pieces.of([one[name] for one in loss for name in LOSS_CURVES]),
            host=Pieces.of([host]),
            forward=_table(every, "forward"),
            backward=_table(every, "backward"),
            forward_host=np.array([one.host["forward"] for one in every]),
            backward_host=np.array([one.host["backward"] for one in every]),
            saved=_table(every, "saved"),
            forward_peak=_table(every, "forward peak"),
            backward_peak=_table(every, "backward peak"),
            narrower=np.array(cut) / columns if columns else np.ones(len(cut)),
            optimizer=_optimizer(profile),
            sites=len(shapes),
            columns=columns,
            exact=tuple(one.exact for one in every),
            peak_flops=_peak(profile, facts.dtype),
        )

    def curve(self, name: str) -> int:
        """The number of a row's curve at the first tp; the others follow."""
        return ROW_CURVES.index(name) * 2 * len(self.tp)

    def loss_curve(self, name: str, size: Places) -> Places:
        """The numbers of a loss's curve for places in tables by tp."""
        launched = size >= len(self.tp)
        return np.asarray(LOSS_CURVES.index(name) + len(LOSS_CURVES) * launched)

    @property
    def usable_bytes(self) -> float:
        """What the allocator may give out; endless where the profile does not say."""
        size = self.profile.hardware.memory_gib
        return max(0.0, size - RESERVED_GIB) * GIB * (1 - GAPS) if size else float("inf")


def divides(facts: ModelFacts, tp: int) -> bool:
    """Whether heads, key-value heads and widths can be cut into so many parts."""
    if tp == 1:
        return True
    attended = [one for layer in facts.layers for one in layer.attention]
    heads = [n for one in attended for n in (one.heads, one.key_value_heads)]
    widths = [n for layer in facts.layers for pair in layer.matrices for n in pair]
    return bool(attended) and not any(n % tp for n in heads + widths)


def narrow(width: float, hidden: int, tp: int) -> float:
    """Columns of an adapter in one process: those of the hidden state stay whole."""
    return width if tp == 1 else hidden + (width - hidden) / tp


def _adapted(facts: ModelFacts) -> list[tuple[int, int]]:
    """(in, out) of the linears that jobs adapt in a layer; all of them where there are no jobs."""
    layer = next((one for one in facts.layers if one.sites), facts.layers[0])
    return [(site.inner, site.outer) for site in layer.sites] or list(layer.matrices)


@dataclass(frozen=True, slots=True)
class _LayersAt:
    """All layers at one tp, summed.

    curves   by name, of a row's tokens
    slopes   by the same names [5]
    host     by direction [6] what the host takes (see BaseFit)
    """

    curves: dict[str, Curve]
    slopes: dict[str, Array_imported]
    host: dict[str, Array_imported]
    exact: bool

    @classmethod
    def of(cls, facts: ModelFacts, profile: Profile, tp: int) -> _LayersAt:
        kinds: dict[str, LayerFacts] = {}
        for layer in facts.layers:
            kinds.setdefault(layer.structure, layer)
        counts = Counter(layer.structure for layer in facts.layers)
        found = {name: carried(profile, layer, facts, tp) for name, layer in kinds.items()}
        whole = {name: carried(profile, layer, facts, 1) for name, layer in kinds.items()}
        times = {
            name: LayerTimes.of(one.profile, whole[name].profile) for name, one in found.items()
        }
        lowest = facts.layers[0].structure
        rest = Counter(counts)
        rest[lowest] -= 1
        each = [(float(counts[name]), one) for name, one in times.items()]
        timed: dict[str, list[tuple[float, Timed]]] = {
            "forward": [(n, one.forward) for n, one in each],
            "backward": [(float(rest[name]), one.backward) for name, one in times.items()]
            + [(1.0, times[lowest].first)],
        }
        terms: dict[str, list[tuple[float, Term]]] = {
            name: [(n, one.device) for n, one in own] for name, own in timed.items()
        }
        terms["saved"] = [(n, one.saved) for n, one in each]
        curves = {name: summed([(n, term.curve) for n, term in own]) for name, own in terms.items()}
        slopes = {name: np.sum([n * _slopes(term.slopes) for n, term in own], axis=0)
                  for name, own in terms.items()}  # fmt: skip
        peaks = {
            "forward peak": [one.forward_peak for one in times.values()],
            "backward peak": [one.backward_peak for one in times.values()],
        }
        for name, largest in peaks.items():
            curves[name] = highest([term.curve for term in largest])
            slopes[name] = np.max([_slopes(term.slopes) for term in largest], axis=0)
        host = {name: np.sum([n * _launches(one.host) for n, one in own], axis=0)
                for name, own in timed.items()}  # fmt: skip
        return cls(curves, slopes, host, all(one.exact for one in found.values()))


def _slopes(work: Work) -> Array_imported:
    return np.array([getattr(work, name) for name in SLOPES])


def _launches(host: Launches) -> Array_imported:
    return np.array([host.start, 0.0, host.site, host.job_site, 0.0, 0.0])


def _table(every: Sequence[_LayersAt], name: str) -> Array_imported:
    return np.array([one.slopes[name] for one in every])


def _root(profile: Profile) -> dict[str, Curve]:
    """Embedding, positions and last norm."""
    there = Curve.through([(float(one.tokens), one.forward_ms) for one in profile.root])
    back = Curve.through([(float(one.tokens), one.backward_ms) for one in profile.root])
    saved = Curve.through([(float(one.tokens), one.saved_bytes) for one in profile.root])
    return {"root": summed([(1.0, there), (1.0, back)]), "root saved": saved}


def _loss(profile: Profile) -> dict[str, Curve]:
    return {
        "forward": Curve.through([(float(one.targets), one.forward_ms) for one in profile.loss]),
        "backward": Curve.through([(float(one.targets), one.backward_ms) for one in profile.loss]),
        "saved": Curve.through([(float(one.targets), one.saved_bytes) for one in profile.loss]),
        "peak": Curve.through([(float(one.targets), one.peak_bytes) for one in profile.loss]),
    }


def _peak(profile: Profile, dtype: str) -> float:
    gpu = gpu_of_device(profile.hardware.gpu)
    if gpu is not None:
        return gpu.peak_tflops(dtype) * 1e12
    rows = [(layer, point) for layer in profile.layers if layer.tp == 1 for point in layer.points]
    return max(
        (4 * layer.elements * point.tokens / max(point.forward_ms + point.backward_ms, 1e-9) * 1e3
         for layer, point in rows),
        default=0.0,
    )  # fmt: skip


def _optimizer(profile: Profile) -> tuple[float, float, float]:
    """As cost.py fits it: milliseconds a job, a tensor, a number."""
    if not profile.optimizer:
        return 0.0, 0.0, 0.0
    rows = np.array([[1.0, one.tensors, one.parameters] for one in profile.optimizer])
    start, tensor, number = fit(rows, np.array([one.ms for one in profile.optimizer]))
    return float(start), float(tensor), float(number)
