"""How operators that move, join and reduce dimensions carry pieces (see shard_rules.py)."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from tlora_fx.passes.tensor_parallel.rules import CannotCarry, Cut, Operands, rule
from tlora_fx.passes.token_parallel.rules import dim_of, rank_of

aten = torch.ops.aten
tlora = torch.ops.tlora_fx


@rule(aten.view, aten.reshape, aten._unsafe_view, runs="kept")
def _reshape(call: Operands) -> Cut:
    """What lies outside the pieces must stay as it was; then they stay in order."""
    source: Any = call.node.args[0]
    cut = call.cut(source)
    before, after = source.meta["val"].shape, call.node.meta["val"].shape
    outside = str(prod(before[:cut]))
    fixed = [dim for dim, size in enumerate(after) if isinstance(size, int) and size != 1]
    found = [dim for dim in fixed if str(prod(after[:dim])) == outside]
    if not found:
        raise CannotCarry("it folds the pieces into another dimension")
    size, sizes = after[found[0]], call.node.args[1]
    if size % call.pieces:
        raise CannotCarry(f"its {size} do not divide by {call.pieces}")
    if isinstance(sizes[found[0]], fx.Node):  # type: ignore[index]
        raise CannotCarry("it computes the size of what is cut")
    return found[0]


@rule(aten.expand, runs="kept")
def _expand(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    return call.cut(source) + rank_of(call.node) - rank_of(source)


@rule(aten.flatten, runs="kept")
def _flatten(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    first = dim_of(int(call.given("start_dim", 0)), rank_of(source))
    last = dim_of(int(call.given("end_dim", -1)), rank_of(source))
    cut = call.cut(source)
    if first < cut <= last:
        raise CannotCarry("it folds the pieces into another dimension")
    return cut if cut <= first else cut - (last - first)


@rule(aten.transpose, aten.swapaxes, runs="kept")
def _transpose(call: Operands) -> Cut:
    cut, ndim = call.cut(call.node.args[0]), rank_of(call.node)
    one, two = (dim_of(int(d), ndim) for d in call.node.args[1:3])  # type: ignore[arg-type]
    return {one: two, two: one}.get(cut, cut)


@rule(aten.permute, runs="kept")
def _permute(call: Operands) -> Cut:
    order: Any = call.node.args[1]
    return [dim_of(d, rank_of(call.node)) for d in order].index(call.cut(call.node.args[0]))


@rule(aten.unsqueeze, runs="kept")
def _unsqueeze(call: Operands) -> Cut:
    cut = call.cut(call.node.args[0])
    new = dim_of(int(call.given("dim")), rank_of(call.node))
    return cut if cut < new else cut + 1


@rule(aten.squeeze, runs="kept")
def _squeeze(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    cut, dims = call.cut(source), call.given("dim")
    if dims is None:
        raise CannotCarry("it drops every dimension of size 1, which a piece's may have")
    asked = {dim_of(int(d), rank_of(source)) for d in (dims if isinstance(dims, list) else [dims])}
    gone = {dim for dim in asked if source.meta["val"].shape[dim] == 1}
    if cut in asked:
        raise CannotCarry("it may drop the dimension of the pieces")
    return cut - sum(dim < cut for dim in gone)


@rule(aten.select, runs="kept")
def _select(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    cut, dim = call.cut(source), dim_of(int(call.given("dim")), rank_of(source))
    if dim == cut:
        raise CannotCarry("it takes a part of what is cut")
    return cut - (dim < cut)


@rule(aten.unbind)
def _unbind(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    cut, dim = call.cut(source), dim_of(int(call.given("dim", 0)), rank_of(source))
    if dim == cut:
        raise CannotCarry("it parts what is cut")
    return (cut - (dim < cut),) * len(call.node.meta["val"])


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
    source: Any = call.node.args[0]
    if dim_of(int(call.given("dim")), rank_of(source)) == call.cut(source):
        raise CannotCarry("it reads the size of what is cut")
    return None


@rule(aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, runs="kept")
def _reduce(call: Operands) -> Cut:
    source: Any = call.node.args[0]
    cut, dims = call.cut(source), call.given("dim")
    some = dims if isinstance(dims, (list, tuple)) else range(rank_of(source))
    gone = {dim_of(int(d), rank_of(source)) for d in ([dims] if isinstance(dims, int) else some)}
    if cut in gone:
        raise CannotCarry("it reduces over what is cut")
    keep = bool(call.given("keepdim", False))
    return cut if keep else cut - sum(d < cut for d in gone)


@rule(aten.softmax, aten._softmax, aten.log_softmax, runs="kept")
def _along(call: Operands) -> Cut:
    cut = call.cut(call.node.args[0])
    if dim_of(int(call.given("dim")), rank_of(call.node)) == cut:
        raise CannotCarry("it normalises over what is cut")
    return cut


@rule(aten.rms_norm, aten.layer_norm, runs="kept")
def _normalise(call: Operands) -> Cut:
    cut, inner = call.cut(call.node.args[0]), len(call.given("normalized_shape"))
    if cut is None or cut >= rank_of(call.node) - inner:
        raise CannotCarry("it normalises over what is cut")
    return cut


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
    if mask is not None and (call.cut(mask) is not None or _differs(mask, cut, ndim)):
        raise CannotCarry("its mask differs between heads")
    if call.given("dropout_p", 0.0):
        raise CannotCarry("it draws masks for all heads")
    return cut


def _differs(value: fx.Node, place: int, ndim: int) -> bool:
    """Whether a whole value differs along a dimension of what it is broadcast to."""
    own = place - ndim + rank_of(value)
    return own >= 0 and bool(value.meta["val"].shape[own] != 1)
