"""The graphs that passes read and write.

A `JobGraph` is one job's model over one row, up to the logits. A `GroupGraph` holds the graphs of
several jobs on one base and the fused graph that passes make of them. Both are plain
`torch.fx.Graph`s: a root, and blocks that equal layers share.

What passes know of a node stands in `node.meta`:

path      module path in the base's own naming ("model.layers.0.self_attn.q_proj")
tensor    `TensorRef`, on get_attr nodes: who owns the tensor, its name, shape and dtype
val       fake tensor or symbolic int: shape and dtype
run       what the operator was given when it made `val` (shapes.py)
source    the line of model code that the node comes from
role      "backbone", "adapter", "shared", "table" or "loss"
jobs      names of the jobs that the node serves
site      on adapter nodes: path of the frozen module that the adapter sits on
part      on plain LoRA nodes: "a", "b", "dropout", "scale" or "sum"
origin    `Origin`: which pass made the node, and from which nodes
notes     what passes noted of it (`note`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

import networkx as nx
import torch
from torch import fx

Form = Literal["packed", "batch"]

# What a row brings besides ids and positions; every graph takes them in this order (see batch.py).
TABLES = ("cu_seqlens", "max_seqlen", "segments", "token_index", "keys")
INPUTS = ("input_ids", "position_ids", *TABLES)

# How a tensor is cut: the dimension, the number of pieces, and the sizes, in the whole tensor, of
# the parts that lie one after the other along it and are cut each by itself, such as q, k and v;
# () where a piece is a single run.
Pieces = tuple[int, int, tuple[int, ...]]

# Paths of the blocks that the loss is computed by.
HEAD = "head"
LOSS = "loss"
# What PEFT puts before the paths of a base's modules.
PEFT_PREFIX = "base_model.model."
# The module that a router's product with its weight becomes, inside the router.
ROUTER_PRODUCT = "router_logits"
# Kinds of sites whose adapters PEFT keeps as adapters of parameters: the matrices of all experts, a
# router's weight, a linear's weight.
ON_PARAMETERS = ("experts", "router", "parameter")
# Tags of nodes, and who made what was traced.
ORIGIN = "origin"
MADE_FROM = "made_from"
TRACE = "trace"
# Who notes that a part of a job's adapter does nothing; `train` warns of these.
IDLE = "adapters"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that a graph reads.

    owner      "base" (frozen, shared by all jobs), "job" (trained by one job), "constant" (a value
               lifted out of model code), "buffer" (a table that a pass made)
    name       canonical name in the base, PEFT's name in the job's model, or the constant's name;
               relative to the layer inside a block
    form       for a frozen tensor that is stored in another form: the function that makes it of
               the base's, "module:name" (storage.py)
    originals  those tensors as the base has them, in the order in which the function takes them
    shard      how it is cut where each process holds one piece; `shape` is then a piece's
    """

    owner: Literal["base", "job", "constant", "buffer"]
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str = ""
    originals: tuple[TensorRef, ...] = ()
    shard: Pieces | None = None


@dataclass(slots=True)
class Block:
    """Code that equal layers share; each instance owns its tensors.

    name        name of the block, a Python identifier
    graph       placeholders are the layer's inputs, get_attr targets are relative to the layer
    instances   module paths of the layers, in the order in which they run
    recompute   inner values are computed again in the backward, not kept
    budget      bytes of inner values that are kept for the backward, over those that would be
    joint       passes of the joint graph, as pipelines write them, each with its module
    """

    name: str
    graph: fx.Graph
    instances: tuple[str, ...]
    recompute: bool = False
    budget: float = 1.0
    joint: tuple[tuple[str, str], ...] = ()

    @property
    def is_staged(self) -> bool:
        """Whether its joint graph is rewritten, or cut by a budget."""
        return self.budget < 1 or bool(self.joint)


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """One job's LoRA adapter on one frozen module.

    path      module path in the base
    rank      r of this site, after rank_pattern
    scaling   what the branch is multiplied with, after alpha_pattern and use_rslora
    dropout   rate, 0 where there is none
    kind      "lora", or what makes it another structure: "dora", "embedding", "bias", ...
              of ON_PARAMETERS: what PEFT adapts by `target_parameters`
    depth     of kind "experts", whose path is a parameter's: how many of PEFT's wrappers lie around
              that of this parameter
    """

    path: str
    rank: int
    scaling: float
    dropout: float
    kind: str = "lora"
    depth: int = 0

    @property
    def wrapper(self) -> str:
        """Path of the module that PEFT keeps A and B in."""
        if self.kind == "router":
            return self.path.removesuffix(f".{ROUTER_PRODUCT}")
        if self.kind != "experts":
            return self.path
        return self.path.rpartition(".")[0] + ".base_layer" * self.depth

    @property
    def pattern_path(self) -> str:
        """Path that the keys of rank_pattern and alpha_pattern are matched with."""
        return f"{self.wrapper}.weight" if self.kind in ("router", "parameter") else self.path


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Layers of a model that are equal, and those that stand for them while tracing.

    layers            all layer paths, in the order in which they run
    representative    for each layer the traced layer that stands for it
    whole             every layer is traced and compared, for code that nobody vouches for
    """

    layers: tuple[str, ...]
    representative: dict[str, str]
    whole: bool = False

    def traced(self) -> list[str]:
        """The layers that are built and traced, in order."""
        kept = set(self.representative.values()) | set(self.twins())
        return [layer for layer in self.layers if layer in kept]

    def twins(self) -> dict[str, str]:
        """Map from other traced layers to the first of their structure, with which they must agree.

        One of each structure that has two layers; in a whole plan all.
        """
        twins: dict[str, str] = {}
        for layer, first in self.representative.items():
            if layer != first and (self.whole or first not in twins.values()):
                twins[layer] = first
        return twins


@dataclass(slots=True)
class JobGraph:
    """One job's model, or the base's alone, over one row, up to the logits.

    root        inputs INPUTS, output the logits [1, T, V] (batch form [B, S, V])
    blocks      folded layers by block name; the root calls them by layer path
    sites       the job's adapters by module path, for all layers, traced or not
    constants   values lifted out of model code
    notes       what passes want reported: (pass name, sentence)
    repeated    paths of the modules that run more than once
    facts       what holds of the graphs, and the pass that provides it, as pipelines spell it
    """

    name: str
    root: fx.Graph
    form: Form
    plan: LayerPlan | None = None
    blocks: dict[str, Block] = field(default_factory=dict)
    sites: dict[str, AdapterSite] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    repeated: frozenset[str] = frozenset()
    facts: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"JobGraph({self.name!r}, {self.form} rows, {_counted(self)})"

    def graphs(self) -> Iterator[fx.Graph]:
        """The root and every block's graph."""
        yield self.root
        for block in self.blocks.values():
            yield block.graph

    @property
    def subject(self) -> str:
        """Whose graphs these are: "base" or "job NAME"."""
        return f"job {self.name}" if self.name else "base"

    @property
    def vocabulary(self) -> int:
        """Number of token ids: the last dimension of the logits."""
        logits: Any = output_of(self.root).args[0]
        return int(logits.meta["val"].shape[-1])

    def for_job(self, name: str, sites: dict[str, AdapterSite]) -> JobGraph:
        """The same structure for another job whose sites differ in rank, scaling and rate only."""
        facts = dict(self.facts)
        return replace(self, name=name, sites=sites, notes=list(self.notes), facts=facts)


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """Capacity that a Shared Super-Model keeps free for jobs that come later.

    sites     modules that they may adapt, as PEFT's `target_modules`; those that no job adapts are
              lowered all the same
    rows      of each site's bank: the ranks of all jobs together, each a multiple of 8
    jobs      slots
    rank      the largest that a job may have at a site, a multiple of 8
    dropout   whether jobs may drop; False spares the backward a mask
    """

    sites: str | tuple[str, ...] = "all-linear"
    rows: int = 128
    jobs: int = 16
    rank: int = 32
    dropout: bool = True


@dataclass(slots=True)
class GroupGraph:
    """Jobs on one base, and the Shared Super-Model that group passes make of them.

    root        inputs INPUTS, output the logits; after lower-loss each job's loss sum [J]
    blocks      fused layers by name
    constants   values lifted out of model code, by the name that get_attr nodes give
    exact       branches carry each job's own numbers, so any of them may run as it is
    compute     dtype in which adapters multiply: "base", or "float32" as PEFT does
    open        slots for jobs that come and go; None: these jobs stay
    facts       what holds of the graphs, and the pass that provides it, as pipelines spell it
    """

    subject: ClassVar[str] = "group"

    base: JobGraph
    jobs: list[JobGraph]
    exact: bool = False
    compute: str = "base"
    root: fx.Graph = field(default_factory=fx.Graph)
    blocks: dict[str, Block] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    open: OpenSlots | None = None

    def __post_init__(self) -> None:
        self.constants.update(self.base.constants)

    def __repr__(self) -> str:
        stage = "fused" if self.fused else "not fused"
        return f"GroupGraph({self.job_names}, {self.form} rows, {stage}, {_counted(self)})"

    @property
    def form(self) -> Form:
        """Packed rows, or padded batches."""
        return self.base.form

    @property
    def fused(self) -> bool:
        """Whether the jobs are one graph already; until then each has its own."""
        return len(self.root.nodes) > 0

    @property
    def job_names(self) -> list[str]:
        """The jobs, in the order of every table."""
        return [job.name for job in self.jobs]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.base.vocabulary

    def graphs(self) -> Iterator[fx.Graph]:
        """The root and every block's graph."""
        yield self.root
        for block in self.blocks.values():
            yield block.graph

    def block_of(self, layer: str) -> Block:
        """The block that the layer at this path runs."""
        return next(block for block in self.blocks.values() if layer in block.instances)


def placeholders(graph: fx.Graph) -> dict[str, fx.Node]:
    """The inputs of a graph by name."""
    return {str(node.target): node for node in graph.nodes if node.op == "placeholder"}


def output_of(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    output: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return output


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph's nodes anew, each with a copy of its meta."""
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    return copied


def is_call(node: fx.Node, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    return node.op == "call_function" and node.target in targets


def is_writing(node: fx.Node) -> bool:
    """Whether a node calls an operator that writes into what it reads."""
    schema = getattr(node.target, "_schema", None)
    return isinstance(schema, torch.FunctionSchema) and bool(schema.is_mutable)


# Stands for the default of an argument that must be given.
REQUIRED: Any = object()


@cache
def parameters_of(target: Any) -> dict[str, Any] | None:
    """Names and defaults of an operator's arguments, None for a callable without a schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return {
        argument.name: argument.default_value if argument.has_default_value() else REQUIRED
        for argument in schema.arguments
    }


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call, by name, defaults too; "0", "1", … where there is no schema.

    `linear(x, w)`, `linear(x, w, None)` and `linear(x, weight=w)` are alike.
    """
    known = parameters_of(node.target)
    if known is None:
        return {**{str(index): arg for index, arg in enumerate(node.args)}, **node.kwargs}
    return {**known, **dict(zip(known, node.args, strict=False)), **node.kwargs}


def behind(
    nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """Nodes, and all that they depend on.

    ends    at which nodes the way back stops; these are among the result
    """
    reached: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left.extend(() if ends(node) else node.all_input_nodes)
    return reached


def digraph(graph: fx.Graph) -> nx.DiGraph:
    """Graph of which node reads which, for networkx; the output is left out."""
    readers = nx.DiGraph()
    for node in graph.nodes:
        if node.op != "output":
            readers.add_node(node)
            readers.add_edges_from((source, node) for source in node.all_input_nodes)
    return readers


def _counted(graphs: JobGraph | GroupGraph) -> str:
    nodes = sum(len(graph.nodes) for graph in graphs.graphs())
    return f"{nodes} nodes, blocks {[*graphs.blocks]}"


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The (symbolic) shape of a node's value, None where it is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def note(node: fx.Node, key: str, value: str | float | bool) -> fx.Node:
    """Note something of a node, which listings, JSON, the page and networkx show; returns the node.

    key      a word or a few, such as "estimated ms"
    value    a number or a text; the last one noted under a key counts
    """
    node.meta["notes"] = {**(node.meta.get("notes") or {}), key: value}
    return node


def under(path: str, parent: str) -> bool:
    """Whether a module path is the parent or lies inside it."""
    return path == parent or path.startswith(parent + ".")


# Where nodes come from: which pass made a node, and from which nodes.
#
# An `Origin` stays the same while its node survives, also where a pass copies the node into another
# graph. A pass that makes a node of others says so with `derive`; what it does not say, `record`
# fills in after the pass.


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The birth of a node.

    key        unique among the nodes of a graph and its blocks, such as
               "base/model.layers.0.mlp.up_proj:linear", "job a/...:linear#2"
    made_by    "trace", or the name of a pass
    target     what the node called
    sources    what it was made from
    """

    key: str
    made_by: str
    target: str
    sources: tuple[Origin, ...] = ()


def origin_of(node: fx.Node) -> Origin | None:
    """The origin of a node, None before it was recorded."""
    origin: Origin | None = node.meta.get(ORIGIN)
    return origin


def derive(node: fx.Node, *sources: fx.Node) -> fx.Node:
    """Say that a node was made from others; returns the node."""
    node.meta[MADE_FROM] = tuple(sources)
    return node


def ancestry(origin: Origin) -> Iterator[Origin]:
    """All origins behind one, nearest first, each once."""
    seen = {id(origin)}
    stack = list(reversed(origin.sources))
    while stack:
        ancestor = stack.pop()
        if id(ancestor) not in seen:
            seen.add(id(ancestor))
            yield ancestor
            stack.extend(reversed(ancestor.sources))


def record(graphs: Iterable[tuple[str, fx.Graph]], made_by: str, owner: str) -> None:
    """Give every node an origin of its own.

    graphs     name of each graph (a block's, "" for the root) and the graph
    made_by    the pass that ran, or "trace"
    owner      "base", "job NAME" or "group"
    """
    taken: set[str] = set()
    fresh: list[tuple[str, fx.Node]] = []
    for where, graph in graphs:
        for node in graph.nodes:
            origin = node.meta.get(ORIGIN)
            if origin is None or origin.key in taken or _is_new(node, origin):
                fresh.append((where, node))
            else:
                taken.add(origin.key)
    for where, node in fresh:
        sources = tuple(dict.fromkeys(_sources(node)))
        before = {item.key for source in sources for item in (source, *ancestry(source))}
        key = _key(node, owner, "" if made_by == TRACE else where, taken, before)
        taken.add(key)
        node.meta[ORIGIN] = Origin(key, made_by, str(node.target), sources)
    for _, node in fresh:
        node.meta.pop(MADE_FROM, None)


def _sources(node: fx.Node) -> Iterator[Origin]:
    """What a new node was made from; through nodes that the same pass made and dropped again."""
    if MADE_FROM not in node.meta:
        before = origin_of(node)
        yield from () if before is None else (before,)
        return
    for source in node.meta[MADE_FROM]:
        known = origin_of(source)
        if known is not None:
            yield known
        else:
            yield from _sources(source)


def _is_new(node: fx.Node, origin: Origin) -> bool:
    """Whether the pass said what it made the node from, or made it call something else."""
    return MADE_FROM in node.meta or (
        node.op == "call_function" and str(node.target) != origin.target
    )


def _key(node: fx.Node, owner: str, where: str, taken: set[str], before: set[str]) -> str:
    """A key that no node of the graphs has, nor any that this one was made from."""
    jobs: tuple[str, ...] = tuple(node.meta.get("jobs") or ())
    if owner == "group" and node.meta.get("role") == "adapter" and len(jobs) == 1:
        owner = f"job {jobs[0]}"
    target: Any = node.target
    called = str(target)
    if node.op == "call_function":
        called = str(getattr(target, "__name__", target)).partition(".")[0]
    path = ".".join(part for part in (where, str(node.meta.get("path") or "")) if part)
    plain = re.sub(r"\s+", " ", f"{owner}/{path}:{called}")
    key, number = plain, 1
    while key in taken or key in before:
        number += 1
        key = f"{plain}#{number}"
    return key


# Slots of an open group: a job takes a vacant one's place in every graph.


def vacant(slot: int) -> str:
    """The name of a slot that no job is in; no job can be called so."""
    return f"free slot {slot}"


def rename_job(group: GroupGraph, slot: int, name: str, sites: dict[str, AdapterSite]) -> None:
    """Put another job, or nobody, into a slot.

    name     the job's, or `vacant(slot)`
    sites    its adapters
    """
    old, group.jobs[slot] = group.jobs[slot].name, group.jobs[slot].for_job(name, sites)
    for graph in group.graphs():
        for node in graph.nodes:
            jobs: tuple[str, ...] = node.meta.get("jobs") or ()
            if old in jobs:
                node.meta["jobs"] = tuple(name if job == old else job for job in jobs)
            branches: dict[str, Any] = node.meta.get("branches") or {}
            if old in branches:
                node.meta["branches"] = {
                    name if job == old else job: branch for job, branch in branches.items()
                }
