"""Fold equal layers into blocks: one graph of code, called once a layer.

Reads   module paths and the graph's layer plan.
Writes  `blocks`, and a root that calls every layer of the model, traced or not.
Keeps   ownership: a block's tensors are named relative to the layer, and each layer has its own.

Two layers of each structure were traced. They must have given equal graphs, constants included,
and layers must run one after another; otherwise the model is compiled layer by layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from torch import fx

from tlora_fx.errors import LayersNotChained, NotFoldable, NotOutlinable
from tlora_fx.ir.graph import PEFT_PREFIX, Block, JobGraph, LayerPlan, TensorRef, behind, under
from tlora_fx.ir.names import block_name
from tlora_fx.pipeline import JobPass, Numerics, register
from tlora_fx.rewriting import OutlinedGraph, Rewriter, outline

LORA_NUMBERS = {"dropout", "scale"}


@register
@dataclass(frozen=True, slots=True)
class FoldLayers(JobPass):
    """Outline layers into blocks that equal layers share."""

    name: ClassVar[str] = "fold-layers"
    requires: ClassVar[frozenset[str]] = frozenset({"drop-export-noise", "tag-roles"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, graph: JobGraph) -> None:
        if graph.plan is None or not graph.plan.layers:
            return
        plan = graph.plan
        _own_constants(graph.root, plan)
        nodes: dict[str, list[fx.Node]] = {layer: [] for layer in plan.traced()}
        for node in graph.root.nodes:
            layer = _layer_of(node, plan)
            if layer is not None:
                nodes[layer].append(node)
        bodies = {layer: _outline(layer, members) for layer, members in nodes.items()}
        for twin, first in plan.twins().items():
            _require_equal(bodies[twin], bodies[first], f"{twin}, {first}")
        carried = _carried_slots(bodies, plan)
        blocks: dict[str, Block] = {}
        for first in dict.fromkeys(plan.representative.values()):
            instances = tuple(k for k in plan.layers if plan.representative[k] == first)
            name = block_name(instances)
            blocks[name] = Block(name, bodies[first].graph, instances)
        graph.root = _call_layers(graph.root, plan, bodies, carried)
        graph.blocks = blocks


def _own_constants(root: fx.Graph, plan: LayerPlan) -> None:
    """Let each layer read by itself the constants of its adapters, which the base does not have."""
    for node in list(root.nodes):
        ref = node.meta.get("tensor")
        if not isinstance(ref, TensorRef) or ref.owner != "constant":
            continue
        readers: dict[str, list[fx.Node]] = {}
        for user in node.users:
            layer = _layer_of(user, plan) if user.meta.get("role") == "adapter" else None
            if layer is not None:
                readers.setdefault(layer, []).append(user)
        for layer, users in readers.items():
            with root.inserting_after(node):
                own = root.node_copy(node)
            own.meta = {**node.meta, "path": layer}
            node.replace_all_uses_with(own, lambda user, users=users: user in users)


def _layer_of(node: fx.Node, plan: LayerPlan) -> str | None:
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef):
        constant = ref.owner == "constant"
        path = node.meta.get("path", "") if constant else ref.name.removeprefix(PEFT_PREFIX)
    else:
        path = node.meta.get("path", "") if node.op == "call_function" else ""
    return next((layer for layer in plan.traced() if under(path, layer)), None)


def _outline(layer: str, members: list[fx.Node]) -> OutlinedGraph:
    try:
        piece = outline(members, layer)
    except NotOutlinable as error:
        raise LayersNotChained(error.what, layer=layer, found=error.facts.get("found")) from error
    if len(piece.results) != 1:
        raise LayersNotChained(
            "a layer hands on more than one value",
            layer=layer,
            found=", ".join(str(n) for n in piece.results),
        )
    return piece


def canonical(graph: fx.Graph) -> list[Hashable]:
    """A graph as a list that is equal for graphs that compute the same.

    Numbers of plain LoRA branches (rank, scaling, rate) are left out: they are a site's, not the
    structure's.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    rows: list[Hashable] = []
    for node in graph.nodes:
        part = node.meta.get("part")
        ref = node.meta.get("tensor")
        target = node.target if node.op != "placeholder" else "input"
        args: Any = (node.args, node.kwargs) if part not in LORA_NUMBERS else (node.args[:1], {})
        shape = () if ref is None or ref.owner == "job" else ref.shape
        text = str(fx.map_arg(args, lambda n: f"%{order[n]}"))
        site = node.meta.get("site") if node.op != "placeholder" else None
        rows.append((node.op, str(target), text, shape, site, part))
    return rows


def _require_equal(left: OutlinedGraph, right: OutlinedGraph, layers: str) -> None:
    pairs = zip_longest(canonical(left.graph), canonical(right.graph), fillvalue="no node")
    for mine, theirs in pairs:
        if mine != theirs:
            raise NotFoldable(
                "two layers of equal structure trace to different graphs",
                layers=layers,
                found=f"{mine}\n{theirs}",
            )


def _carried_slots(bodies: dict[str, OutlinedGraph], plan: LayerPlan) -> dict[str, int]:
    """For each layer structure the input that is the layer before's result.

    raises    NotFoldable when layers do not form a chain
    """
    results = {body.result: layer for layer, body in bodies.items()}
    everything = {node for body in bodies.values() for node in body.nodes}
    carried: dict[str, int] = {}
    before: str | None = None
    for layer in plan.traced():
        body = bodies[layer]
        first = plan.representative[layer]
        for slot, source in enumerate(body.inputs):
            if source in results and results[source] == before:
                if carried.setdefault(first, slot) != slot:
                    raise LayersNotChained("layers take the running value at different places")
            elif not everything.isdisjoint(behind([source], everything.__contains__)):
                raise LayersNotChained("a layer reads more than the layer before it", layer=layer)
        before = layer
    for layer in plan.traced()[1:]:
        if plan.representative[layer] not in carried:
            raise LayersNotChained("a layer does not read the layer before it", layer=layer)
    _require_same_context(bodies, plan, carried)
    return carried


def _require_same_context(
    bodies: dict[str, OutlinedGraph], plan: LayerPlan, carried: dict[str, int]
) -> None:
    for layer, first in plan.twins().items():
        slot = carried.get(first)
        pairs = enumerate(zip(bodies[layer].inputs, bodies[first].inputs, strict=True))
        if any(index != slot and mine is not theirs for index, (mine, theirs) in pairs):
            raise NotFoldable("equal layers are called with different values", layer=layer)


def _call_layers(
    root: fx.Graph, plan: LayerPlan, bodies: dict[str, OutlinedGraph], carried: dict[str, int]
) -> fx.Graph:
    """The root anew, each run of layer nodes replaced by calls of all layers."""
    owner = {node: layer for layer, body in bodies.items() for node in body.nodes}
    traced = plan.traced()
    last = bodies[traced[-1]].result
    for layer in traced[:-1]:
        if any(user not in owner for user in bodies[layer].result.users):
            raise LayersNotChained("a value between layers is used after them", layer=layer)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    running: fx.Node | None = None
    for node in root.nodes:
        if node not in owner:
            copies[node] = new.node_copy(node, lambda n: copies[n])
        elif running is None and node.op == "call_function":
            running = _emit_calls(new, copies, plan, bodies, carried)
            copies[last] = running
    Rewriter(new).erase_dead()
    return new


def _emit_calls(
    new: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    plan: LayerPlan,
    bodies: dict[str, OutlinedGraph],
    carried: dict[str, int],
) -> fx.Node:
    running: fx.Node | None = None
    results = {body.result for body in bodies.values()}
    for layer in plan.layers:
        first = plan.representative[layer]
        body = bodies[first]
        slot = carried.get(first)
        for source in body.inputs:
            if source not in copies and source not in results:
                raise LayersNotChained("a layer reads what is made between layers", layer=layer)
        args = [
            running if index == slot and running is not None else copies[source]
            for index, source in enumerate(body.inputs)
        ]
        running = new.call_module(layer, tuple(args))
        running.meta.update(
            val=body.result.meta["val"], path=layer, source="", role="backbone", jobs=()
        )
    assert running is not None
    return running
