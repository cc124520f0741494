"""How operators carry a cut: the dimension along which processes hold pieces of a value.

Pieces are equal and follow each other along that dimension, or along each of several runs in it
(`Runs`). Each process runs the same operator on its piece; a rule says along which dimension the
results are then pieces of the whole result, or why they are not. None is a value that every process
has whole.

Pointwise operators need no rule. Another package teaches an operator with
`@rule(torch.ops.mine.op.default)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import fx

from tlora_fx.passes.token_parallel.rules import rank_of
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

    dim     the dimension
    sizes   of the runs in the whole value
    """

    dim: int
    sizes: tuple[int, ...]


def dim_of_cut(cut: Cut) -> Any:
    """The dimension of one value's cut."""
    return cut.dim if isinstance(cut, Runs) else cut


def ends_of(sizes: tuple[int, ...]) -> set[int]:
    """Where runs begin and end."""
    return {0, *accumulate(sizes)}


@dataclass(slots=True)
class Operands:
    """What a rule is told of one call.

    node     the call
    pieces   how many there are
    cuts     of all values before it
    stored   frozen tensors that are to be cut with it, and along which dimension
    """

    node: fx.Node
    pieces: int
    cuts: dict[fx.Node, Cut]
    stored: dict[fx.Node, Cut] = field(default_factory=dict)

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
        """Let a frozen tensor that only this call reads be cut too; False where it cannot be."""
        ref = value.meta.get("tensor")
        own = value.op == "get_attr" and list(value.users) == [self.node]
        if not own or ref is None or ref.owner != "base" or ref.original is not None:
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
            RULES[_key(target)], RUNS[_key(target)] = function, runs
        return function

    return keep


def find_rule(target: Any) -> Rule | None:
    """The rule of an operator, for all its overloads alike."""
    found = RULES.get(_key(target))
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return found


def carried(call: Operands) -> Cut:
    """The cut of a call's result; raises CannotCarry."""
    found = find_rule(call.node.target)
    if found is None:
        raise CannotCarry(f"{call.node.target} has no rule for pieces")
    known = RUNS.get(_key(call.node.target), "kept")
    cuts = (call.cuts.get(value) for value in call.node.all_input_nodes)
    if known == "known" or not any(isinstance(cut, Runs) for cut in cuts):
        return found(call)
    if known == "refused":
        raise CannotCarry("its pieces are parts of several runs")
    return _keep_runs(call, found)


def _keep_runs(call: Operands, found: Rule) -> Runs:
    """The same runs in the result."""
    held = [value for value in call.node.all_input_nodes if call.cuts.get(value) is not None]
    runs = {call.runs(value) for value in held}
    (sizes, *others) = runs
    if others:
        ends = set().union(*map(ends_of, runs))
        raise NeedsRuns("it joins pieces of other runs", ends, max(ends))
    dim = found(call)
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
    """Let a call that names its result's sizes name a piece's."""
    if getattr(node.target, "overloadpacket", None) in SIZES:
        cut = dim_of_cut(cut)
        sizes: Any = list(node.args[1])  # type: ignore[arg-type]
        if sizes[cut] != -1:
            sizes[cut] //= pieces
        node.update_arg(1, sizes)


def _key(target: Any) -> str:
    return str(getattr(target, "overloadpacket", target))


@rule(
    *(getattr(aten, name) for name in ("to", "_to_copy", "contiguous", "clone", "detach", "alias")),
    *(getattr(aten, name) for name in ("masked_fill", "where", "softplus", "gelu", "silu")),
    *(getattr(aten, name) for name in ("zeros_like", "ones_like", "full_like")),
    runs="kept",
)
def pointwise(call: Operands) -> Cut:
    """Every element by itself; shapes broadcast from the right."""
    ndim = rank_of(call.node)
    operands = [n for n in call.node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    places = {call.cut(n) - rank_of(n) + ndim for n in operands if call.cut(n) is not None}
    if len(places) > 1:
        raise CannotCarry(f"it joins pieces along different dimensions {sorted(places)}")
    (place,) = places
    for other in operands:
        own = place - ndim + rank_of(other)
        whole = call.cut(other) is None and own >= 0 and other.meta["val"].shape[own] != 1
        if whole and not call.take(other, own):
            raise CannotCarry(f"it joins a piece with the whole of '{other.name}'")
    return place


@rule(aten.type_as, runs="kept")
def _like(call: Operands) -> Cut:
    return call.cut(call.node.args[0])


@rule(aten.dropout, runs="kept")
def _dropout(call: Operands) -> Cut:
    if call.given("p") and call.given("train"):
        raise CannotCarry("it draws a mask for the whole value")
    return call.cut(call.node.args[0])
