"""Meshes of processes that a base can be cut over, by its config alone."""

from __future__ import annotations

from itertools import product
from typing import Any

from tlora_fx.cost.plan import MeshShape


def every_mesh(processes: int) -> list[MeshShape]:
    """All meshes of so many processes."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    return [
        MeshShape(pp=pp, dp=processes // (pp * tp), tp=tp)
        for pp, tp in product(sizes, sizes)
        if processes % (pp * tp) == 0
    ]


def cut_obstacles(shape: MeshShape, layers: int, config: Any) -> list[str]:
    """Reasons why a base's layers and matrices cannot be cut over a mesh, a sentence each.

    layers    of the base
    config    of transformers, or anything with its fields
    """
    reasons: list[str] = []
    if shape.pp > max(layers, 1):
        reasons.append(f"pp={shape.pp} stages need a layer each, and the model has {layers}")
    if shape.tp > 1:
        reasons.extend(_cuts_of_matrices(config, shape.tp))
    return reasons


def _cuts_of_matrices(config: Any, tp: int) -> list[str]:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return [f"tp={tp} cuts attention by heads, and the base's config does not say how many"]
    hidden = getattr(config, "hidden_size", 0)
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate columns": getattr(config, "intermediate_size", None) or 4 * hidden,
    }
    return [
        f"{count} {name} do not divide by tp={tp}" for name, count in counts.items() if count % tp
    ]
