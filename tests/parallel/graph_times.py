"""Profiles of layers that a slow host launches, and of the same as CUDA graphs, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.profile import Captured, Profile

#: What the host takes, over what the device takes for the largest small row of short sequences.
HOST = 2.0
NAMES = ("forward_ms", "backward_ms", "first_ms", "frozen_ms")


def with_graphs(plain: Profile) -> Profile:
    """Small rows take as long as before in graphs, and longer where a slow host launches them."""
    layers = [
        one.model_copy(update={"points": _timed(one.points, "tokens", one.tp)})
        for one in plain.layers
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


def _timed(points: Sequence[Any], size: str, tp: int = 1) -> list[Any]:
    """A launched row takes what the host takes, however small it is."""
    small = [one for one in points if getattr(one, size) <= CAPTURED_TOKENS * tp]
    largest = [one for one in small if getattr(one, size) == max(getattr(o, size) for o in small)]
    return [_slower(one, largest) if one in small else one for one in points]


def _slower(point: Any, largest: Sequence[Any]) -> Any:
    alike = [one for one in largest if _launched(one) == _launched(point)]
    known = {name: getattr(point, name) for name in NAMES if getattr(point, name, None) is not None}
    host = {name: HOST * min(getattr(one, name) for one in alike) for name in known}
    launched = {name: max(ms, host[name]) for name, ms in known.items()}
    return point.model_copy(update=launched | {"captured": Captured(**known)})


def _launched(point: Any) -> tuple[int, int]:
    return getattr(point, "sites", 0), getattr(point, "job_sites", 0)
