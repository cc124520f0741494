"""How operators that part a dimension carry pieces, along the cut too (see shard_rules.py).

Where q, k and v, or gate and up, lie one after the other in one matrix, a model parts the result
along what is cut. Pieces of each part are what every process wants, so the matrix must be cut run
by run, and runs must end where the parts do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tlora_fx.passes.tensor_parallel.rules import (
    CannotCarry,
    Cut,
    NeedsRuns,
    Operands,
    Runs,
    dim_of_cut,
    ends_of,
    rule,
)
from tlora_fx.passes.token_parallel.rules import dim_of, rank_of
from tlora_fx.rewriting import arguments_of

aten = torch.ops.aten
SLICE, CHUNK = (aten.slice,), (aten.chunk,)
SPLIT = (aten.split, aten.split_with_sizes)
Range = tuple[int, int]


@rule(*SLICE, runs="known")
def _slice(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    if _dim(call.node) != call.cut(source):
        return call.cuts[source]
    (cut,) = _parted(call, "it takes a part of what is cut")
    return cut


@rule(*SPLIT, *CHUNK, runs="known")
def _split(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    if _dim(call.node) != call.cut(source):
        return (call.cuts[source],) * len(call.node.meta["val"])
    return _parted(call, "it parts what is cut: q, k and v, or gate and up, lie in one matrix")


@rule(operator.getitem, runs="known")
def _getitem(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    return call.cuts[source][call.node.args[1]]


def resize_parts(node: fx.Node, cuts: dict[fx.Node, Cut], pieces: int) -> None:
    """Let a call that parts what is cut name the bounds, or the sizes, of a piece's parts."""
    if not _parts(node) or _dim(node) != dim_of_cut(cuts.get(node.args[0])):  # type: ignore[arg-type]
        return
    source: Any = node.args[0]
    if _calls(node, SLICE):
        ((start, stop),) = _ranges(node)
        node.args, node.kwargs = (source, _dim(node), start // pieces, stop // pieces), {}
    elif _calls(node, SPLIT):
        sizes: Any = node.args[1]
        several = isinstance(sizes, (list, tuple))
        node.update_arg(1, [n // pieces for n in sizes] if several else sizes // pieces)


def _parted(call: Operands, reason: str) -> tuple[Cut, ...]:
    """The cuts of the parts of what is cut; raises NeedsRuns where runs end elsewhere."""
    source: Any = call.node.args[0]
    dim, own = call.cut(source), _ranges(call.node)
    size = source.meta["val"].shape[dim]
    if not own or not isinstance(size, int):
        raise CannotCarry(reason)
    alike = [user for user in source.users if _parts(user) and _dim(user) == dim]
    wanted = {end for user in alike for bounds in _ranges(user) for end in bounds}
    runs = call.runs(source)
    if not wanted <= ends_of(runs):
        raise NeedsRuns(reason, wanted | ends_of(runs), size)
    return tuple(_part(dim, runs, bounds) for bounds in own)


def _part(dim: int, runs: tuple[int, ...], bounds: Range) -> Cut:
    """The cut of a part that begins and ends with runs."""
    inside, end = [], 0
    for size in runs:
        end += size
        if bounds[0] < end <= bounds[1]:
            inside.append(size)
    if not inside:
        raise CannotCarry("it takes nothing of what is cut")
    return dim if len(inside) == 1 else Runs(dim, tuple(inside))


def _ranges(node: fx.Node) -> list[Range]:
    """Where the parts begin and end in the whole value; [] where that is not known."""
    source: Any = node.args[0]
    dim, given, value = _dim(node), arguments_of(node), node.meta["val"]
    size = source.meta["val"].shape[dim]
    if _calls(node, SLICE):
        bounds = [given[name] for name in ("start", "end", "step")]
        if not isinstance(size, int) or any(isinstance(one, fx.Node) for one in bounds):
            return []
        start, stop, step = slice(*bounds).indices(size)
        return [(start, stop)] if step == 1 else []
    sizes = [part.shape[dim] for part in value]
    named = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    if not all(isinstance(one, int) for one in (*sizes, *named)):
        return []
    return [(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(len(sizes))]


def _dim(node: fx.Node) -> int:
    return dim_of(int(arguments_of(node).get("dim", 0)), rank_of(node.args[0]))


def _parts(node: fx.Node) -> bool:
    return _calls(node, (*SLICE, *SPLIT, *CHUNK))


def _calls(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    return getattr(node.target, "overloadpacket", None) in targets
