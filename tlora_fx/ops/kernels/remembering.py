"""Serve a call by what an earlier one of its kind started, or note what it starts.

Which plan, tile and kernel serves a call, on which grid, follows from shapes, strides and settings.
These are the key under which recipes (see replaying.py) are kept, with the group's shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.packed import Room, room_of
from tlora_fx.ops.kernels.replaying import NotTold, Recipe, Recording

if TYPE_CHECKING:
    from tlora_fx.ops.kernels.dispatch import Run

logger = logging.getLogger("tlora_fx.kernels")
_MOST = 2048
_TRIES = 3
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def serve(run: Run, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """function(run, *args), or what it started for arguments like these."""
    tensors, key = _described(run, function, args)
    known = run.served.recipes
    found = known.get(key, 0)
    if isinstance(found, Recipe):
        if _again(run, found, tensors):
            return
    elif found == 0:
        # Not the first time: lengths that never come again are many.
        if len(known) >= _MOST:
            known.clear()
        known[key] = 1
    elif found <= _TRIES:
        known[key] = found + 1
        _record(run, key, tensors, partial(function, run, *args))
        return
    function(run, *args)


def _described(run: Run, function: object, args: Sequence[Any]) -> tuple[list[Tensor], object]:
    """All tensors whose addresses a kernel can get, and what launches depend on else.

    token_index comes first: it alone may begin anywhere.
    """
    group, tables = run.group, run.tables
    tensors = [run.token_index]
    plain: list[object] = [function, select.facts(), run.device.index, run.row.jobs]
    for one in args:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, list):
            here = [each for each in one if each is not None]
            tensors += here
            if len(here) < len(one):
                plain.append(tuple(each is None for each in one))
            plain.append(len(one))
        else:
            plain.append(one)
    tensors += (*group.weights, *group.a, *group.b)
    for one in tensors:
        plain += (one.shape, one.stride())
    if group.drops:
        plain += [one.site for one in tables]
    # From here on tensors are ours, of shapes that follow from those above.
    for place in range(len(group.weights)):
        room = _room(run, place)
        plain.append(None if room is None else room.copy is None)
        if room is not None and room.copy is not None:
            tensors.append(room.copy)
    tensors.append(run.row.words)
    for place, one in enumerate(tables):
        held = run.held(place)
        tensors += (one.words, held.a, held.b, held.flags)
    return tensors, tuple(plain)


def _record(run: Run, key: object, tensors: list[Tensor], call: Callable[[], None]) -> None:
    run.recording = recording = Recording()
    try:
        with recording.on():
            call()
    finally:
        run.recording = None
    try:
        run.served.recipes[key] = recording.recipe(tensors)
    except NotTold as reason:
        logger.debug("not started again from a recipe: %s", reason)


def _again(run: Run, recipe: Recipe, tensors: list[Tensor]) -> bool:
    """Whether a recipe could serve this call."""
    for place, roomy in recipe.needs:
        if not run.is_packed(place, _room(run, place) if roomy else None):
            return False
    stream = _stream(run.device.index) if run.device.type == "cuda" else 0
    if not recipe.serve(tensors, run.empty, stream, 1):
        return False
    for place, roomy in recipe.packs:
        run.note_packed(place, _room(run, place) if roomy else None)
    return True


def _room(run: Run, place: int) -> Room | None:
    """The room of a site's weight, if it has one."""
    return room_of(run.group.weights[place], run.served.sites[place], make=False)
