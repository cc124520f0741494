"""Rules by operator for a cut: the dimension along which processes hold pieces of a value.

Pieces are equal and follow each other along that dimension, or along each of several runs in it
(`Runs`). Each process runs the same operator on its piece; a rule says along which dimension the
results are then pieces of the whole result, or why they are not. None is a value that every process
has whole.

Pointwise operators need no rule. Another package teaches an operator with
`@rule(torch.ops.mine.op.default)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from tlora_fx.passes.operator_facts import FACTS, Fact, dim_of, key_of, rank_of, results
from tlora_fx.rewriting import arguments_of

aten = torch.ops.aten
tlora = torch.ops.tlora_fx
Cut = Any  # None, a dimension, Runs, or a tuple of them for operators with several results
# Where a list of sizes stands that names the result's own.
SIZES = (aten.view, aten.reshape, aten._unsafe_view, aten.expand)


class CannotCarry(Exception):
    """An operator needs more than a piece; the text says what for."""


class NeedsRuns(CannotCarry):
    """An operator could take pieces of runs that end elsewhere.

    ends   where runs must end in the whole value, which has `size` along its cut
    """

    def __init__(self, reason: str, ends: set[int], size: int) -> None:
        super().__init__(reason)
        self.ends, self.size = ends, size


@dataclass(frozen=True, slots=True)
class Runs:
    """A cut of several runs that lie one after the other along a dimension, such as q, k and v.

    Piece p is the p-th part of the first run, then that of the second, and so on.

    sizes   of the runs in the whole value
    """

    dim: int
    sizes: tuple[int, ...]


def dim_of_cut(cut: Cut) -> Any:
    """The dimension of one value's cut."""
    return cut.dim if isinstance(cut, Runs) else cut


def ends_of(sizes: tuple[int, ...]) -> set[int]:
    """Offsets where runs of these sizes begin and end."""
    return {0, *accumulate(sizes)}


@dataclass(slots=True)
class Operands:
    """Arguments of one call, as a rule reads them.

    cuts     of all values before it
    stored   frozen tensors that are to be cut with it, and along which dimension
    """

    node: fx.Node
    pieces: int
    cuts: dict[fx.Node, Cut]
    stored: dict[fx.Node, Cut] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """The first argument."""
        return self.node.args[0]

    def cut(self, value: Any) -> Any:
        """The dimension along which an argument is cut; None where it is whole."""
        return dim_of_cut(self.cuts.get(value)) if isinstance(value, fx.Node) else None

    def runs(self, value: fx.Node) -> tuple[int, ...]:
        """The sizes of the runs of an argument that is cut."""
        cut = self.cuts[value]
        return cut.sizes if isinstance(cut, Runs) else (value.meta["val"].shape[cut],)

    def given(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operator's schema."""
        return arguments_of(self.node).get(name, default)

    def take(self, value: fx.Node, dim: int) -> bool:
        """Cut a frozen tensor that only this call reads; False where it cannot be cut."""
        ref = value.meta.get("tensor")
        own = value.op == "get_attr" and list(value.users) == [self.node]
        if not own or ref is None or ref.owner != "base" or ref.originals:
            return False
        self.stored[value] = dim
        return True


Rule = Callable[[Operands], Cut]
RULES: dict[str, Rule] = {}
OfRuns = Literal["refused", "kept", "known"]
RUNS: dict[str, OfRuns] = {}


def rule(*targets: Any, runs: OfRuns = "refused") -> Callable[[Rule], Rule]:
    """Register how operators carry a cut.

    The rule gets `Operands`, of which one at least is cut; it returns the cut of the result, or
    raises CannotCarry.

    runs   of pieces of several runs: "kept" by operators whose result has what they read, in the
           same order along the cut, "known" to rules that return the right cut by themselves
    """

    def keep(function: Rule) -> Rule:
        for target in targets:
            RULES[key_of(target)], RUNS[key_of(target)] = function, runs
        return function

    return keep


def find_rule(target: Any) -> Rule | None:
    """The rule of an operator, for all its overloads alike."""
    known = RULES.get(key_of(target))
    if known is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return known


def carried(call: Operands) -> Cut:
    """The cut of a call's result; raises CannotCarry."""
    function = find_rule(call.node.target)
    if function is None:
        raise CannotCarry(f"{call.node.target} has no rule for pieces")
    known = RUNS.get(key_of(call.node.target), "kept")
    cuts = (call.cuts.get(value) for value in call.node.all_input_nodes)
    if known == "known" or not any(isinstance(cut, Runs) for cut in cuts):
        return function(call)
    if known == "refused":
        raise CannotCarry("its pieces are parts of several runs")
    return _keep_runs(call, function)


def _keep_runs(call: Operands, function: Rule) -> Runs:
    held = [value for value in call.node.all_input_nodes if call.cuts.get(value) is not None]
    runs = {call.runs(value) for value in held}
    (sizes, *others) = runs
    if others:
        ends = set().union(*map(ends_of, runs))
        raise NeedsRuns("it joins pieces of other runs", ends, max(ends))
    dim = function(call)
    for value, own in call.stored.items():
        call.stored[value] = Runs(own, sizes)
    return Runs(dim, _scaled(sizes, call.node.meta["val"].shape[dim], call.pieces))


def _scaled(sizes: tuple[int, ...], after: int, pieces: int) -> tuple[int, ...]:
    """Runs as the result counts them, which may hold several elements as one, or one as several."""
    before = sum(sizes)
    scaled = tuple(size * after // before for size in sizes)
    exact = all(new * before == old * after for old, new in zip(sizes, scaled, strict=True))
    if not exact or any(size % pieces for size in scaled):
        raise CannotCarry("it folds the runs of its pieces into each other")
    return scaled


def resized(node: fx.Node, cut: Cut, pieces: int) -> None:
    """Change the sizes that a call names for its result to those of a piece."""
    if getattr(node.target, "overloadpacket", None) in SIZES:
        cut = dim_of_cut(cut)
        sizes: Any = list(node.args[1])  # type: ignore[arg-type]
        if sizes[cut] != -1:
            sizes[cut] //= pieces
        node.update_arg(1, sizes)


@rule(
    *(getattr(aten, name) for name in ("to", "_to_copy", "contiguous", "clone", "detach", "alias")),
    *(getattr(aten, name) for name in ("masked_fill", "where", "softplus", "gelu", "silu")),
    *(getattr(aten, name) for name in ("zeros_like", "ones_like", "full_like")),
    aten.expand,
    runs="kept",
)
def pointwise(call: Operands) -> Cut:
    """Every element by itself; shapes broadcast from the right."""
    ndim = rank_of(call.node)
    operands = [n for n in call.node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    dims = {call.cut(n) - rank_of(n) + ndim for n in operands if call.cut(n) is not None}
    if len(dims) > 1:
        raise CannotCarry(f"it joins pieces along different dimensions {sorted(dims)}")
    (dim,) = dims
    for other in operands:
        own = dim - ndim + rank_of(other)
        whole = call.cut(other) is None and own >= 0 and other.meta["val"].shape[own] != 1
        if whole and not call.take(other, own):
            raise CannotCarry(f"it joins a piece with the whole of '{other.name}'")
    return dim


def _of_fact(fact: Fact) -> Rule:
    """The rule of operators of which a fact says where they put a dimension."""

    def carry(call: Operands) -> Cut:
        cut = call.cut(call.source)
        moved = None if cut is None else fact.move(call.node, cut)
        if moved is None:
            raise CannotCarry(fact.of_pieces)
        return results(call.node, moved)

    return carry


for _fact in FACTS:
    # Parts of several runs do not go into several results.
    rule(*_fact.operators, runs="refused" if aten.unbind in _fact.operators else "kept")(
        _of_fact(_fact)
    )


@rule(aten.type_as, runs="kept")
def _like(call: Operands) -> Cut:
    return call.cut(call.source)


@rule(aten.dropout, runs="kept")
def _dropout(call: Operands) -> Cut:
    if call.given("p") and call.given("train"):
        raise CannotCarry("it draws a mask for the whole value")
    return call.cut(call.source)


# Operators that part a dimension, along the cut too.
#
# Where q, k and v, or gate and up, lie one after the other in one matrix, a model parts the result
# along what is cut. Pieces of each part are what every process wants, so the matrix must be cut
# run by run, and runs must end where the parts do.

SLICE, CHUNK = (aten.slice,), (aten.chunk,)
SPLIT = (aten.split, aten.split_with_sizes)
Range = tuple[int, int]


@rule(*SLICE, runs="known")
def _slice(call: Operands) -> Cut:
    if _dim(call.node) != call.cut(call.source):
        return call.cuts[call.source]
    (cut,) = _parted(call, "it takes a part of what is cut")
    return cut


@rule(*SPLIT, *CHUNK, runs="known")
def _split(call: Operands) -> Cut:
    if _dim(call.node) != call.cut(call.source):
        return (call.cuts[call.source],) * len(call.node.meta["val"])
    return _parted(call, "it parts what is cut: q, k and v, or gate and up, lie in one matrix")


@rule(operator.getitem, runs="known")
def _getitem(call: Operands) -> Cut:
    return call.cuts[call.source][call.node.args[1]]


def resize_parts(node: fx.Node, cuts: dict[fx.Node, Cut], pieces: int) -> None:
    """Change the bounds, or the sizes, of a splitting call to those of a piece's parts."""
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
    dim, own = call.cut(call.source), _ranges(call.node)
    size = call.source.meta["val"].shape[dim]
    if not own or not isinstance(size, int):
        raise CannotCarry(reason)
    alike = [user for user in call.source.users if _parts(user) and _dim(user) == dim]
    wanted = {end for user in alike for bounds in _ranges(user) for end in bounds}
    runs = call.runs(call.source)
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
        if not isinstance(size, int) or any(isinstance(item, fx.Node) for item in bounds):
            return []
        start, stop, step = slice(*bounds).indices(size)
        return [(start, stop)] if step == 1 else []
    sizes = [part.shape[dim] for part in value]
    named = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    if not all(isinstance(item, int) for item in (*sizes, *named)):
        return []
    return [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]


def _dim(node: fx.Node) -> int:
    return dim_of(int(arguments_of(node).get("dim", 0)), rank_of(node.args[0]))


def _parts(node: fx.Node) -> bool:
    return _calls(node, (*SLICE, *SPLIT, *CHUNK))


def _calls(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    return getattr(node.target, "overloadpacket", None) in targets


@rule(aten.view, aten.reshape, aten._unsafe_view, runs="kept")
def _reshape(call: Operands) -> Cut:
    """What lies outside the pieces must stay as it was; then they stay in order."""
    cut = call.cut(call.source)
    before, after = call.source.meta["val"].shape, call.node.meta["val"].shape
    outside = str(prod(before[:cut]))
    fixed = [dim for dim, size in enumerate(after) if isinstance(size, int) and size != 1]
    kept = [dim for dim in fixed if str(prod(after[:dim])) == outside]
    if not kept:
        raise CannotCarry("it folds the pieces into another dimension")
    size, sizes = after[kept[0]], call.node.args[1]
    if size % call.pieces:
        raise CannotCarry(f"its {size} do not divide by {call.pieces}")
    if isinstance(sizes[kept[0]], fx.Node):  # type: ignore[index]
        raise CannotCarry("it computes the size of what is cut")
    return kept[0]


@rule(aten.flatten, runs="kept")
def _flatten(call: Operands) -> Cut:
    first = dim_of(int(call.given("start_dim", 0)), rank_of(call.source))
    last = dim_of(int(call.given("end_dim", -1)), rank_of(call.source))
    cut = call.cut(call.source)
    if first < cut <= last:
        raise CannotCarry("it folds the pieces into another dimension")
    return cut if cut <= first else cut - (last - first)


@rule(aten.squeeze, runs="kept")
def _squeeze(call: Operands) -> Cut:
    cut, dims = call.cut(call.source), call.given("dim")
    if dims is None:
        raise CannotCarry("it drops every dimension of size 1, which a piece's may have")
    asked = {
        dim_of(int(d), rank_of(call.source)) for d in (dims if isinstance(dims, list) else [dims])
    }
    gone = {dim for dim in asked if call.source.meta["val"].shape[dim] == 1}
    if cut in asked:
        raise CannotCarry("it may drop the dimension of the pieces")
    return cut - sum(dim < cut for dim in gone)


@rule(aten.cat, runs="kept")
def _cat(call: Operands) -> Cut:
    parts: Any = call.node.args[0]
    cuts = {call.cut(part) for part in parts}
    if len(cuts) > 1 or None in cuts:
        raise CannotCarry("it joins a piece with the whole of another value")
    (cut,) = cuts
    if dim_of(int(call.given("dim", 0)), rank_of(call.node)) == cut:
        raise CannotCarry("it appends to a piece")
    return cut


@rule(aten.sym_size, runs="known")
def _size(call: Operands) -> Cut:
    if dim_of(int(call.given("dim")), rank_of(call.source)) == call.cut(call.source):
        raise CannotCarry("it reads the size of what is cut")
    return None


@rule(aten.bmm, aten.matmul)
def _matmul(call: Operands) -> Cut:
    """Products of batches: each piece has its own matrices."""
    left, right = call.node.args[:2]
    ndim = rank_of(call.node)
    cuts = {call.cut(n) if call.cut(n) is None else call.cut(n) - rank_of(n) + ndim
            for n in (left, right)}  # fmt: skip
    if len(cuts) > 1 or None in cuts or max(cuts) >= ndim - 2:
        raise CannotCarry("it multiplies a piece with the whole of another value")
    return cuts.pop()


@rule(tlora.packed_attention)
def _packed_attention(call: Operands) -> Cut:
    """Heads by themselves; pieces hold as many query heads to a key head as the whole."""
    if any(call.cut(value) != 1 for value in call.node.args[:3]):
        raise CannotCarry("its query, key and value are not all cut by heads")
    if call.given("dropout"):
        raise CannotCarry("it draws masks by the number of the head")
    sinks = call.given("sinks")
    if sinks is not None and not call.take(sinks, 0):
        raise CannotCarry("its sinks are computed")
    return (1, 0)


@rule(aten.scaled_dot_product_attention)
def _attention(call: Operands) -> Cut:
    """The same in padded form; a mask may not differ between heads."""
    ndim = rank_of(call.node)
    cuts = {call.cut(value) for value in call.node.args[:3]}
    if len(cuts) > 1 or None in cuts or max(cuts) >= ndim - 2:
        raise CannotCarry("its query, key and value are not all cut by heads")
    (cut,) = cuts
    mask = call.given("attn_mask")
    own = None if mask is None else cut - ndim + rank_of(mask)
    # A whole mask must be the same for all heads: broadcast along what is cut.
    differs = own is not None and own >= 0 and mask.meta["val"].shape[own] != 1
    if mask is not None and (call.cut(mask) is not None or differs):
        raise CannotCarry("its mask differs between heads")
    if call.given("dropout_p", 0.0):
        raise CannotCarry("it draws masks for all heads")
    return cut
