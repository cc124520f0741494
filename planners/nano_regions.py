"""Regions of a nano-batched model: consecutive layers of all nano-batches, compiled as one graph.

A collective at the end of a layer hides behind another nano-batch's next layer only where both lie
in one graph. Equal regions share code, as equal layers do.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tlora_fx.ir.graph import Block, GroupGraph
from tlora_fx.passes.nano_batch import NanoBatch
from tlora_fx.pipeline import Pipeline, Runner
from tlora_fx.pipeline.instrument import Event

REGIONS = "regions"
LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class Region:
    """Where a region hangs, the layers that it runs, and what each input is to a layer.

    inputs   for each input (a layer's path, the name that the layer's code has for it)
    """

    path: str
    layers: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]


def nano_batched(group: GroupGraph, count: int, *, inside: bool = False) -> GroupGraph:
    """A copy of a fused group that runs layers on nano-batches; graphs that stay are shared.

    inside    as of the pass nano-batch
    raises    NotNanoBatchable
    """
    root = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in group.root.nodes:
        made[node] = root.node_copy(node, made.__getitem__)
        made[node].meta = dict(node.meta)
    blocks = {name: replace(block) for name, block in group.blocks.items()}
    copy = replace(group, root=root, blocks=blocks, notes=list(group.notes))
    Runner(Pipeline(())).run_one(Event(1, NanoBatch(count, inside), "group", copy))
    return copy


def outline_regions(group: GroupGraph, count: int, layers: int) -> list[Region]:
    """Replace the calls of so many consecutive layers by the call of a region, all along the root.

    group     as `nano_batched` made it
    returns   the regions in order; their code is among the group's blocks
    """
    known: dict[Hashable, str] = {}
    regions = []
    for place, calls in enumerate(list(_runs(group, count, layers))):
        piece = _Piece(group, calls, count)
        path = f"{REGIONS}.{place}"
        name = known.setdefault(piece.key, f"region_{len(known)}")
        instances = group.blocks[name].instances if name in group.blocks else ()
        group.blocks[name] = Block(name, piece.graph, (*instances, path))
        piece.call(path)
        regions.append(Region(path, piece.layers, tuple(piece.names)))
    return regions


def _runs(group: GroupGraph, count: int, layers: int) -> Iterator[list[fx.Node]]:
    """The calls of each region: `layers` layers of `count` nano-batches, the last one of fewer."""
    paths = {path for block in group.blocks.values() for path in block.instances}
    loss = {path for path in paths if path.startswith("loss")}
    nodes = group.root.nodes
    calls = [n for n in nodes if n.op == "call_module" and n.target in paths - loss]
    for start in range(0, len(calls), layers * count):
        yield calls[start : start + layers * count]


class _Piece:
    """One region as a graph of its own.

    key      equal for regions that may share code
    names    what each input is to a layer
    """

    def __init__(self, group: GroupGraph, calls: Sequence[fx.Node], count: int) -> None:
        self.group, self.calls, self.count = group, calls, count
        self.layers = tuple(dict.fromkeys(str(call.target) for call in calls))
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.names: list[tuple[str, str]] = []
        self._take_inputs()
        rows: list[Hashable] = []
        order = {node: place for place, node in enumerate((*self.inputs, *calls))}
        for call in calls:
            args = tuple(self.made[arg] for arg in call.all_input_nodes)
            inner = f"{LAYERS}.{self.layers.index(str(call.target))}"
            self.made[call] = self.graph.call_module(inner, args)
            self.made[call].meta = dict(call.meta)
            block = group.block_of(str(call.target)).name
            rows.append((block, inner, tuple(order[arg] for arg in call.all_input_nodes)))
        self.results = list(calls[-count:])
        self.graph.output(tuple(self.made[call] for call in self.results))
        self.key = tuple(rows)

    def _take_inputs(self) -> None:
        for call in self.calls:
            graph = self.group.block_of(str(call.target)).graph
            slots = [node for node in graph.nodes if node.op == "placeholder"]
            for source, slot in zip(call.all_input_nodes, slots, strict=True):
                if source not in self.made and source not in self.calls:
                    name = f"{slot.target}_{len(self.inputs)}"
                    self.made[source] = self.graph.placeholder(name)
                    self.made[source].meta = dict(slot.meta)
                    self.inputs.append(source)
                    self.names.append((str(call.target), str(slot.target)))

    def call(self, path: str) -> None:
        """Call the region in place of the layers."""
        root, first = self.group.root, self.calls[0]
        values: Any = tuple(call.meta["val"] for call in self.results)
        tags: dict[str, Any] = {
            key: first.meta[key] for key in ("role", "jobs") if key in first.meta
        }
        with root.inserting_before(first):
            made = root.call_module(path, tuple(self.inputs))
            made.meta.update(tags, val=values, path=path, source="")
            for place, call in enumerate(self.results):
                item = root.call_function(operator.getitem, (made, place))
                item.meta.update(tags, val=values[place], path=path, source="")
                call.replace_all_uses_with(item)
        for call in reversed(self.calls):
            root.erase_node(call)
