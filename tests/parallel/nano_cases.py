"""Models that run in nano-batches in the processes of a group, beside the same models at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx

from tests import models
from tests.parallel.eager_backend import eager_backend
from tests.parallel.tensor_cases import (
    base_of,
    cut_model,
    dropping_jobs,
    take_adapters,
    whole_model,
)
from tlora_fx.model.batch import JobTokens
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import use_group
from tlora_fx.parallel.nano_batches import NanoModel, kind_of

# What takes long: products and attention, forward and backward.
HEAVY = ("multi_lora", "packed_attention", "linear", "mm")


def errors(
    nano: NanoModel, count: int, parts: list[JobTokens], expected: dict[str, models.Outcome]
) -> float:
    """How far losses and gradients are from those of the whole row, relative to the largest."""
    nano.count = count
    found = models.run_fused(nano.model, parts)
    pairs = [
        pair
        for name, own in expected.items()
        for pair in (
            (own.loss, found[name].loss),
            *((value, found[name].gradients[key]) for key, value in own.gradients.items()),
        )
    ]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in pairs)


def sequences() -> list[JobTokens]:
    """Three jobs, the last without tokens, seven sequences."""
    lengths = ((5, 3, 4), (7, 2, 6, 3), ())
    return [models.tokens(own, seed=place, step=2) for place, own in enumerate(lengths)]


def told(graph: fx.Graph) -> str:
    """A graph as letters: s starts a collective, w waits, c is heavy computation."""
    return "".join(
        kind_of(node)[0]
        for node in graph.nodes
        if kind_of(node) != "compute" or any(name in str(node.target) for name in HEAVY)
    )


def cut_in_nano_batches(folder: Path) -> list[float]:
    """How far a model cut over the group is from N = 1, for several N."""
    nano, parts = _cut(folder)
    expected = models.run_fused(nano.model, parts)
    return [errors(nano, count, parts, expected) for count in (2, 3, 8)]


def compiled_in_nano_batches(folder: Path) -> dict[str, Any]:
    """The same with compiled layers, and the schedule of each graph."""
    nano, parts = _cut(folder)
    model = nano.model
    expected = models.run_fused(model, parts)
    graphs: list[fx.Graph] = []
    model.compile(backend=eager_backend(seen=graphs))
    nano.count = 1
    model(models.row_of(model, parts))
    graphs.clear()
    return {
        "error": errors(nano, 2, parts, expected),
        "orders": [told(graph) for graph in graphs],
    }


def _cut(folder: Path) -> tuple[NanoModel, list[JobTokens]]:
    """This process's part of a model that is cut over the group."""
    use_group("tp", dist.group.WORLD)
    jobs = dropping_jobs(base_of(folder / str(dist.get_rank()), "llama"))
    whole, parts = whole_model(jobs), sequences()
    models.run_fused(whole, parts)
    model: SuperModel = cut_model(whole, dist.get_rank(), dist.get_world_size())
    take_adapters(model, whole)
    return NanoModel(model), parts
