"""How operators that pick, split and join places carry the row's axis (see token_rules.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tlora_fx.passes.token_parallel.rules import Axis, MixesTokens, dim_of, rank_of, rule

aten = torch.ops.aten


@rule(aten.cat, aten.stack)
def _cat(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    parts: Any = node.args[0]
    axes = {axis_of(part) for part in parts}
    if axes == {None}:
        return None
    if len(axes) > 1:
        raise MixesTokens("it joins values that hold the row with values that do not")
    axis = axes.pop()
    dim = dim_of(int(node.args[1]) if len(node.args) > 1 else 0, rank_of(node))  # type: ignore[arg-type]
    if "stack" in str(node.target):
        return axis + (dim <= axis)
    if dim == axis:
        raise MixesTokens("it joins rows end to end")
    return axis


@rule(aten.slice, aten.narrow, aten.select, aten.index_select)
def _slice(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axis = axis_of(node.args[0])
    dim = dim_of(int(node.args[1]) if len(node.args) > 1 else 0, rank_of(node.args[0]))  # type: ignore[arg-type]
    if axis is not None and dim == axis:
        raise MixesTokens("it takes some tokens of the row by their place")
    if axis is not None and "select.int" in str(node.target):
        return axis - (dim < axis)
    return axis


@rule(aten.split, aten.chunk, aten.split_with_sizes, aten.unbind)
def _split(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axis = axis_of(node.args[0])
    place = 1 if "unbind" in str(node.target) else 2
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    dim = dim_of(int(dim), rank_of(node.args[0]))  # type: ignore[arg-type]
    if axis is not None and dim == axis:
        raise MixesTokens("it splits the row")
    if axis is not None and place == 1:
        axis -= dim < axis
    return (axis,) * len(node.meta["val"])


@rule(operator.getitem)
def _getitem(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axes = axis_of(node.args[0])
    place: Any = node.args[1]
    return axes[place] if isinstance(axes, tuple) else axes


@rule(aten.index)
def _index(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """`x[:, idx]`: indices side by side stand where the dimensions that they index stood."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    places = [place for place, index in enumerate(indices) if index is not None]
    given: Any = [indices[place] for place in places]
    if places != list(range(places[0], places[-1] + 1)):
        raise MixesTokens("it indexes dimensions that are apart")
    if any(index.meta["val"].dtype == torch.bool for index in given):
        raise MixesTokens("it takes as many places as a mask has")
    axis = axis_of(source)
    ndim = max(rank_of(index) for index in given)
    held = {axis_of(i) - rank_of(i) + ndim for i in given if axis_of(i) is not None}
    if axis is None:
        if len(held) > 1:
            raise MixesTokens("its indices hold the row at different dimensions")
        return places[0] + held.pop() if held else None
    if held or axis in places:
        raise MixesTokens("it takes some tokens of the row by their place")
    return axis if axis < places[0] else axis - len(places) + ndim


@rule(aten.diff)
def _diff(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    source: Any = node.args[0]
    axis = axis_of(source)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    if axis is not None and dim_of(int(dim), rank_of(source)) == axis:  # type: ignore[arg-type]
        raise MixesTokens("it subtracts neighbours in the row")
    return axis
