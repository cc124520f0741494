"""The overlap schedule of an fx graph, forward or backward, and where the compiler takes it.

Works on the graphs that AOT autograd makes, where a collective is two nodes: one of
`_c10d_functional` that starts it, and `wait_tensor`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

from tlora_fx.planners import overlap
from tlora_fx.planners.overlap import Kind, Task, list_schedule

WAIT = "_c10d_functional::wait_tensor"
INDUCTOR = "inductor"
POST_GRAD = "post_grad_custom_post_pass"
# What a size counts as where nobody knows it.
UNKNOWN_SIZE = 4096


def schedule_graph(graph: fx.Graph, limit_bytes: int | None = None) -> None:
    """Reorder a graph in place; results, names and arguments stay.

    limit_bytes   of values at any time, inputs that the caller keeps left out (see list_schedule)
    """
    tasks, nodes = graph_tasks(graph)
    order = list_schedule(tasks, limit_bytes)
    if order == list(range(len(tasks))) or not any(task.kind == "start" for task in tasks):
        return
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for place in order:
        if nodes[place].op != "placeholder":
            output.prepend(nodes[place])
    graph.lint()


def graph_tasks(graph: fx.Graph) -> tuple[list[Task], list[fx.Node]]:
    """The nodes of a graph as tasks, the output left out, and the nodes in the same order."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    places = {node: place for place, node in enumerate(nodes)}
    homes = _homes(nodes)
    extra = _order_of_effects(nodes, homes)
    results = {homes[node] for node in graph.output_node().all_input_nodes}
    tasks = []
    for node in nodes:
        own = homes[node] is node
        reads = {places[homes[source]] for source in node.all_input_nodes} - {places[node]}
        needs = {places[source] for source in (*node.all_input_nodes, *extra[node])}
        size = _bytes(node.meta.get("val")) if own and _is_counted(node) else 0
        kept = node in results or not _is_counted(node)
        tasks.append(Task(kind_of(node), frozenset(needs), size, frozenset(reads), kept))
    return tasks, nodes


def kind_of(node: fx.Node) -> Kind:
    """Whether a node starts a collective, waits for one, or computes."""
    name = _schema_name(node)
    if name == WAIT:
        return "wait"
    return "start" if name.startswith("_c10d_functional::") else "compute"


def _schema_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return "" if schema is None else str(schema.name)


def _is_counted(node: fx.Node) -> bool:
    """Whether a node's memory goes when nobody reads it; parameters and a caller's inputs stay."""
    if node.op == "get_attr":
        return False
    return node.op != "placeholder" or not str(node.target).startswith(("primals", "arg"))


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
    for place, argument in enumerate(schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(given, fx.Node):
            return given
    return None


def _order_of_effects(
    nodes: Sequence[fx.Node], homes: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """What each node must come after besides its inputs.

    Random draws and what has effects keep their order; what writes into a value comes after all
    that read it before, and before all that read it later.
    """
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
            if _writes(node):
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


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and bool(schema.is_mutable)


def _bytes(value: Any) -> int:
    return sum(
        _size(item.numel()) * item.element_size()
        for item in pytree.tree_leaves(value)
        if isinstance(item, Tensor)
    )


def _size(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    try:
        hint = size.node.hint
    except Exception:  # noqa: BLE001  (torch raises what it likes for sizes that nobody knows)
        hint = None
    return UNKNOWN_SIZE if hint is None else int(hint)


class OverlapPass(CustomGraphPass):
    """The schedule as a pass of Inductor, for the forward and for the backward graph.

    limit_bytes   as of `schedule_graph`
    first         a pass of the user's own, which runs before it
    """

    def __init__(
        self, limit_bytes: int | None = None, first: CustomGraphPass | None = None
    ) -> None:
        self.limit_bytes, self.first = limit_bytes, first

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder a graph."""
        if self.first is not None:
            self.first(graph)
        schedule_graph(graph, self.limit_bytes)

    def uuid(self) -> Any:
        """What code that was compiled with this pass is known by; None: it may not be kept."""
        code = b"".join(Path(str(file)).read_bytes() for file in (__file__, overlap.__file__))
        known = str(self.limit_bytes)
        if self.first is not None:
            theirs = self.first.uuid()
            if theirs is None:
                return None
            known += f" {theirs}"
        return hashlib.sha256(code + known.encode()).hexdigest()


def inductor_options(
    limit_bytes: int | None = None, first: CustomGraphPass | None = None
) -> dict[str, Any]:
    """`options` of `torch.compile` under which Inductor takes the schedule and leaves it so.

    first   a pass of the user's own, which runs before it
    """
    return {
        POST_GRAD: OverlapPass(limit_bytes, first),
        "reorder_for_compute_comm_overlap": False,
        "reorder_for_peak_memory": False,
    }


def region_options(given: Mapping[str, Any], limit_bytes: int | None = None) -> dict[str, Any]:
    """How to compile regions of a model that was compiled in a certain way.

    Another backend than Inductor compiles them as it is. Inductor takes the schedule too, beside
    all that it was asked for; what was asked for stands before what keeps the schedule as it is.

    given         what `torch.compile` was given for the model
    limit_bytes   as of `schedule_graph`
    returns       the same for its regions
    """
    made = {name: value for name, value in given.items() if value is not None}
    if made.get("backend", INDUCTOR) != INDUCTOR:
        return made
    # torch takes a mode or options, and a mode is nothing but options.
    asked = dict(list_mode_options(made.pop("mode", "default"), made.get("dynamic")))
    asked |= {name.replace("-", "_"): value for name, value in made.pop("options", {}).items()}
    first = asked.pop(POST_GRAD, None)
    return {**made, "options": {**inductor_options(limit_bytes, first), **asked}}


def eager_backend(
    limit_bytes: int | None = None, seen: list[fx.Graph] | None = None
) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs the scheduled graphs operator by operator.

    seen   takes every scheduled graph, forward and backward
    """

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        schedule_graph(module.graph, limit_bytes)
        module.recompile()
        if seen is not None:
            seen.append(module.graph)
        return make_boxed_func(module.forward)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        # As Inductor does; the default computes matrix products again whose sum is kept.
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend
