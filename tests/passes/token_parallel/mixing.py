"""Edits of fused graphs that let jobs see each other, and edits beside them that do not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph, is_call, placeholders
from tlora_fx.ir.lora_sites import ADD, ONE, SEVERAL
from tlora_fx.rewriting import Maker, Rewriter

aten = torch.ops.aten
ops = torch.ops.tlora_fx
#: Makes of a value another of its type; the axis is the dimension that holds the row.
Mixer = Callable[[Maker, fx.Node, int], fx.Node]
#: Edits a group; False where it has no place for the edit.
Edit = Callable[[GroupGraph, Random], bool]


def _mean(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    return make(aten.sub.Tensor, x, make(aten.mean.dim, x, [axis], True))


def _peak(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    return make(
        aten.mul.Tensor, x, make(aten.sigmoid.default, make(aten.amax.default, x, [axis], True))
    )


def _whole_mean(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    return make(aten.add.Tensor, x, make(aten.mean.default, x))


def _norm(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    norm = make(aten.linalg_vector_norm.default, x, 2, [axis], True)
    return make(aten.div.Tensor, x, norm)


def _sorted(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    return make(operator.getitem, make(aten.sort.default, x, axis), 0)


def _shifted(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    first, rest = make(aten.slice.Tensor, x, axis, 0, 1), make(aten.slice.Tensor, x, axis, 1)
    return make(aten.cat.default, [rest, first], axis)


def _attended(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    def attend(moved: fx.Node) -> fx.Node:
        return make(aten.scaled_dot_product_attention.default, moved, moved, moved)

    return _over_the_row(make, x, axis, attend)


def _every_pair(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    def multiply(moved: fx.Node) -> fx.Node:
        scores = make(aten.matmul.default, moved, make(aten.mT.default, moved))
        return make(aten.matmul.default, scores, moved)

    return _over_the_row(make, x, axis, multiply)


def _over_the_row(
    make: Maker, x: fx.Node, axis: int, build: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """What is made of a value whose tokens lie along the last dimension but one."""
    if axis == x.meta["val"].dim() - 2:
        return build(x)
    return make(aten.transpose.int, build(make(aten.transpose.int, x, axis, -2)), axis, -2)


def _refolded(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    """The same numbers in other places."""
    shape = x.meta["val"].shape
    sizes: list[Any] = [int(size) if isinstance(size, int) else None for size in shape]
    wide = [dim for dim, size in enumerate(sizes) if size is not None and size > 1]
    if not wide:
        return make(aten.flip.default, x, [axis])
    other = wide[-1]
    sizes[axis] = make(aten.sym_size.int, x, axis)
    return make(aten.reshape.default, make(aten.transpose.int, x, axis, other), sizes)


def _by_place(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    count = make(aten.sym_size.int, x, axis)
    places = make(aten.arange.default, count, dtype=x.meta["val"].dtype)
    shape = [1] * x.meta["val"].dim()
    shape[axis] = -1
    return make(aten.mul.Tensor, x, make(aten.reshape.default, places, shape))


def _by_size(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    return make(aten.div.Tensor, x, make(aten.sym_size.int, x, axis))


def _along(target: Any, *args: Any) -> Mixer:
    return lambda make, x, axis: make(target, x, axis, *args)


def _taken(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    """Everybody has what stands first along a dimension."""
    return make(aten.gather.default, x, axis, make(aten.zeros_like.default, x, dtype=torch.int64))


def _twice(make: Maker, x: fx.Node, axis: int) -> fx.Node:
    """Two copies along a dimension, of which the second half of the first is taken too."""
    counts = [1] * x.meta["val"].dim()
    counts[axis] = 2
    double = make(aten.repeat.default, x, counts)
    size = make(aten.sym_size.int, x, axis)
    more = make(operator.add, size, 1)
    return make(aten.slice.Tensor, double, axis, 1, more)


MIXERS: dict[str, Mixer] = {
    "gather": _taken,
    "repeat": _twice,
    "cumsum": _along(aten.cumsum.default),
    "softmax": _along(aten.softmax.int),
    "logcumsumexp": _along(aten.logcumsumexp.default),
    "flip": lambda make, x, axis: make(aten.flip.default, x, [axis]),
    "roll": lambda make, x, axis: make(aten.roll.default, x, [1], [axis]),
    "mean": _mean,
    "whole mean": _whole_mean,
    "peak": _peak,
    "norm": _norm,
    "sort": _sorted,
    "shift": _shifted,
    "attention": _attended,
    "pairs": _every_pair,
    "fold": _refolded,
    "place": _by_place,
    "size": _by_size,
}
#: What none of these mixes, though it looks alike.
SAFE: dict[str, Mixer] = {
    "relu": lambda make, x, axis: make(aten.relu.default, x),
    "scale": lambda make, x, axis: make(aten.mul.Tensor, x, 2.0),
    "own softmax": lambda make, x, axis: make(aten.softmax.int, x, -1),
    "own cumsum": lambda make, x, axis: make(aten.cumsum.default, x, -1),
    "own gather": lambda make, x, axis: _taken(make, x, x.meta["val"].dim() - 1),
    "own norm": lambda make, x, axis: _norm(make, x, x.meta["val"].dim() - 1),
    "there and back": lambda make, x, axis: make(
        aten.transpose.int, make(aten.transpose.int, x, axis, -1), axis, -1
    ),
}


def shared_values(group: GroupGraph) -> list[tuple[fx.Node, int]]:
    """Float values of tokens that all jobs share, and the dimension that holds the row."""
    return [
        (node, node.meta["axis"])
        for graph in group.graphs()
        for node in graph.nodes
        if node.op == "call_function"
        and node.meta.get("role") == "shared"
        and isinstance(node.meta.get("axis"), int)
        and isinstance(value := node.meta["val"], torch.Tensor)
        and value.dtype.is_floating_point
        and value.dim() - 1 != node.meta["axis"]
        and sum(not isinstance(size, int) for size in value.shape) == 1
        and node.users
    ]


def behind_shared(mixer: Mixer) -> Edit:
    """Put an operator behind a value that all jobs share."""

    def edit(group: GroupGraph, choice: Random) -> bool:
        node, axis = choice.choice(shared_values(group))
        Rewriter(node.graph).insert_after(node, lambda make: mixer(make, node, axis))
        return True

    return edit


def calls(group: GroupGraph, *targets: Any) -> list[fx.Node]:
    """Calls of operators in all graphs."""
    return [node for graph in group.graphs() for node in graph.nodes if is_call(node, *targets)]


def _drawn(nodes: list[fx.Node], choice: Random) -> fx.Node | None:
    return choice.choice(nodes) if nodes else None


def _instead(node: fx.Node, argument: Any, target: Any, *args: Any) -> bool:
    """Let one reader of a value read what an operator makes of it."""
    Rewriter(node.graph).insert_before(node, argument, lambda make: make(target, argument, *args))
    return True


def _read_another(group: GroupGraph, choice: Random) -> bool:
    """A whole branch on another job's segment."""
    node = _drawn(calls(group, ops.segment_read.default), choice)
    if node is None:
        return False
    (job,) = node.meta["jobs"]
    index = choice.choice([i for i, name in enumerate(group.job_names) if name != job])
    for moved in node.graph.nodes:
        if moved.meta.get("jobs") == (job,) and is_call(moved, ops.segment_read.default):
            moved.update_arg(2, index)
        if moved.meta.get("jobs") == (job,) and is_call(moved, ops.segment_write.default):
            moved.update_arg(3, index)
    return True


def _float_reads(group: GroupGraph) -> list[fx.Node]:
    reads = calls(group, ops.segment_read.default)
    return [node for node in reads if node.meta["val"].dtype.is_floating_point]


def _read_the_row(group: GroupGraph, choice: Random) -> bool:
    """A branch that adds what it finds in the whole row."""
    node = _drawn(_float_reads(group), choice)
    if node is None:
        return False

    def build(make: Maker) -> fx.Node:
        whole, axis = node.args[0], node.args[3]
        return make(aten.add.Tensor, node, make(aten.mean.dim, whole, [axis], True))

    Rewriter(node.graph).insert_after(node, build)
    return True


def _read_a_neighbour(group: GroupGraph, choice: Random) -> bool:
    """A branch that adds what another job's branch computes."""
    reads = _float_reads(group)
    pairs = [
        (mine, other)
        for mine in reads
        for other in reads
        if mine.graph is other.graph and other < mine and mine.meta["jobs"] != other.meta["jobs"]
    ]
    if not pairs:
        return False
    mine, other = choice.choice(pairs)
    Rewriter(mine.graph).insert_after(
        mine, lambda make: make(aten.add.Tensor, mine, make(aten.mean.default, other))
    )
    return True


def _train_for_all(group: GroupGraph, choice: Random) -> bool:
    """A shared value that reads what one job, or each job, trains."""
    stored = [node for graph in group.graphs() for node in graph.nodes if _is_trained(node)]
    weight = _drawn(stored, choice)
    if weight is None:
        return False
    behind = [n for n, _ in shared_values(group) if n.graph is weight.graph and weight < n]
    node = _drawn(behind, choice)
    if node is None:
        return False
    Rewriter(node.graph).insert_after(
        node, lambda make: make(aten.mul.Tensor, node, make(aten.mean.default, weight))
    )
    return True


def _is_trained(node: fx.Node) -> bool:
    ref = node.meta.get("tensor")
    return node.op == "get_attr" and (ref.owner == "job" or ref.name.endswith((".a", ".b")))


def _other_segments(group: GroupGraph, choice: Random) -> bool:
    """An operator whose segments begin elsewhere."""
    takers = (ONE, SEVERAL, ADD, *(getattr(ops, name).default for name in TAKERS))
    reading = [node for node in calls(group, *takers) if _table(node) in node.all_input_nodes]
    node = _drawn(reading, choice)
    return node is not None and _instead(node, _table(node), aten.clamp.default, 1)


TAKERS = ("keyed_dropout", "segment_read", "segment_write")


def _table(node: fx.Node) -> fx.Node:
    return placeholders(node.graph)["segments"]


def _longer_sequences(group: GroupGraph, choice: Random) -> bool:
    """Attention over more than a sequence."""
    node = _drawn(calls(group, ops.packed_attention.default), choice)
    return node is not None and _instead(node, node.args[3], aten.clamp.default, None, 3)


def _other_positions(group: GroupGraph, choice: Random) -> bool:
    """Positions that go on from one job to the next."""
    positions = placeholders(group.root)["position_ids"]
    readers = [node for node in positions.users if node.op in ("call_function", "call_module")]
    node = _drawn(readers, choice)
    return node is not None and _instead(node, positions, aten.cumsum.default, 1)


def _other_targets(group: GroupGraph, choice: Random) -> bool:
    """A loss that counts other rows for a job."""
    node = _drawn([node for node in group.root.nodes if node.target == "loss"], choice)
    if node is None:
        return False
    return _instead(node, choice.choice(node.args[1:4]), aten.flip.default, [0])


def _written_in_place(group: GroupGraph, choice: Random) -> bool:
    """A shared value that is written into behind everybody's back."""
    node, axis = choice.choice(shared_values(group))
    Rewriter(node.graph).insert_after(
        node, lambda make: make(aten.add_.Tensor, node, make(aten.mean.dim, node, [axis], True))
    )
    return True


EDITS: dict[str, Edit] = {
    **{name: behind_shared(mixer) for name, mixer in MIXERS.items()},
    "another job's segment": _read_another,
    "the row in a branch": _read_the_row,
    "a neighbour in a branch": _read_a_neighbour,
    "an adapter for all": _train_for_all,
    "other segments": _other_segments,
    "longer sequences": _longer_sequences,
    "other positions": _other_positions,
    "other targets": _other_targets,
    "in place": _written_in_place,
}
