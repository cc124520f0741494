"""A profile from few measurements: a roofline, corrected by what two rows of a layer took.

The roofline says how times grow with tokens, lengths, ranks and parts of tensor parallelism; the
measurements say how much slower the machine is. Between the two rows that were measured the
correction is interpolated, beyond them it is that of the nearer one. A layer that is cut into parts
is as efficient as a whole one on as many tokens fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from tlora_fx.cost.fit import CollectiveTimes
from tlora_fx.cost.hardware import Gpu, LinkTier
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, ModelFacts
from tlora_fx.cost.profile import (
    Captured,
    CollectivePoint,
    LayerPoint,
    LayerProfile,
    Profile,
    name_of,
)
from tlora_fx.cost.profile_sources import (
    MEMORY,
    PRODUCTS,
    TOKENS,
    Direction,
    Size,
    layer_ms,
    roofline_profile,
)

#: Slower or faster than the roofline by more than this, a measurement is taken for a mistake.
MAX_RATIO = 1000.0
#: Of a link that no process has measured.
UNKNOWN_LINK_GBPS = 25.0

Ratio = Callable[[float], float]
#: Points, each with the layer of the roofline that it is of.
Measured = Sequence[tuple[LayerProfile, LayerPoint]]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def sheet_of(
    name: str,
    dtype: str,
    *,
    product_tflops: float,
    copy_gbps: float,
    memory_gib: float = 0.0,
    processors: int = 0,
) -> Gpu:
    """A data sheet for a device that has none, such that a roofline gives what was measured.

    product_tflops   10^12 operations a second that a large product reached
    copy_gbps        10^9 bytes a second that a large copy read and wrote
    """
    peak = product_tflops / PRODUCTS
    return Gpu(
        name=name,
        tflops={dtype: peak, "float32": peak},
        memory_gbps=copy_gbps / MEMORY,
        memory_gib=memory_gib,
        processors=processors,
        node_gbps=UNKNOWN_LINK_GBPS,
        network_gbps=UNKNOWN_LINK_GBPS,
    )


def calibrated_profile(
    gpu: Gpu,
    facts: ModelFacts,
    layers: Mapping[str, Sequence[LayerPoint]],
    collectives: Sequence[CollectivePoint] = (),
    *,
    compiled: bool = False,
) -> Profile:
    """A profile of a model on a GPU, from a few rows of whole layers that ran uncompiled.

    layers        measured points by structure; of a structure without any, all others' count
    collectives   all-reduces and all-gathers; sends are taken to be all-reduces of two processes
    compiled      layers will be compiled, and keep what the roofline says
    """
    measured = {point.tokens for points in layers.values() for point in points}
    # Between the sizes of a grid times are interpolated, so what was measured stands in it.
    roof = roofline_profile(gpu, facts, sorted({*TOKENS, *measured}))
    whole = {layer.structure: layer for layer in roof.layers if layer.tp == 1}
    every = [(whole[name], point) for name, points in layers.items() for point in points]

    def own(structure: str) -> list[tuple[LayerProfile, LayerPoint]]:
        return [pair for pair in every if pair[0].structure == structure] or every

    corrected = [
        _corrected(gpu, facts.dtype, layer, own(layer.structure), compiled=compiled)
        for layer in roof.layers
    ]
    both = [_ratio(gpu, facts.dtype, every, direction) for direction in DIRECTIONS]
    return roof.model_copy(
        update={
            "name": name_of(facts.title, gpu.name),
            "source": "calibrated",
            "compiled": compiled,
            "layers": corrected,
            "root": [one.scaled(*(ratio(one.tokens) for ratio in both)) for one in roof.root],
            "loss": [one.scaled(*(ratio(one.targets) for ratio in both)) for one in roof.loss],
            "collectives": [*collectives, *_sends(roof, collectives)],
        }
    )


def _corrected(
    gpu: Gpu, dtype: str, layer: LayerProfile, measured: Measured, *, compiled: bool
) -> LayerProfile:
    """A layer of the roofline, as slow as was measured."""
    ratios = [_ratio(gpu, dtype, measured, direction) for direction in DIRECTIONS]
    hosts = _host_ms(measured, "forward_ms"), _host_ms(measured, "backward_ms")
    knows_graphs = any(point.captured for _, point in measured)
    memory = {name: _bytes_ratio(measured, name) for name in BYTES if not compiled}
    points = []
    for point in layer.points:
        slower = point.scaled(*(ratio(point.tokens / layer.tp) for ratio in ratios))
        sizes = {name: getattr(point, name) * ratio for name, ratio in memory.items()}
        slower = slower.model_copy(update=sizes)
        if knows_graphs and point.tokens <= CAPTURED_TOKENS * layer.tp:
            slower = _launched(slower, *hosts)
        points.append(slower)
    return layer.model_copy(update={"points": points})


BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")


def _launched(point: LayerPoint, forward_ms: float, backward_ms: float) -> LayerPoint:
    """A point whose times are those of CUDA graphs, with the host's beside them."""
    graphs = Captured(**{name: getattr(point, name) for name in Captured.model_fields})
    hosts = {
        "forward_ms": forward_ms, "frozen_ms": forward_ms,
        "backward_ms": backward_ms, "first_ms": backward_ms,
    }  # fmt: skip
    times = {
        name: max(getattr(point, name), host)
        for name, host in hosts.items()
        if getattr(point, name) is not None
    }
    return point.model_copy(update={**times, "captured": graphs})


def _host_ms(measured: Measured, name: str) -> float:
    """What the host takes to launch a layer, where the device waited for it."""
    waited = [getattr(point, name) for _, point in measured if point.waits(name)]
    return float(min(waited, default=0.0))


def _ratio(gpu: Gpu, dtype: str, measured: Measured, direction: Direction) -> Ratio:
    """How many times as long as by the roofline a layer takes on so many tokens."""
    known: dict[float, list[float]] = {}
    for layer, point in measured:
        size = Size(layer.elements, layer.attention_width, layer.hidden, dtype)
        took = getattr(point.as_captured(), f"{direction}_ms")
        ratio = took / layer_ms(gpu, size, point, direction)
        if 1 / MAX_RATIO < ratio < MAX_RATIO:
            known.setdefault(math.log(point.tokens), []).append(math.log(ratio))
    knots = sorted((tokens, fmean(ratios)) for tokens, ratios in known.items())

    def ratio_at(tokens: float) -> float:
        if not knots:
            return 1.0
        import numpy as np

        x, y = zip(*knots, strict=True)
        return math.exp(float(np.interp(math.log(max(tokens, 1.0)), x, y)))

    return ratio_at


def _bytes_ratio(measured: Measured, name: str) -> float:
    """How many times as much as by the roofline a layer keeps, or takes at most."""
    ratios = []
    for layer, point in measured:
        like = layer.points[0]
        expected = getattr(like, name) * point.tokens / like.tokens
        if expected > 0 and getattr(point, name) > 0:
            ratios.append(getattr(point, name) / expected)
    return fmean(ratios) if ratios else 1.0


def _sends(roof: Profile, collectives: Sequence[CollectivePoint]) -> list[CollectivePoint]:
    """Sends between two processes, by the fitted line of all-reduces."""
    known = roof.model_copy(update={"collectives": list(collectives)})
    times = CollectiveTimes(known)
    tiers: list[LinkTier] = ["node", "network"]
    sizes = sorted({one.payload_bytes for one in collectives})
    return [
        CollectivePoint(
            operation="send",
            tier=tier,
            processes=2,
            payload_bytes=size,
            ms=times.ms("all-reduce", tier, 2, size),
        )
        for tier in tiers
        if times.measured("all-reduce", tier)
        for size in sizes
    ]
