"""Nano-batches of the layers of a Shared Super-Model; their number may change at any time.

Each number is a variant: another root over the same layers, tensors and adapters. A variant is
made, and compiled as the model is, when it is first asked for, and kept.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

from tlora_fx.errors import NanoBatchesWrong
from tlora_fx.ir.graph import Block, GroupGraph, copy_graph, is_writing, placeholders
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.compiled import compile_method, row_sizes
from tlora_fx.model.module_builder import Container, build_module
from tlora_fx.model.source import group_source
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.parallel import remember_starts
from tlora_fx.passes.nano_batch import NanoBatch
from tlora_fx.pipeline import Pipeline, Runner
from tlora_fx.pipeline.instrument import Event

# Regions of a nano-batched model: consecutive layers of all nano-batches, compiled as one graph.
#
# A collective at the end of a layer hides behind another nano-batch's next layer only where both
# lie in one graph. Equal regions share code, as equal layers do.

REGIONS = "regions"
LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class NanoRegion:
    """Path of a region, the layers that it runs, and what each input is to a layer.

    inputs   for each input (a layer's path, the name that the layer's code has for it)
    """

    path: str
    layers: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]


def nano_batched(group: GroupGraph, count: int) -> GroupGraph:
    """A copy of a fused group that runs layers on nano-batches; graphs that stay are shared.

    raises    NotNanoBatchable
    """
    copy = replace(
        group,
        root=copy_graph(group.root),
        blocks={name: replace(block) for name, block in group.blocks.items()},
        notes=list(group.notes),
        facts=dict(group.facts),
    )
    Runner(Pipeline(())).run_one(Event(1, NanoBatch(count), "group", copy))
    return copy


def outline_regions(group: GroupGraph, count: int, layers: int) -> list[NanoRegion]:
    """Replace the calls of so many consecutive layers by the call of a region, all along the root.

    group     as `nano_batched` made it
    returns   the regions in order; their code is among the group's blocks
    """
    known: dict[Hashable, str] = {}
    regions = []
    for index, calls in enumerate(list(_runs(group, count, layers))):
        piece = _Piece(group, calls, count)
        path = f"{REGIONS}.{index}"
        name = known.setdefault(piece.key, f"region_{len(known)}")
        instances = group.blocks[name].instances if name in group.blocks else ()
        group.blocks[name] = Block(name, piece.graph, (*instances, path))
        piece.call(path)
        regions.append(NanoRegion(path, piece.layers, tuple(piece.names)))
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
        order = {node: index for index, node in enumerate((*self.inputs, *calls))}
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
            for index, call in enumerate(self.results):
                item = root.call_function(operator.getitem, (made, index))
                item.meta.update(tags, val=values[index], path=path, source="")
                call.replace_all_uses_with(item)
        for call in reversed(self.calls):
            root.erase_node(call)


# Order what a process does so that it computes while its collectives run.
#
# A list schedule: a collective starts as soon as what it sends is there; then comes any
# computation whose inputs are there, first what leads to further collectives; only where nothing
# else is left does the process wait, for the collective that started first.


Kind = Literal["compute", "start", "wait"]


class ScheduledTask(NamedTuple):
    """One step of a process.

    kind      a computation, the start of a collective, or the wait for one
    needs     indices of earlier tasks that must have run
    """

    kind: Kind
    needs: frozenset[int] = frozenset()


def list_schedule(tasks: Sequence[ScheduledTask]) -> list[int]:
    """The order in which tasks hide their communication best.

    tasks     in an order in which they may run
    returns   indices of the tasks, each after what it needs
    """
    missing = [len(task.needs) for task in tasks]
    users: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for need in task.needs:
            users[need].append(index)
    urgent = _leads_to_start(tasks)
    # By task: where in its kind it comes. Waits are in the order of what they wait for.
    turn = list(range(len(tasks)))

    def ranked(index: int) -> tuple[int, int, int]:
        kind = tasks[index].kind
        compute = 1 if urgent[index] else 2
        return {"start": 0, "compute": compute, "wait": 3}[kind], turn[index], index

    ready = [ranked(index) for index, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        *_, index = heappop(ready)
        order.append(index)
        for user in users[index]:
            if tasks[index].kind == "start" and tasks[user].kind == "wait":
                turn[user] = len(order)
            missing[user] -= 1
            if not missing[user]:
                heappush(ready, ranked(user))
    assert len(order) == len(tasks), "tasks need each other"
    return order


def _leads_to_start(tasks: Sequence[ScheduledTask]) -> list[bool]:
    """For each task whether a start needs it."""
    found = [task.kind == "start" for task in tasks]
    for index in reversed(range(len(tasks))):
        if found[index]:
            for need in tasks[index].needs:
                found[need] = True
    return found


# The overlap schedule of an fx graph, forward or backward, and where the compiler takes it.
#
# Works on the graphs that AOT autograd makes, where a collective is two nodes: one of
# `_c10d_functional` that starts it, and `wait_tensor`.

WAIT = "_c10d_functional::wait_tensor"
INDUCTOR = "inductor"
POST_GRAD = "post_grad_custom_post_pass"


def schedule_graph(graph: fx.Graph) -> None:
    """Reorder a graph in place; results, names and arguments stay."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    tasks = _tasks(nodes)
    order = list_schedule(tasks)
    if order == list(range(len(tasks))) or not any(task.kind == "start" for task in tasks):
        return
    output = graph.output_node()
    for index in order:
        if nodes[index].op != "placeholder":
            output.prepend(nodes[index])
    graph.lint()


def _tasks(nodes: Sequence[fx.Node]) -> list[ScheduledTask]:
    """The nodes of a graph as tasks."""
    indices = {node: index for index, node in enumerate(nodes)}
    extra = _order_of_effects(nodes)
    tasks = []
    for node in nodes:
        needs = frozenset(indices[source] for source in (*node.all_input_nodes, *extra[node]))
        tasks.append(ScheduledTask(kind_of(node), needs))
    return tasks


def kind_of(node: fx.Node) -> Kind:
    """Whether a node starts a collective, waits for one, or computes."""
    name = _schema_name(node)
    if name == WAIT:
        return "wait"
    return "start" if name.startswith("_c10d_functional::") else "compute"


def _schema_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return "" if schema is None else str(schema.name)


def _homes(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory its value lies in: itself, or what it is a view of."""
    homes: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _viewed(node)
        homes[node] = node if source is None else homes[source]
    return homes


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    first = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    if node.target is operator.getitem or _schema_name(node) == WAIT:
        return first
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return None
    for index, argument in enumerate(schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(given, fx.Node):
            return given
    return None


def _order_of_effects(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What each node must come after besides its inputs.

    Random draws and what has effects keep their order; what writes into a value comes after all
    that read it before, and before all that read it later.
    """
    homes = _homes(nodes)
    after: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    last_effect: fx.Node | None = None
    written: dict[fx.Node, fx.Node] = {}
    touched: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if _has_effect(node):
            after[node] += [last_effect] if last_effect is not None else []
            last_effect = node
        for source in node.all_input_nodes:
            home = homes[source]
            if home in written:
                after[node].append(written[home])
            if is_writing(node):
                after[node] += touched.get(home, [])
                written[home] = node
            touched.setdefault(home, []).append(node)
        after[node] = [other for other in after[node] if other is not node]
    return after


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "call_module"
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or (
        not isinstance(node.target, torch._ops.OpOverload) and node.is_impure()
    )


class OverlapPass(CustomGraphPass):
    """The schedule as a pass of Inductor, for the forward and for the backward graph.

    first   a pass of the user's own, which runs before it
    """

    def __init__(self, first: CustomGraphPass | None = None) -> None:
        self.first = first

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder a graph."""
        if self.first is not None:
            self.first(graph)
        schedule_graph(graph)

    def uuid(self) -> Any:
        """Key of code that was compiled with this pass; None: it may not be kept."""
        theirs = "" if self.first is None else self.first.uuid()
        if theirs is None:
            return None
        return hashlib.sha256(Path(__file__).read_bytes() + str(theirs).encode()).hexdigest()


def inductor_options(first: CustomGraphPass | None = None) -> dict[str, Any]:
    """`options` of `torch.compile` under which Inductor takes the schedule and leaves it so.

    first   a pass of the user's own, which runs before it
    """
    return {
        POST_GRAD: OverlapPass(first),
        "reorder_for_compute_comm_overlap": False,
        "reorder_for_peak_memory": False,
    }


def region_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """How to compile regions of a model that was compiled in a certain way.

    Another backend than Inductor compiles them as it is. Inductor takes the schedule too, beside
    all that it was asked for; what was asked for stands before what keeps the schedule as it is.

    given     what `torch.compile` was given for the model
    returns   the same for its regions
    """
    made = {name: value for name, value in given.items() if value is not None}
    if made.get("backend", INDUCTOR) != INDUCTOR:
        return made
    # torch takes a mode or options, and a mode is nothing but options.
    asked = dict(list_mode_options(made.pop("mode", "default"), made.get("dynamic")))
    asked |= {name.replace("-", "_"): value for name, value in made.pop("options", {}).items()}
    first = asked.pop(POST_GRAD, None)
    return {**made, "options": {**inductor_options(first), **asked}}


# Each count is compiled once, so a run never meets more variants than these.
COUNTS = (1, 2, 3, 4, 6, 8)


class NanoModel:
    """Cuts the rows of a model into nano-batches, also where others call the model.

    model     with its weights
    layers    consecutive layers that are compiled as one graph
    count     nano-batches of the next rows; a row of fewer sequences is cut into fewer
    """

    def __init__(self, model: SuperModel, *, layers: int = 2) -> None:
        self.model = model
        self.layers = max(1, layers)
        self.count = 1
        self._variants: dict[int, nn.Module] = {}
        self._compiled_with: Mapping[str, Any] | None = None
        self._starts = list(placeholders(model.group.root)).index("cu_seqlens")
        # An instance's own attribute stands before its class's method.
        model.__dict__["_run"] = self._run

    def moved(self, row: PackedBatch, device: torch.device | str) -> PackedBatch:
        """A row on a device, whose cuts need not be read back from there.

        row      on the CPU
        """
        made = row.to(device)
        if made.cu_seqlens is not row.cu_seqlens:
            remember_starts(made.cu_seqlens, row.cu_seqlens)
        return made

    def count_for(self, sequences: int) -> int:
        """Into how many nano-batches a row of so many sequences is cut.

        raises    NanoBatchesWrong for a count that is not in COUNTS
        """
        if self.count not in COUNTS:
            raise NanoBatchesWrong(
                "there is no such number of nano-batches",
                expected=", ".join(map(str, COUNTS)),
                found=self.count,
            )
        most = max(1, min(self.count, sequences))
        return max(count for count in COUNTS if count <= most)

    def _run(self, *inputs: Tensor) -> Tensor:
        """What the model runs in place of its own root."""
        count = self.count_for(len(inputs[self._starts]) - 1)
        root = self.model.net if count == 1 else self._variant(count)
        return cast(Tensor, root(*inputs))

    def _variant(self, count: int) -> nn.Module:
        if self.model.compiled_with is not self._compiled_with:
            self._compiled_with = self.model.compiled_with
            self._variants.clear()
        if count not in self._variants:
            self._variants[count] = self._cloned(nano_batched(self.model.group, count), count)
        return self._variants[count]

    def _cloned(self, group: GroupGraph, count: int) -> nn.Module:
        regions = outline_regions(group, count, self.layers)
        # A new root over the model's modules, with the regions that it calls.
        root = build_module(group, group_source(group, self.model.backbone.title)).net
        made = root._modules[REGIONS]
        _share(root, self.model.net)
        root._modules = {**root._modules, REGIONS: made}
        for region in regions:
            inner = Container()
            for index, path in enumerate(region.layers):
                inner.add_module(str(index), self.model.net.get_submodule(path))
            root.get_submodule(region.path).add_module(LAYERS, inner)
        if self._compiled_with is not None:
            options = region_options(self._compiled_with)
            _compile_regions(root, group, regions, options)
        return root


def _share(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the very tensors and children of another."""
    module._modules, module._parameters = other._modules, other._parameters
    module._buffers = other._buffers


def _compile_regions(
    root: nn.Module, group: GroupGraph, regions: Sequence[NanoRegion], options: Mapping[str, Any]
) -> None:
    """Compile each structure of regions once."""
    by_path = {region.path: region for region in regions}
    sizes = {name: row_sizes(block.graph) for name, block in group.blocks.items()}
    for block in group.blocks.values():
        if block.instances[0] not in by_path:
            continue
        inputs = by_path[block.instances[0]].inputs
        dynamic = [sizes[group.block_of(layer).name][name] for layer, name in inputs]
        owners = [root.get_submodule(path) for path in block.instances]
        compile_method(owners, "forward", dynamic, dict(options))
