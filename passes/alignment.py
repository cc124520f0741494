"""Line a job's graph up with its base's graph.

Module paths guide the search; operators and arguments decide. A job's node is the twin of a base
node when it applies the same operator to values that stand for the same base values. Where PEFT
wrapped a module, the wrapper's result stands for the module's result. The job's graph then is the
base's graph with some values replaced by branches, or the alignment fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.errors import FusionError
from tlora_fx.ir.graph import TensorRef, output_of, under


@dataclass(slots=True)
class Branch:
    """What a job computes instead of one base value.

    anchor   the base node whose value the branch replaces
    site     path of the wrapped module
    nodes    the job's own nodes, in order
    result   the job's node that stands for the anchor
    """

    anchor: fx.Node
    site: str
    nodes: list[fx.Node]
    result: fx.Node


@dataclass(slots=True)
class Alignment:
    """How one graph of a job lies over the base's.

    twins      job node to the base node that it repeats
    stands     job node to the base node that it stands for downstream
    branches   in the order of their anchors
    missing    base nodes that the job does not compute
    """

    twins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    stands: dict[fx.Node, fx.Node] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    missing: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Side:
    """One graph to align, and the constants that it reads."""

    graph: fx.Graph
    constants: dict[str, Tensor]


def align(
    base: Side, job: Side, inputs: dict[fx.Node, fx.Node], sites: Iterable[str], subject: str
) -> Alignment:
    """Line a job's graph up with the base's.

    inputs    the job's placeholders to the base's
    sites     paths of modules that PEFT wrapped, as the graphs name them
    subject   whose graph it is, for errors
    raises    FusionError naming the first job node that stands for nothing
    """
    anchors = _anchors(base.graph, job.graph, sites)
    replaced = {anchor for anchor, _ in anchors.values()}
    index: dict[Hashable, list[fx.Node]] = {}
    for node in base.graph.nodes:
        index.setdefault(_key(node, {n: n for n in node.all_input_nodes}, base), []).append(node)
    found = Alignment()
    for node in job.graph.nodes:
        twin = _twin(node, inputs, index, found, job)
        if twin is not None:
            found.twins[node] = twin
            if twin not in replaced:
                found.stands[node] = twin
        if node in anchors:
            found.stands[node] = anchors[node][0]
    _demand_same_result(base.graph, job.graph, found, subject)
    _cut_branches(anchors, job.graph, found)
    done = set(found.twins.values())
    found.missing = [n for n in base.graph.nodes if n not in done and n.op == "call_function"]
    return found


def _anchors(
    base: fx.Graph, job: fx.Graph, sites: Iterable[str]
) -> dict[fx.Node, tuple[fx.Node, str]]:
    """The job's node and the base's node that are the result of each wrapped module."""
    anchors = {}
    for site in sites:
        mine, theirs = _results(job, site), _results(base, site)
        if len(mine) == 1 and len(theirs) == 1:
            anchors[mine[0]] = (theirs[0], site)
    return anchors


def _results(graph: fx.Graph, module: str) -> list[fx.Node]:
    """Nodes of a module that others use."""
    inside = [
        node
        for node in graph.nodes
        if node.op == "call_function" and under(node.meta.get("path", ""), module)
    ]
    members = set(inside)
    return [node for node in inside if any(user not in members for user in node.users)]


def _twin(
    node: fx.Node,
    inputs: dict[fx.Node, fx.Node],
    index: dict[Hashable, list[fx.Node]],
    found: Alignment,
    job: Side,
) -> fx.Node | None:
    if node.op == "placeholder":
        return inputs.get(node)
    if node.op == "output":
        return None
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef) and ref.owner == "job":
        return None
    if any(source not in found.stands for source in node.all_input_nodes):
        return None
    candidates = index.get(_key(node, found.stands, job), [])
    return candidates.pop(0) if candidates else None


def _key(node: fx.Node, stands: dict[fx.Node, fx.Node], side: Side) -> Hashable:
    """Operator, module and arguments; arguments as the base nodes that they stand for."""
    if node.op in ("placeholder", "output"):
        return (node.op, node.name)
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef):
        return (
            ref.owner,
            _content(side.constants[ref.name]) if ref.owner == "constant" else ref.name,
        )
    path = ".".join(name for name in node.meta.get("path", "").split(".") if name != "base_layer")
    named: Any = lambda n: _Named(id(stands[n]))  # noqa: E731  (fx types map_arg too narrowly)
    args, kwargs = fx.map_arg((node.args, node.kwargs), named)
    return (node.op, str(node.target), path, str(args), str(kwargs))


@dataclass(frozen=True, slots=True)
class _Named:
    """A base node inside an argument list, by identity."""

    number: int


def _content(value: Tensor) -> Hashable:
    return (
        str(value.dtype),
        tuple(value.shape),
        bytes(value.contiguous().view(-1).view(torch.uint8)),
    )


def _demand_same_result(base: fx.Graph, job: fx.Graph, found: Alignment, subject: str) -> None:
    result, expected = output_of(job).args[0], output_of(base).args[0]
    if isinstance(result, fx.Node) and found.stands.get(result) is expected:
        return
    strangers = [
        node
        for node in job.nodes
        if node.op == "call_function"
        and node not in found.stands
        and node.meta.get("role") != "adapter"
        and node not in found.twins
    ]
    first = strangers[0] if strangers else result
    raise FusionError(
        f"the graph of {subject} does not line up with its base's",
        node=first.format_node() if isinstance(first, fx.Node) else first,
        module=first.meta.get("path") if isinstance(first, fx.Node) else None,
        source=first.meta.get("source") if isinstance(first, fx.Node) else None,
        help="the job changes more of the base than its adapters; train it in a group of its own",
    )


def _cut_branches(
    anchors: dict[fx.Node, tuple[fx.Node, str]], job: fx.Graph, found: Alignment
) -> None:
    order = {node: place for place, node in enumerate(job.nodes)}
    for result, (anchor, site) in sorted(anchors.items(), key=lambda item: order[item[0]]):
        if found.twins.get(result) is anchor:
            continue
        members = {result}
        stack = [result]
        while stack:
            for source in stack.pop().all_input_nodes:
                known = source in found.twins or source in found.stands
                if not known and source not in members:
                    members.add(source)
                    stack.append(source)
        found.branches.append(Branch(anchor, site, sorted(members, key=order.__getitem__), result))
