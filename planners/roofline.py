"""Times that a data sheet allows: to plan for a GPU that nobody has measured.

A layer's products take what their operations cost at a part of the peak, or what reading the
weights costs; what lies between them is bound by memory. The parts are stated below. All that comes
from here is marked as estimated; where some GPU or some shape was measured, only the ratio of two
rooflines is used, so that most of the parts cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_fx.cost.hardware import GIB, Gpu
from tlora_fx.cost.model_facts import ITEM_BYTES, LayerFacts, ModelFacts
from tlora_fx.cost.profile import (
    Hardware,
    HostPoint,
    LayerPoint,
    LayerProfile,
    LossPoint,
    ModelShape,
    OptimizerPoint,
    Profile,
    RootPoint,
)

#: Parts of the peaks that are assumed to be reached.
PRODUCTS, MEMORY, ATTENTION = 0.70, 0.75, 0.40
#: What starting a layer, or one linear with adapters, costs at least.
LAYER_MS, SITE_MS = 0.03, 0.006
#: Times that each hidden column is read or written between products, forward and backward.
PASSES = {"forward": 14, "backward": 22}
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = (128, 1024)
TENSOR_MS = 2e-4
HOST_MS_PER_TOKEN = 2e-4
TP = (1, 2, 4, 8)
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Size:
    """What of a layer counts here (see LayerProfile)."""

    elements: float
    attention_width: float
    hidden: float
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return ITEM_BYTES[self.dtype]


def layer_ms(gpu: Gpu, size: Size, point: LayerPoint, direction: Direction) -> float:
    """Milliseconds of a layer on a row.

    The backward of a frozen product is one product, that of attention two and a half times its
    forward, that of an adapter twice its forward.
    """
    peak = gpu.peak_tflops(size.dtype) * 1e9
    memory = gpu.memory_gbps * 1e6 * MEMORY
    adapters, attention = (1, 1.0) if direction == "forward" else (2, 2.5)
    products = 2 * (size.elements * point.tokens + adapters * point.rank_tokens)
    weights = size.elements * size.itemsize / memory
    columns = PASSES[direction] * size.hidden * point.tokens + 2 * point.site_tokens
    return (
        max(products / (peak * PRODUCTS), weights)
        + 2 * attention * size.attention_width * point.squares / (peak * ATTENTION)
        + columns * size.itemsize / memory
        + LAYER_MS
        + SITE_MS * point.sites
    )


def roofline_profile(gpu: Gpu, facts: ModelFacts) -> Profile:
    """A profile of a model on a GPU, from the data sheet alone."""
    known: dict[str, LayerFacts] = {}
    for layer in facts.layers:
        if layer.structure not in known or layer.adapted:
            known[layer.structure] = layer
    layers = [_layer(gpu, facts, layer, tp) for layer in known.values() for tp in TP]
    size = Size(facts.hidden * facts.vocabulary, 0, 0, facts.dtype)
    return Profile(
        name=f"roofline:{gpu.name}",
        source="roofline",
        origin=gpu.name,
        hardware=Hardware(gpu=gpu.name, memory_gib=gpu.memory_gib, processors=gpu.processors),
        shape=shape_of(facts),
        layers=layers,
        root=[_root(gpu, facts, tokens) for tokens in TOKENS],
        loss=[_loss(gpu, facts, size, rows) for rows in TOKENS],
        optimizer=[_optimizer(gpu, *one) for one in ((2, 10**4), (500, 10**7), (500, 10**5))],
        host=[HostPoint(tokens=n, ms=n * HOST_MS_PER_TOKEN) for n in (512, 16384)],
    )


def shape_of(facts: ModelFacts) -> ModelShape:
    """The sizes of a model's first layer, as a profile names them."""
    first = facts.layers[0]
    attention = first.attention[0] if first.attention else None
    others = [n for pair in first.matrices for n in pair if n != facts.hidden]
    return ModelShape(
        title=facts.title,
        hidden=facts.hidden,
        intermediate=max(others, default=0),
        heads=attention.heads if attention else 1,
        key_value_heads=attention.key_value_heads if attention else 1,
        head_dim=attention.head_dim if attention else facts.hidden,
        layers=len(facts.layers),
        vocabulary=facts.vocabulary,
        dtype=facts.dtype,
    )


def saved_numbers(layer: LayerFacts, hidden: int, tp: int = 1) -> float:
    """Numbers that a compiled layer keeps of each token for its backward, and its result.

    The inputs and outputs of all products, and the residual stream twice.
    """
    split = sum(outer for _, outer in layer.matrices if outer != hidden)
    split += max((inner for inner, _ in layer.matrices if inner != hidden), default=0)
    attended = sum(one.width for one in layer.attention)
    whole = sum(outer == hidden for _, outer in layer.matrices)
    return 3 * hidden + (whole * hidden + split + attended) / tp


def _layer(gpu: Gpu, facts: ModelFacts, layer: LayerFacts, tp: int) -> LayerProfile:
    width = sum(one.width for one in layer.attention) / tp
    size = Size(layer.elements / tp, width, facts.hidden, facts.dtype)
    return LayerProfile(
        structure=layer.structure,
        tp=tp,
        elements=round(size.elements),
        attention_width=round(width),
        hidden=facts.hidden,
        points=[
            _point(gpu, facts, layer, size, tp, (tokens, length), adapted)
            for tokens in TOKENS
            for length in LENGTHS
            for adapted in (0, 1, 8)
        ],
    )


def _point(
    gpu: Gpu,
    facts: ModelFacts,
    layer: LayerFacts,
    size: Size,
    tp: int,
    row: tuple[int, int],
    rank: int,
) -> LayerPoint:
    """A point for adapters of one rank on every matrix; rank 0: a bare layer."""
    tokens, length = row
    count = len(layer.matrices)
    widths = sum(min(i, o) + max(i, o) / tp for i, o in layer.matrices)
    saved = saved_numbers(layer, facts.hidden, tp) * tokens * size.itemsize
    work = LayerPoint(
        tokens=tokens,
        squares=float(tokens * min(length, tokens)),
        sites=count if rank else 0,
        job_sites=count if rank else 0,
        site_tokens=tokens * widths if rank else 0,
        rank_tokens=tokens * widths * rank,
        forward_ms=0,
        backward_ms=0,
        saved_bytes=saved,
        forward_peak_bytes=saved,
        backward_peak_bytes=0.5 * saved,
    )
    forward = layer_ms(gpu, size, work, "forward")
    backward = layer_ms(gpu, size, work, "backward")
    times = {"forward_ms": forward, "backward_ms": backward, "frozen_ms": forward}
    return work.model_copy(update=times | ({"first_ms": backward} if rank else {}))


def _root(gpu: Gpu, facts: ModelFacts, tokens: int) -> RootPoint:
    moved = 6 * facts.hidden * tokens * facts.itemsize / (gpu.memory_gbps * 1e6 * MEMORY)
    saved = 2.0 * facts.hidden * tokens * facts.itemsize
    return RootPoint(tokens=tokens, forward_ms=moved, backward_ms=moved / 2, saved_bytes=saved)


def _loss(gpu: Gpu, facts: ModelFacts, size: Size, rows: int) -> LossPoint:
    """Chunks of logits, which the backward computes again."""
    product = 2 * size.elements * rows / (gpu.peak_tflops(facts.dtype) * 1e9 * PRODUCTS)
    logits = 4.0 * facts.vocabulary * rows / (gpu.memory_gbps * 1e6 * MEMORY)
    chunk = min(rows, max(64, GIB // 4 // (4 * facts.vocabulary)))
    return LossPoint(
        targets=rows,
        forward_ms=product + 3 * logits,
        backward_ms=2 * product + 6 * logits,
        saved_bytes=float(facts.hidden * rows * facts.itemsize),
        peak_bytes=float(chunk * facts.vocabulary * (4 + 4 + 2 * facts.itemsize)),
    )


def _optimizer(gpu: Gpu, tensors: int, parameters: int) -> OptimizerPoint:
    moved = parameters * 4 * 9 / (gpu.memory_gbps * 1e6 * MEMORY)
    return OptimizerPoint(
        tensors=tensors, parameters=parameters, ms=0.1 + tensors * TENSOR_MS + moved
    )
