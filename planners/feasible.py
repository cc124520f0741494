"""Whether a mesh can run a model, and which meshes of the same size could."""

from __future__ import annotations

from typing import Any

from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import MeshDoesNotFit
from tlora_fx.model.supermodel import SuperModel


def obstacles(model: SuperModel, shape: MeshShape) -> list[str]:
    """Why a mesh cannot run a model, a sentence each; none where it can."""
    found: list[str] = []
    layers = len(model.layer_order())
    if shape.pp > max(layers, 1):
        found.append(f"pp={shape.pp} stages need a layer each, and the model has {layers}")
    if shape.tp > 1:
        found.extend(_cuts_of_matrices(model.backbone.config, shape.tp))
    return found


def fitting_meshes(model: SuperModel, processes: int) -> list[MeshShape]:
    """All meshes of so many processes that can run a model."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    shapes = [
        MeshShape(pp=pp, dp=processes // (pp * tp), tp=tp)
        for pp in sizes
        for tp in sizes
        if processes % (pp * tp) == 0
    ]
    return [shape for shape in shapes if not obstacles(model, shape)]


def demand_fits(model: SuperModel, shape: MeshShape) -> None:
    """Refuse a mesh that cannot run a model.

    raises    MeshDoesNotFit, with the meshes of the same size that can
    """
    found = obstacles(model, shape)
    if found:
        others = ", ".join(f"({mesh})" for mesh in fitting_meshes(model, shape.size))
        raise MeshDoesNotFit(
            f"a mesh of {shape} cannot run this model",
            base=model.backbone.title,
            found="\n".join(found),
            help=f"these meshes of {shape.size} can: {others}",
        )


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
