"""Fold equal layers into blocks: one graph of code, called once a layer.

Reads   module paths and the graph's layer plan.
Writes  `blocks`, and a root that calls every layer of the model, traced or not.
Keeps   ownership: a block's tensors are named relative to the layer, and each layer has its own.

Two layers of each structure were traced. They must have given equal graphs, constants included,
and layers must run one after another; otherwise the model is compiled layer by layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import LayersNotChained, NotFoldable
from tlora_fx.graph import Block, JobGraph, LayerPlan, TensorRef, under
from tlora_fx.pipeline import JobPass, register
from tlora_fx.tracing.export import PEFT_PREFIX

LORA_NUMBERS = {"dropout", "scale"}


@register
@dataclass(frozen=True, slots=True)
class FoldLayers(JobPass):
    """Outline layers into blocks that equal layers share."""

    name: ClassVar[str] = "fold-layers"
    requires: ClassVar[frozenset[str]] = frozenset({"drop-export-noise", "tag-roles"})

    def run(self, graph: JobGraph) -> None:
        if graph.plan is None or not graph.plan.layers:
            return
        plan = graph.plan
        bodies = _outline_all(graph.root, plan)
        for layer, first in plan.twins().items():
            _demand_equal(bodies[layer], bodies[first])
        carried = _carried_slots(bodies, plan)
        blocks: dict[str, Block] = {}
        for first in dict.fromkeys(plan.representative.values()):
            instances = tuple(k for k in plan.layers if plan.representative[k] == first)
            name = block_name(instances)
            blocks[name] = Block(name, bodies[first].graph, instances)
        graph.root = _call_layers(graph.root, plan, bodies, carried)
        graph.blocks = blocks


@dataclass(slots=True)
class _Body:
    """One traced layer, outlined: its own graph, and what the root passes to it."""

    layer: str
    graph: fx.Graph
    inputs: list[fx.Node]
    result: fx.Node
    nodes: list[fx.Node]


def block_name(layers: tuple[str, ...]) -> str:
    """A readable identifier for a block: "layers_0_31", "layers_0_2_to_30"."""
    parent = layers[0].rpartition(".")[0].rpartition(".")[2]
    numbers = [layer.rpartition(".")[2] for layer in layers]
    tail = numbers[0] if len(numbers) == 1 else f"{numbers[0]}_{numbers[-1]}"
    if len(numbers) > 2 and int(numbers[-1]) - int(numbers[0]) + 1 != len(numbers):
        tail = f"{numbers[0]}_{numbers[1]}_to_{numbers[-1]}"
    return f"{parent}_{tail}"


def _outline_all(root: fx.Graph, plan: LayerPlan) -> dict[str, _Body]:
    nodes: dict[str, list[fx.Node]] = {layer: [] for layer in plan.traced()}
    for node in root.nodes:
        layer = _layer_of(node, plan)
        if layer is not None:
            nodes[layer].append(node)
    return {layer: _outline(layer, members) for layer, members in nodes.items()}


def _layer_of(node: fx.Node, plan: LayerPlan) -> str | None:
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef):
        path = ref.name.removeprefix(PEFT_PREFIX) if ref.owner != "constant" else ""
    else:
        path = node.meta.get("path", "") if node.op == "call_function" else ""
    return next((layer for layer in plan.traced() if under(path, layer)), None)


def _outline(layer: str, members: list[fx.Node]) -> _Body:
    inside = set(members)
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    for node in members:
        for source in node.all_input_nodes:
            if source not in inside and source not in made and not _is_size(source):
                made[source] = body.placeholder(_input_name(source))
                made[source].meta = dict(source.meta)
                inputs.append(source)

    def take(source: fx.Node) -> fx.Node:
        if source not in made:
            made[source] = size_inside(body, source, inputs, made)
        return made[source]

    for node in members:
        made[node] = body.node_copy(node, take)
        made[node].meta = dict(node.meta)
        if node.op == "get_attr":
            _make_relative(made[node], layer)
        else:
            made[node].meta["path"] = node.meta["path"][len(layer) + 1 :]
        if "site" in node.meta:
            made[node].meta["site"] = node.meta["site"][len(layer) + 1 :]
    results = [n for n in members if any(user not in inside for user in n.users)]
    if len(results) != 1:
        raise LayersNotChained(
            "a layer hands on more than one value",
            layer=layer,
            found=", ".join(str(n) for n in results),
        )
    body.output(made[results[0]])
    return _Body(layer, body, inputs, results[0], members)


def _input_name(source: fx.Node) -> str:
    if source.op == "placeholder":
        return str(source.target)
    ref = source.meta.get("tensor")
    return ref.name.replace(".", "_") if ref is not None else source.name


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def size_inside(
    body: fx.Graph, size: fx.Node, inputs: list[fx.Node], made: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A size of the row, read from one of the layer's own inputs instead of being passed in."""
    value = size.meta["val"]
    for source in inputs:
        tensor = source.meta.get("val")
        for dim, extent in enumerate(tensor.shape if isinstance(tensor, torch.Tensor) else ()):
            if not isinstance(extent, int) and str(extent) == str(value):
                with body.inserting_after(made[inputs[-1]]):
                    made_size = body.call_function(torch.ops.aten.sym_size.int, (made[source], dim))
                made_size.meta = {**size.meta, "path": ""}
                return made_size
    if size.op == "call_function" and size.all_input_nodes:
        copied = body.node_copy(
            size, lambda n: made[n] if n in made else size_inside(body, n, inputs, made)
        )
        copied.meta = {**size.meta, "path": ""}
        return copied
    raise LayersNotChained(
        "a layer needs a size that none of its inputs has", found=size.format_node()
    )


def _make_relative(node: fx.Node, layer: str) -> None:
    ref: TensorRef = node.meta["tensor"]
    node.target = str(node.target)[len(layer) + 1 :]
    name = ref.name.removeprefix(PEFT_PREFIX)[len(layer) + 1 :]
    node.meta["tensor"] = replace(ref, name=name)


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


def _demand_equal(left: _Body, right: _Body) -> None:
    one, two = canonical(left.graph), canonical(right.graph)
    for mine, theirs in zip(one, two, strict=False):
        if mine != theirs:
            raise NotFoldable(
                "two layers of equal structure trace to different graphs",
                layers=f"{left.layer}, {right.layer}",
                found=f"{mine}\n{theirs}",
            )
    if len(one) != len(two):
        raise NotFoldable(
            "two layers of equal structure trace to graphs of different length",
            layers=f"{left.layer}, {right.layer}",
        )


def _carried_slots(bodies: dict[str, _Body], plan: LayerPlan) -> dict[str, int]:
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
            elif source in everything or _depends_on(source, everything):
                raise LayersNotChained("a layer reads more than the layer before it", layer=layer)
        before = layer
    for layer in plan.traced()[1:]:
        if plan.representative[layer] not in carried:
            raise LayersNotChained("a layer does not read the layer before it", layer=layer)
    _demand_same_context(bodies, plan, carried)
    return carried


def _demand_same_context(
    bodies: dict[str, _Body], plan: LayerPlan, carried: dict[str, int]
) -> None:
    for layer, first in plan.twins().items():
        slot = carried.get(first)
        pairs = enumerate(zip(bodies[layer].inputs, bodies[first].inputs, strict=True))
        if any(place != slot and one is not two for place, (one, two) in pairs):
            raise NotFoldable("equal layers are called with different values", layer=layer)


def _depends_on(node: fx.Node, sources: set[fx.Node]) -> bool:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in sources:
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _call_layers(
    root: fx.Graph, plan: LayerPlan, bodies: dict[str, _Body], carried: dict[str, int]
) -> fx.Graph:
    """The root anew, each run of layer nodes replaced by calls of all layers."""
    owner = {node: layer for layer, body in bodies.items() for node in body.nodes}
    traced = plan.traced()
    last = bodies[traced[-1]].result
    for layer in traced[:-1]:
        if any(user not in owner for user in bodies[layer].result.users):
            raise LayersNotChained("a value between layers is used after them", layer=layer)
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    running: fx.Node | None = None
    for node in root.nodes:
        if node not in owner:
            made[node] = new.node_copy(node, lambda n: made[n])
            made[node].meta = dict(node.meta)
        elif running is None and node.op == "call_function":
            running = _emit_calls(new, made, plan, bodies, carried)
            made[last] = running
    _drop_unused_sizes(new)
    return new


def _emit_calls(
    new: fx.Graph,
    made: dict[fx.Node, fx.Node],
    plan: LayerPlan,
    bodies: dict[str, _Body],
    carried: dict[str, int],
) -> fx.Node:
    running: fx.Node | None = None
    results = {body.result for body in bodies.values()}
    for layer in plan.layers:
        first = plan.representative[layer]
        body = bodies[first]
        slot = carried.get(first)
        for source in body.inputs:
            if source not in made and source not in results:
                raise LayersNotChained("a layer reads what is made between layers", layer=layer)
        args = [
            running if place == slot and running is not None else made[source]
            for place, source in enumerate(body.inputs)
        ]
        running = new.call_module(layer, tuple(args))
        running.meta.update(
            val=body.result.meta["val"], path=layer, source="", role="backbone", jobs=()
        )
    assert running is not None
    return running


def _drop_unused_sizes(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
