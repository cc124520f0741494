"""Carry what was measured to another GPU, another shape, or another size of tensor parallelism.

A time is multiplied by the ratio of two rooflines, at the point and at what it becomes. The result
is marked: nobody has measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlora_fx.cost.hardware import GPUS, Gpu, gpu_of_device
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.cost.profile import Hardware, LayerPoint, LayerProfile, LossPoint, Profile
from tlora_fx.planners.roofline import Size, layer_ms, roofline_profile, shape_of


@dataclass(frozen=True, slots=True)
class Carried:
    """A layer's profile, and whether it was measured as it is."""

    profile: LayerProfile
    exact: bool


def scaled(profile: Profile, gpu: Gpu, facts: ModelFacts) -> Profile:
    """A profile of a model on a GPU, from another model's or another GPU's."""
    layers: dict[tuple[str, int], LayerProfile] = {}
    sizes = sorted({layer.tp for layer in profile.layers})
    for layer in facts.layers:
        for tp in sizes:
            if (layer.structure, tp) not in layers:
                found = carried(profile, layer, facts, tp, gpu)
                layers[layer.structure, tp] = found.profile
    ceiling, before = roofline_profile(gpu, facts), _gpu(profile)
    memory = before.memory_gbps / gpu.memory_gbps
    width = facts.hidden / profile.shape.hidden
    return profile.model_copy(
        update={
            "name": f"{profile.name} scaled to {facts.title} on {gpu.name}",
            "source": "scaled",
            "origin": profile.name,
            "hardware": Hardware(
                gpu=gpu.name, memory_gib=gpu.memory_gib, processors=gpu.processors
            ),
            "shape": shape_of(facts),
            "layers": list(layers.values()),
            "root": [
                one.scaled(memory * width, memory * width).model_copy(
                    update={"saved_bytes": one.saved_bytes * width}
                )
                for one in profile.root
            ],
            "loss": [_loss(one, profile, facts, gpu) for one in profile.loss] or ceiling.loss,
            "collectives": profile.collectives if gpu is before else [],
        }
    )


def carried(
    profile: Profile, layer: LayerFacts, facts: ModelFacts, tp: int, gpu: Gpu | None = None
) -> Carried:
    """What a profile says of a layer; where it does not know it, of the one that is most like it.

    gpu   None: the profile's own
    """
    before = _gpu(profile)
    gpu = gpu or before
    source = min(profile.layers, key=lambda one: _distance(one, layer, tp))
    width = sum(one.width for one in layer.attention) / tp
    new = Size(layer.elements / tp, width, facts.hidden, facts.dtype)
    old = Size(source.elements, source.attention_width, source.hidden, profile.shape.dtype)
    if (source.structure, source.tp) == (layer.structure, tp) and gpu is before:
        return Carried(source, exact=True)
    points = [_point(one, old, new, before, gpu, tp / source.tp) for one in source.points]
    made = LayerProfile(
        structure=layer.structure,
        tp=tp,
        elements=max(1, round(new.elements)),
        attention_width=round(width),
        hidden=facts.hidden,
        points=points,
    )
    return Carried(made, exact=False)


def _gpu(profile: Profile) -> Gpu:
    """The profile's GPU; one without a data sheet stands in for itself in every ratio."""
    return gpu_of_device(profile.hardware.gpu) or GPUS["h100"]


def _distance(known: LayerProfile, layer: LayerFacts, tp: int) -> tuple[bool, float, float]:
    """Another structure is further away than another tp, and sizes by their ratio."""
    elements = abs(math.log(known.elements * known.tp / max(layer.elements, 1)))
    return known.structure != layer.structure, elements, abs(math.log(known.tp / tp))


def _point(
    point: LayerPoint, old: Size, new: Size, before: Gpu, after: Gpu, narrower: float
) -> LayerPoint:
    """A point of a layer of another size, on another GPU."""
    # An adapter's columns: those of the hidden state stay whole, the others are cut.
    width = new.hidden / old.hidden * (1 + 1 / narrower) / 2
    resized = point.model_copy(
        update={
            "site_tokens": point.site_tokens * width,
            "rank_tokens": point.rank_tokens * width,
        }
    )
    ratios = [
        layer_ms(after, new, resized, direction) / layer_ms(before, old, point, direction)
        for direction in ("forward", "backward")
    ]
    bytes_ratio = new.hidden / old.hidden * (0.25 + 0.75 / narrower) * new.itemsize / old.itemsize
    sizes = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
    grown = {name: getattr(point, name) * bytes_ratio for name in sizes}
    return resized.scaled(*ratios).model_copy(update=grown)


def _loss(point: LossPoint, profile: Profile, facts: ModelFacts, gpu: Gpu) -> LossPoint:
    """Head and loss of another vocabulary and width."""
    before, shape = _gpu(profile), profile.shape
    product = facts.hidden * facts.vocabulary / (shape.hidden * shape.vocabulary)
    ratio = product * before.peak_tflops(shape.dtype) / gpu.peak_tflops(facts.dtype)
    logits = facts.vocabulary / shape.vocabulary
    return point.scaled(ratio, ratio).model_copy(
        update={
            "saved_bytes": point.saved_bytes * facts.hidden / shape.hidden,
            "peak_bytes": point.peak_bytes * logits,
        }
    )
