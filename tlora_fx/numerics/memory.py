"""Memory that a comparison takes, known before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import HEAD, GroupGraph, JobGraph, TensorRef, placeholders
from tlora_fx.ir.shapes import FIRST_SEGMENT_SIZE
from tlora_fx.model.batch import PackedBatch
from tlora_fx.numerics.evaluate import State
from tlora_fx.numerics.rows import ProbeRows

# A trained tensor and its gradients of both sides; a value, and its gradient in the backward.
COPIES_OF_TRAINED, COPIES_OF_VALUES = 3, 2


def bytes_needed(states: Iterable[State], layers: frozenset[str], rows: ProbeRows) -> int:
    """Most bytes that running these states one by one takes; weights are drawn once for all."""
    weights: dict[tuple[str, str], int] = {}
    largest = 0
    for state in states:
        if isinstance(state, GroupGraph) and state.fused:
            parts: list[tuple[State, PackedBatch]] = [(state, rows.together())]
        else:
            jobs = state.jobs if isinstance(state, GroupGraph) else [state]
            parts = [(job, rows.alone(job.name)) for job in jobs]
        for part, row in parts:
            runs = list(_runs(part, layers))
            for layer, graph in runs:
                weights.update(_weights(part, layer, graph))
            sizes = _sizes(part, row)
            largest = max(largest, sum(_values(graph, sizes) for _, graph in runs))
    return sum(weights.values()) + COPIES_OF_VALUES * largest


def _runs(state: State, layers: frozenset[str]) -> Iterator[tuple[str, fx.Graph]]:
    """Which graphs run, and at which layer."""
    yield "", state.root
    for block in state.blocks.values():
        if block.name == HEAD:
            yield "", block.graph
        for layer in layers.intersection(block.instances):
            yield layer, block.graph


def _weights(state: State, layer: str, graph: fx.Graph) -> Iterator[tuple[tuple[str, str], int]]:
    for node in graph.nodes:
        ref = node.meta.get("tensor") if node.op == "get_attr" else None
        if not isinstance(ref, TensorRef) or ref.owner == "constant":
            continue
        owner = state.name if isinstance(state, JobGraph) else str(node.meta.get("jobs"))
        size = math.prod(ref.shape) * ref.dtype.itemsize
        if ref.owner == "base":
            # What is stored in another form is made of the tensor as the base has it.
            for whole in ref.originals or (ref,):
                size = math.prod(whole.shape) * whole.dtype.itemsize
                yield ("", f"{layer}.{whole.name}".strip(".")), size
        else:
            yield (owner, f"{layer}.{ref.name}".strip(".")), size * COPIES_OF_TRAINED


def _values(graph: fx.Graph, sizes: dict[Any, int]) -> int:
    """Bytes of all values that operators make."""
    total = 0
    for node in graph.nodes:
        if node.op == "call_function":
            value = node.meta.get("val")
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, Tensor):
                    shape = (_size(size, sizes) for size in item.shape)
                    total += math.prod(shape) * item.dtype.itemsize
    return total


def _sizes(state: State, row: PackedBatch) -> dict[Any, int]:
    """What the symbols of a graph's shapes are in a row."""
    known: dict[Any, int] = {}
    for name, node in placeholders(state.root).items():
        real = getattr(row, name)
        for symbol, size in zip(node.meta["val"].shape, real.shape, strict=False):
            if isinstance(symbol, torch.SymInt):
                known[symbol.node.expr] = size
    bounds = row.segments.tolist()
    for job in range(len(bounds) - 1):
        known[FIRST_SEGMENT_SIZE + 2 * job] = bounds[job + 1] - bounds[job]
    return known


def _size(size: Any, sizes: dict[Any, int]) -> int:
    if isinstance(size, int):
        segment = next((s for s in sizes if isinstance(s, int) and size % s == 0), None)
        big = size >= FIRST_SEGMENT_SIZE and segment is not None
        return size // segment * sizes[segment] if big and segment else size
    known = {symbol: value for symbol, value in sizes.items() if not isinstance(symbol, int)}
    return int(size.node.expr.xreplace(known))
