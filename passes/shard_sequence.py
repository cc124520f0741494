"""Hold hidden states cut along the row's tokens between the regions that processes share.

Reads   what shard-tensor has written: tp_reduce behind cut regions, tp_copy before them.
Writes  tp_scatter for tp_reduce, tp_gather for tp_copy and before what needs the whole row,
        tp_split where pieces meet whole values, tp_segments for jobs' own operators on pieces;
        layers hand on pieces. tp_copy of trained tensors that pieces are computed with.
Keeps   losses and gradients of shard-tensor's graphs; norms, residual additions and what else takes
        each token by itself run on a piece of the row.

A sum over processes of every token becomes a sum of a piece and a gather, which together send as
much. What is computed with a trained tensor on pieces has a part of its gradient in each process:
tp_copy sums it in the backward. Nothing beyond the pieces' ends is seen outside of the operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from tlora_fx.errors import PipelineError
from tlora_fx.graph import Block, GroupGraph, is_call, output_of, placeholders
from tlora_fx.passes.lower_loss import HEAD, LOSS
from tlora_fx.passes.shard_sequence_rewrite import CutGraph, cut_graph
from tlora_fx.passes.shard_sequence_search import SUM, TokenCuts, row_dim, search_tokens
from tlora_fx.passes.shard_tensor import learning
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.shapes import propagate

IDS, INDEX = "input_ids", "token_index"


@register
@dataclass(frozen=True, slots=True)
class ShardSequence(GroupPass):
    """Cut the row's tokens over a tensor-parallel group where matrices are not cut.

    size   pieces, as many as shard-tensor has made; 1 changes nothing
    """

    name: ClassVar[str] = "shard-sequence"
    requires: ClassVar[frozenset[str]] = frozenset({"shard-tensor"})
    preserves_numerics: ClassVar[Numerics] = "no"

    size: int

    def run(self, group: GroupGraph) -> None:
        if self.size < 1 or group.form != "packed":
            raise PipelineError(
                "only packed rows are cut along their tokens, into one piece at least",
                found=f"shard-sequence size={self.size}, rows in {group.form} form",
            )
        if self.size == 1 or not rewrite_allowed(f"rows in {self.size} pieces"):
            return
        learns = learning(group)
        layers = {name: _layer(group, block, self.size) for name, block in group.blocks.items()}
        for name, layer in layers.items():
            cut_graph(group, layer, self.size, learns)
            told = _told(group.blocks[name].instances[0], layer.cuts)
            group.notes.extend((self.name, text) for text in told)
        root = _root(group, layers, self.size)
        cut_graph(group, root, self.size, learns)
        group.notes.extend((self.name, text) for text in _told("", root.cuts))
        propagate(group.root, group.blocks)


def _layer(group: GroupGraph, block: Block, pieces: int) -> CutGraph:
    """How a layer is cut: it takes a piece where it hands on one."""
    none = CutGraph(block.graph, {}, None, TokenCuts(), {})
    inputs = list(placeholders(block.graph).values())
    slots = _carried_slots(group, block)
    row = next((str(inputs[p].meta["val"].shape[inputs[p].meta["axis"]]) for p in slots), "")
    whole = _whole_row(block.graph, row, {inputs[p] for p in slots})
    if block.name == HEAD or not row or whole is None:
        return none
    for places in (slots, set[int]()):
        start = {inputs[p]: inputs[p].meta["axis"] for p in places}
        found = CutGraph(
            block.graph, start, whole, search_tokens(block.graph, row, pieces, start), {}
        )
        if found.result is not None and _sums(found):
            return found
    return found if _sums(found) else none


def _sums(found: CutGraph) -> bool:
    return any(is_call(node, SUM) for node in found.cuts.values)


def _carried_slots(group: GroupGraph, block: Block) -> set[int]:
    """The inputs in which a layer is given what the layer before it computed.

    Where no layer is before it, those that are shaped as what it returns.
    """
    calls = [n for n in group.root.nodes if n.op == "call_module" and n.target != LOSS]
    inputs = list(placeholders(block.graph).values())
    own = [call for call in calls if call.target in block.instances]
    fed = {place for call in own for place, given in enumerate(call.args) if given in calls}
    if not fed:
        result: Any = output_of(block.graph).args[0]
        fed = {place for place, node in enumerate(inputs) if _alike(node, result)}
    return {place for place in fed if isinstance(inputs[place].meta.get("axis"), int)}


def _alike(one: fx.Node, two: Any) -> bool:
    if not isinstance(two, fx.Node):
        return False
    first, second = one.meta["val"], two.meta["val"]
    same = first.dtype == second.dtype
    return same and list(map(str, first.shape)) == list(map(str, second.shape))


def _whole_row(graph: fx.Graph, row: str, cut: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """An input that stays whole and tells how many tokens a row has."""
    for name, node in placeholders(graph).items():
        value = node.meta["val"]
        if name == INDEX and node not in cut:
            # Tables of tokens are as long as the row, by a symbol of their own.
            return node, value.dim() - 1
        dim = row_dim(value, row)
        if node not in cut and dim is not None:
            return node, dim
    return None


def _root(group: GroupGraph, layers: Mapping[str, CutGraph], pieces: int) -> CutGraph:
    """How the root is cut, given what its layers take and hand on."""
    ids = placeholders(group.root)[IDS]
    start: dict[fx.Node, int] = {}
    calls: dict[fx.Node, set[int]] = {}
    for node in group.root.nodes:
        if node.op != "call_module" or node.target == LOSS:
            continue
        layer = layers[group.block_of(str(node.target)).name]
        inputs = list(placeholders(layer.graph).values())
        calls[node] = {inputs.index(slot) for slot in layer.start}
        if layer.result is not None:
            start[node] = layer.result
    row = str(ids.meta["val"].shape[1])
    cuts = search_tokens(group.root, row, pieces, start)
    for call, slots in calls.items():
        whole = [call.args[slot] for slot in slots if cuts.dim(call.args[slot]) is None]  # type: ignore[arg-type]
        inputs = list(placeholders(layers[group.block_of(str(call.target)).name].graph).values())
        places = {call.args[slot]: inputs[slot].meta["axis"] for slot in slots}
        cuts.splits[call] = {value: places[value] for value in whole}  # type: ignore[misc]
    return CutGraph(group.root, start, (ids, 1), cuts, calls)


def _told(where: str, cuts: TokenCuts) -> Iterator[str]:
    """What reads whole rows of what is cut, each module once."""
    seen = set()
    for node, reason in cuts.told.items():
        path = node.meta.get("path") or where or "the root"
        if path not in seen:
            seen.add(path)
            yield f"{path} takes whole rows: {node.name}: {reason}"
