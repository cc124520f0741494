"""Cut matrices into pieces, one for each process of a tensor-parallel group.

Reads   frozen linears, lowered sites, and what lies between them.
Writes  shard on the stored tensors that are cut, sizes of pieces where calls name sizes; tp_copy
        where whole values meet pieces, tp_reduce behind linears that are cut by rows, and an add of
        their bias behind that.
Keeps   losses and gradients, summed over the group; alone no process computes them, so the numbers
        of one process's graph are others. A replicated half of an adapter has a part of its
        gradient in each process (`SuperModel.partial_sums`).

Where a matrix holds several, one after the other, such as q, k and v, a process's piece has its
heads of each. What cannot be cut stays whole, the same in every process, and is noted with the
reason: branches that run as they are, dropout of the base on pieces. Values between layers are
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import PipelineError
from tlora_fx.fingerprint import named_graphs
from tlora_fx.ir.graph import GroupGraph, is_call, placeholders
from tlora_fx.ir.shapes import fake_like, fake_mode_of, propagate
from tlora_fx.ops.tensor_groups import GROUP
from tlora_fx.passes.lower_loss import HEAD, LOSS
from tlora_fx.passes.shard_linears import Linears
from tlora_fx.passes.shard_rules_parts import resize_parts
from tlora_fx.passes.shard_search import COLUMNS, ROWS, Cuts, search
from tlora_fx.passes.tensor_parallel.rules import Runs, dim_of_cut, resized
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import Maker, Rewriter, arguments_of

aten = torch.ops.aten
ops = torch.ops.tlora_fx


@register
@dataclass(frozen=True, slots=True)
class ShardTensor(GroupPass):
    """Cut matrices over the processes of a tensor-parallel group.

    size   pieces, as many as the group has processes; 1 changes nothing
    head   cut the output vocabulary too; the loss is then summed over the group
    """

    name: ClassVar[str] = "shard-tensor"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters", "key-dropouts"})
    preserves_numerics: ClassVar[Numerics] = "no"

    size: int
    head: bool = True

    def run(self, group: GroupGraph) -> None:
        if self.size < 1:
            raise PipelineError(
                "matrices are cut into one piece at least", found=f"shard-tensor size={self.size}"
            )
        if self.size == 1:
            return
        learned = learning(group)
        for where, graph in named_graphs(group):
            if where == HEAD and not self.head:
                continue
            cuts = search(graph, self.size, open_end=where == HEAD)
            group.notes.extend((self.name, told) for told in _told_whole(where, cuts))
            if cuts.by_columns and rewrite_allowed(f"pieces in {where or 'the root'}"):
                _cut(graph, cuts, self.size)
                _join(group, graph, cuts, learned, open_end=where == HEAD)
                if where == HEAD:
                    _copy_hidden(group)


def nothing_cut(group: GroupGraph, size: int) -> list[str]:
    """Why no matrix of any layer can be cut into so many pieces; [] where one can."""
    told: list[str] = []
    for where, graph in named_graphs(group):
        cuts = search(graph, size) if where != HEAD else Cuts()
        if cuts.by_columns:
            return []
        told.extend(_told_whole(where, cuts))
    return told or ["the model has no linear of the frozen base"]


def _told_whole(where: str, cuts: Cuts) -> list[str]:
    """What stays whole in a graph, and why."""
    pairs = cuts.whole.items()
    return [f"{f'{where}.{told}'.strip('.')} stays whole: {reason}" for told, reason in pairs]


def _cut(graph: fx.Graph, cuts: Cuts, pieces: int) -> None:
    """Give stored tensors and named sizes those of one piece."""
    linears = [(one, COLUMNS) for one in cuts.by_columns] + [(one, ROWS) for one in cuts.by_rows]
    stored = dict(cuts.stored)
    for found, way in linears:
        for matrix in found.matrices:
            stored.update(matrix.cuts(way))
    mode = fake_mode_of(graph)
    for node, cut in stored.items():
        ref, dim = node.meta["tensor"], dim_of_cut(cut)
        runs = cut.sizes if isinstance(cut, Runs) else ()
        shape = tuple(n // pieces if place == dim else n for place, n in enumerate(ref.shape))
        node.meta["tensor"] = replace(ref, shape=shape, shard=(dim, pieces, runs))
        node.meta["val"] = fake_like(mode, shape, ref.dtype)
    for node, cut in cuts.values.items():
        if isinstance(cut, (int, Runs)):
            resized(node, cut, pieces)
        resize_parts(node, cuts.values, pieces)
    propagate(graph)


def _join(
    group: GroupGraph, graph: fx.Graph, cuts: Cuts, learning: set[fx.Node], *, open_end: bool
) -> None:
    """Put the operators where whole values and pieces meet."""
    whole: dict[fx.Node, dict[fx.Node, None]] = {}
    if not open_end:
        for found in cuts.by_columns:
            whole.setdefault(found.x, {})[found.node] = None
        for reader, value in cuts.entries:
            if value in learning:
                whole.setdefault(value, {})[reader] = None
    for value, readers in whole.items():
        first = next(node for node in graph.nodes if node in readers)
        copied = _maker(group, graph, first)(ops.tp_copy.default, value, GROUP)
        _keep_axis(copied, value)
        for reader in readers:
            reader.replace_input_with(value, copied)
    for found in cuts.by_rows:
        _sum(group, graph, found)


def _sum(group: GroupGraph, graph: fx.Graph, found: Linears) -> None:
    """Sum the parts that processes compute of a linear, then add its bias, once."""
    node, (matrix,) = found.node, found.matrices
    readers = list(node.users)
    if matrix.bias is not None:
        node = _without_bias(graph, found)
    make = _maker(group, graph, node.next, path=node.meta.get("path") or "")
    result = make(ops.tp_reduce.default, node, GROUP)
    if matrix.bias is not None:
        result = make(aten.add.Tensor, result, matrix.bias)
    for made in make.made:
        _keep_axis(made, node)
    for reader in readers:
        reader.replace_input_with(found.node, result)
    if node is not found.node:
        graph.erase_node(found.node)


def _without_bias(graph: fx.Graph, found: Linears) -> fx.Node:
    """The same linear without its bias."""
    node = found.node
    if is_call(node, aten.addmm.default):
        given = arguments_of(node)
        plain = Rewriter(graph).at(node)(aten.mm.default, given["mat1"], given["mat2"])
        _keep_axis(plain, node)
        return plain
    place = [one.name for one in node.target._schema.arguments].index("bias")  # type: ignore[union-attr]
    if len(node.args) > place:
        node.update_arg(place, None)
    else:
        node.update_kwarg("bias", None)
    return node


def _copy_hidden(group: GroupGraph) -> None:
    """Let the last hidden state's gradient be summed before it leaves the loss."""
    call = next(n for n in group.root.nodes if n.op == "call_module" and n.target == LOSS)
    hidden: Any = call.args[0]
    copied = _maker(group, group.root, call)(ops.tp_copy.default, hidden, GROUP)
    _keep_axis(copied, hidden)
    call.replace_input_with(hidden, copied)


def _maker(group: GroupGraph, graph: fx.Graph, before: fx.Node, **tags: str) -> Maker:
    """Makes nodes that serve all jobs."""
    jobs = tuple(group.job_names)
    return Rewriter(graph).at(before, {"role": "shared", "jobs": jobs, "site": "", **tags})


def _keep_axis(made: fx.Node, like: fx.Node) -> None:
    if "axis" in like.meta:
        made.meta["axis"] = like.meta["axis"]


def learning(group: GroupGraph) -> set[fx.Node]:
    """The values of all graphs that depend on what jobs train."""
    found = set(_reached(group.root, set()))
    for block in group.blocks.values():
        inputs = list(placeholders(block.graph).values())
        calls = [
            n for n in group.root.nodes if n.op == "call_module" and n.target in block.instances
        ]
        start = {
            inputs[place]
            for call in calls
            for place, given in enumerate(call.args)
            if given in found
        }
        found |= set(_reached(block.graph, start))
    return found


def _reached(graph: fx.Graph, start: set[fx.Node]) -> Iterator[fx.Node]:
    """The values that depend on some inputs, or on trained tensors; layers' results do."""
    reached = set(start)
    for node in graph.nodes:
        ref = node.meta.get("tensor") if node.op == "get_attr" else None
        trained = ref is not None and (
            ref.owner == "job" or ref.name.endswith((".lora.a", ".lora.b"))
        )
        given = node.op == "call_module" or reached.intersection(node.all_input_nodes)
        if (trained or given) and not is_call(node, aten.detach.default):
            reached.add(node)
    yield from reached
