"""Profiles whose small rows were timed as CUDA graphs too, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlora_fx.planners.model_facts import CAPTURED_TOKENS
from tlora_fx.planners.profile import Captured, Profile

#: A graph's time over what launching takes.
SHARE = 0.25
NAMES = ("forward_ms", "backward_ms", "first_ms", "frozen_ms")


def with_graphs(plain: Profile) -> Profile:
    """Small rows take a quarter of their time as graphs."""
    layers = [
        one.model_copy(update={"points": _timed(one.points, "tokens")}) for one in plain.layers
    ]
    root, loss = _timed(plain.root, "tokens"), _timed(plain.loss, "targets")
    return plain.model_copy(update={"layers": layers, "root": root, "loss": loss})


def without_graphs(profile: Profile) -> Profile:
    """Nothing of graphs is known, as in older files."""

    def bare(points: Sequence[Any]) -> list[Any]:
        return [one.model_copy(update={"captured": None}) for one in points]

    layers = [one.model_copy(update={"points": bare(one.points)}) for one in profile.layers]
    root, loss = bare(profile.root), bare(profile.loss)
    return profile.model_copy(update={"layers": layers, "root": root, "loss": loss})


def _timed(points: Sequence[Any], size: str) -> list[Any]:
    small = [getattr(one, size) <= CAPTURED_TOKENS for one in points]
    return [
        one.model_copy(update={"captured": _share(one)}) if fits else one
        for one, fits in zip(points, small, strict=True)
    ]


def _share(point: Any) -> Captured:
    times = {name: getattr(point, name, None) for name in NAMES}
    return Captured(**{name: ms * SHARE for name, ms in times.items() if ms is not None})
