"""Rules by operator for the row's axis: the dimension along which jobs lie side by side.

In packed form that is the token dimension, in batch form the dimension of lines. A node may serve
several jobs only if every operator on the way works on each token (line) by itself. The axis of a
value is the dimension whose outermost factor is the row; None is a value that all jobs share.

Pointwise operators need no rule. Another package teaches an operator with
`@rule(torch.ops.mine.op.default)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx

import tlora_fx.ops.experts  # noqa: F401  (defines what is named below)
from tlora_fx.passes.operator_facts import (
    FACTS,
    argument,
    dim_of,
    key_of,
    rank_of,
    reduced,
    results,
    symbols_of,
)

__all__ = ["RULES", "Axis", "MixesTokens", "Rule", "dim_of", "find_rule", "rank_of", "rule"]

aten = torch.ops.aten
Axis = Any  # None, a dimension, or a tuple of them for operators with several results
Rule = Callable[[fx.Node, Callable[[Any], Axis]], Axis]
RULES: dict[str, Rule] = {}


class MixesTokens(Exception):
    """An operator mixes the row's tokens; the text says how."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register how operators carry the axis.

    The rule gets the node and a function from an argument to its axis; it returns the axis of the
    result, or raises MixesTokens.
    """

    def keep(function: Rule) -> Rule:
        for target in targets:
            RULES[key_of(target)] = function
        return function

    return keep


def find_rule(target: Any) -> Rule | None:
    """The rule of an operator, for all its overloads alike."""
    known = RULES.get(key_of(target))
    if known is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return known


#: Pointwise operators, and other names of some, that torch does not tag so.
UNTAGGED = (
    "absolute", "arccosh", "arctan2", "divide", "fix", "floor_divide", "gelu", "greater",
    "hardswish", "less", "log_sigmoid", "multiply", "negative", "not_equal", "rsub", "silu",
    "softplus", "special_erf", "special_exp2", "special_expit", "special_expm1", "special_log1p",
    "special_ndtr", "special_round", "special_sinc", "special_xlogy", "subtract",
)  # fmt: skip


@rule(
    *(getattr(aten, name) for name in UNTAGGED),
    *(getattr(aten, name) for name in ("to", "_to_copy", "contiguous", "clone", "detach", "alias")),
    *(getattr(aten, name) for name in ("dropout", "type_as", "expand", "masked_fill", "where")),
    *(getattr(aten, name) for name in ("zeros_like", "ones_like", "full_like", "empty_like")),
    *(aten.fill, aten.__and__, aten.__or__),
    *(aten.broadcast_to, aten.expand_as),
    *(aten.real, aten.imag),
    aten.polar,
    aten.complex,
)
def pointwise(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Every element by itself; shapes broadcast from the right."""
    if not isinstance(node.meta["val"], torch.Tensor):
        raise MixesTokens("it lists the places of the row that a condition chooses")
    ndim = rank_of(node)
    found = {
        axis_of(source) - rank_of(source) + ndim
        for source in node.all_input_nodes
        if axis_of(source) is not None
    }
    if len(found) > 1:
        raise MixesTokens(f"its inputs hold the row at different dimensions {sorted(found)}")
    return found.pop() if found else None


def _of_fact(move: Callable[[fx.Node, int], int | None], reason: str) -> Rule:
    """The rule of operators of which a fact says where they put a dimension."""

    def carry(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
        axis = axis_of(node.args[0])
        moved = None if axis is None else move(node, axis)
        if moved is None and axis is not None:
            raise MixesTokens(reason)
        return results(node, moved)

    return carry


for _fact in FACTS:
    rule(*_fact.operators, *_fact.rows_only)(_of_fact(_fact.move, _fact.of_row))


@rule(aten.linear)
def _linear(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axis = axis_of(node.args[0])
    if any(axis_of(weight) is not None for weight in node.args[1:]):
        raise MixesTokens("its weight depends on the row")
    if axis == rank_of(node.args[0]) - 1:
        raise MixesTokens("it sums over the row")
    return axis


@rule(aten.addmm)
def _addmm(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    return _product(axis_of(node.args[1]), axis_of(node.args[2]), 2, 2, 2)


@rule(aten.mm, aten.matmul, aten.bmm)
def _matmul(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    left, right = node.args[:2]
    return _product(axis_of(left), axis_of(right), rank_of(left), rank_of(right), rank_of(node))


@rule(aten.baddbmm)
def _baddbmm(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axis = _product(axis_of(node.args[1]), axis_of(node.args[2]), 3, 3, 3)
    added = axis_of(node.args[0])
    if added is not None and added != axis:
        raise MixesTokens("what it adds holds the row at another dimension")
    return axis


def _product(left: Axis, right: Axis, left_rank: int, right_rank: int, ndim: int) -> Axis:
    """Axis of a matrix product: rows of the left, columns of the right, or a batch dimension."""
    if left is not None and left == left_rank - 1:
        raise MixesTokens("it sums over the row")
    if right is not None and right == right_rank - 2:
        raise MixesTokens("it sums over the row")
    found = {
        axis - rank + ndim
        for axis, rank in ((left, left_rank), (right, right_rank))
        if axis is not None
    }
    if len(found) > 1:
        raise MixesTokens("it multiplies every token with every other")
    return found.pop() if found else None


@rule(aten.embedding)
def _embedding(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    if axis_of(node.args[0]) is not None:
        raise MixesTokens("its table depends on the row")
    return axis_of(node.args[1])


@rule(aten.view_as_complex)
def _view_as_complex(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Pairs along the last dimension become numbers; `view_as_real` puts them back."""
    axis = axis_of(node.args[0])
    if axis == rank_of(node):
        raise MixesTokens("it makes one number of two tokens")
    return axis


@rule(aten.view_as_real)
def _view_as_real(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    return axis_of(node.args[0])


@rule(aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.flatten, aten.unflatten)
def _reshape(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """What lies outside the row must stay as it was; then the row keeps its order."""
    source: Any = node.args[0]
    axis = axis_of(source)
    if axis is None:
        return None
    before, after = source.meta["val"].shape, node.meta["val"].shape
    outside, row = str(prod(before[:axis])), symbols_of(before[axis])
    for place, size in enumerate(after):
        if str(prod(after[:place])) == outside and row & symbols_of(size):
            return place
    raise MixesTokens("it folds the row into another dimension")


@rule(aten.pad, aten.constant_pad_nd)
def _pad(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Two numbers for each dimension, from the last one on."""
    axis, ndim = axis_of(node.args[0]), rank_of(node)
    padded = {ndim - 1 - place // 2 for place, count in enumerate(node.args[1]) if count != 0}  # type: ignore[arg-type]
    if axis in padded:
        raise MixesTokens("it adds tokens to the row")
    return axis


@rule(aten.conv1d)
def _convolution(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """[B, C, L]: lines by themselves."""
    axis = axis_of(node.args[0])
    if any(axis_of(weight) is not None for weight in node.args[1:3] if isinstance(weight, fx.Node)):
        raise MixesTokens("its weight depends on the row")
    if axis is not None and (axis != 0 or rank_of(node) < 3):
        raise MixesTokens("it sums over neighbours in the row")
    return axis


@rule(aten.tril, aten.triu)
def _triangle(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axis = axis_of(node.args[0])
    if axis is not None and axis >= rank_of(node) - 2:
        raise MixesTokens("it keeps places of the row by their number")
    return axis


@rule(aten.zeros, aten.ones, aten.full, aten.empty)
@rule(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def _uniform(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """The same value everywhere; whoever knows the row's size finds it by its shape."""
    return None


@rule(aten.scaled_dot_product_attention)
def _attention(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Lines by themselves; the tokens of a line see each other."""
    masks: Any = node.args[3:4] or (node.kwargs.get("attn_mask"),)
    ndim = rank_of(node)
    held = [value for value in (*node.args[:3], *masks) if isinstance(value, fx.Node)]
    axes = {axis_of(value) - rank_of(value) + ndim for value in held if axis_of(value) is not None}
    if len(axes) > 1 or (axes and max(axes) >= ndim - 2):
        raise MixesTokens("every token attends to every other, whoever it belongs to")
    return axes.pop() if axes else None


@rule(aten.einsum)
def _einsum(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    terms, arrow, result = equation.partition("->")
    if "." in equation or not arrow:
        raise MixesTokens("its equation leaves dimensions unnamed")
    pairs = zip(terms.split(","), operands, strict=True)
    letters = {term[axis_of(value)] for term, value in pairs if axis_of(value) is not None}
    if len(letters) > 1:
        raise MixesTokens("it multiplies every token with every other")
    if letters and not letters <= set(result):
        raise MixesTokens("it sums over the row")
    return result.index(letters.pop()) if letters else None


# Operators that pick, split and join.


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


@rule(aten.slice_scatter, aten.select_scatter)
def _written_part(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """A value in which a part along `dim` is another's."""
    whole, part = node.args[:2]
    axis, other = axis_of(whole), axis_of(part)
    dim = dim_of(int(argument(node, "dim", 0)), rank_of(whole))
    if other is not None and "select_scatter" in str(node.target):
        other += other >= dim
    if axis is not None and dim == axis:
        raise MixesTokens("it writes to some tokens of the row by their place")
    if axis != other:
        raise MixesTokens("it writes a value that holds the row elsewhere, or not at all")
    return axis


@rule(operator.getitem)
def _getitem(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    axes = axis_of(node.args[0])
    index: Any = node.args[1]
    return axes[index] if isinstance(axes, tuple) else axes


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


@rule(aten.repeat_interleave)
def _repeat_interleave(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Each place some times over, one behind the other."""
    axis = axis_of(node.args[0])
    counts = argument(node, "repeats")
    if isinstance(counts, fx.Node) and axis_of(counts) is not None:
        raise MixesTokens("it makes as many places as the row says")
    dim = argument(node, "dim")
    if axis is not None and (dim is None or dim_of(int(dim), rank_of(node.args[0])) == axis):
        raise MixesTokens("it makes several places of each token")
    return axis


@rule(aten.repeat)
def _repeat(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Copies of the whole, along dimensions counted from the right."""
    axis = axis_of(node.args[0])
    counts: Any = node.args[1]
    if axis is None:
        return None
    axis += len(counts) - rank_of(node.args[0])
    if counts[axis] != 1:
        raise MixesTokens("it lays copies of the row end to end")
    return axis


@rule(aten.gather)
def _gather(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """A place's own index says where along `dim` it reads; elsewhere it reads its own place."""
    source, index = node.args[0], argument(node, "index")
    axis, held = axis_of(source), axis_of(index)
    dim = dim_of(int(argument(node, "dim")), rank_of(source))
    if axis is None and held is None:
        return None
    if axis is None:
        if held != dim:
            raise MixesTokens("it takes values by their place in the row")
        return held
    if held is None and _is_one_expanded(index, axis):
        held = axis
    if axis == dim or axis != held:
        raise MixesTokens("it takes some tokens of the row by their place")
    if str(source.meta["val"].shape[axis]) != str(index.meta["val"].shape[axis]):  # type: ignore[union-attr]
        raise MixesTokens("it takes values of one token with the index of another")
    return axis


def _is_one_expanded(value: Any, dim: int) -> bool:
    """Whether one place of a dimension was expanded to all of them."""
    if value.target is not aten.expand.default or rank_of(value.args[0]) != rank_of(value):
        return False
    size = value.args[0].meta["val"].shape[dim]
    return isinstance(size, int) and size == 1


@rule(aten.max, aten.min)
def _extreme(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Of everything, of two values each, or along a dimension, with its places."""
    if "other" in str(node.target):
        return pointwise(node, axis_of)
    return _of_fact(reduced, "it reduces over the row")(node, axis_of)


# Routing: what a mixture of experts does with a token's own scores, and its experts' products.


@rule(aten.one_hot)
def _one_hot(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """A dimension more, behind the others."""
    if argument(node, "num_classes", -1) == -1:
        raise MixesTokens("the largest number in the row says how wide it is")
    return axis_of(node.args[0])


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def _scatter(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """A place's own index says where along `dim` it writes; elsewhere it writes its own place."""
    into, index, source = cast(Sequence[Any], (node.args[0], *node.args[2:4]))
    held = axis_of(index)
    sources = [source] if isinstance(source, fx.Node) and rank_of(source) else []
    rows = {axis_of(value) for value in (into, index, *sources)}
    if rows == {None}:
        return None
    if dim_of(int(argument(node, "dim")), rank_of(into)) in rows:
        raise MixesTokens("it writes to other places of the row")
    if held is None or not rows <= {None, held}:
        raise MixesTokens("it writes values of one token with the index of another")
    # What holds no row, but is as large, is the same for every token.
    if len({str(value.meta["val"].shape[held]) for value in (into, index, *sources)}) > 1:
        raise MixesTokens("it writes for some tokens of the row by their place")
    return held


@rule(aten.index_add)
def _index_add(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    into, _, index, source = cast(Sequence[Any], node.args[:4])
    axis = axis_of(into)
    if axis_of(index) is not None:
        raise MixesTokens("each token says where it is added")
    if axis != axis_of(source):
        raise MixesTokens("what it adds holds the row at another dimension")
    if axis is not None and axis == dim_of(int(argument(node, "dim")), rank_of(into)):
        raise MixesTokens("it adds to tokens of the row by their place")
    return axis


@rule(torch.ops.tlora_fx.expert_linear)
def _expert_linear(node: fx.Node, axis_of: Callable[[Any], Axis]) -> Axis:
    """Each pair of a token and one of its experts by itself."""
    x, weight, bias, index = cast(Sequence[Any], node.args[:4])
    if axis_of(weight) is not None or axis_of(bias) is not None:
        raise MixesTokens("its matrices depend on the row")
    if axis_of(x) != axis_of(index) or axis_of(x) not in (None, 0):
        raise MixesTokens("it routes tokens by the index of others")
    return axis_of(x)
