"""How operators carry a cut: the dimension along which processes hold pieces of a value.

Pieces are equal and follow each other along that dimension. Each process runs the same operator on
its piece; a rule says along which dimension the results are then pieces of the whole result, or
why they are not. None is a value that every process has whole.

Pointwise operators need no rule. Another package teaches an operator with
`@rule(torch.ops.mine.op.default)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tlora_fx.passes.token_rules import rank_of
from tlora_fx.rewriting import arguments_of

aten = torch.ops.aten
tlora = torch.ops.tlora_fx
Cut = Any  # None, a dimension, or a tuple of them for operators with several results
# Where a list of sizes stands that names the result's own.
SIZES = (aten.view, aten.reshape, aten._unsafe_view, aten.expand)


class CannotCarry(Exception):
    """An operator needs more than a piece; the text says what for."""


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
    stored: dict[fx.Node, int] = field(default_factory=dict)

    def cut(self, value: Any) -> Cut:
        """The cut of an argument."""
        return self.cuts.get(value) if isinstance(value, fx.Node) else None

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


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register how operators carry a cut.

    The rule gets `Operands`, of which one at least is cut; it returns the cut of the result, or
    raises CannotCarry.
    """

    def keep(function: Rule) -> Rule:
        for target in targets:
            RULES[_key(target)] = function
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
    return found(call)


def resized(node: fx.Node, cut: int, pieces: int) -> None:
    """Let a call that names its result's sizes name a piece's."""
    if getattr(node.target, "overloadpacket", None) in SIZES:
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


@rule(aten.type_as)
def _like(call: Operands) -> Cut:
    return call.cut(call.node.args[0])


@rule(aten.dropout)
def _dropout(call: Operands) -> Cut:
    if call.given("p") and call.given("train"):
        raise CannotCarry("it draws a mask for the whole value")
    return call.cut(call.node.args[0])
