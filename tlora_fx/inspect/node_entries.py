"""Make the node-level data of graphs: what `program.json` and every view of single nodes is of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.inspect.cost import Cost, short_name, total
from tlora_fx.inspect.flops import first_tensor
from tlora_fx.inspect.meter import Meter
from tlora_fx.inspect.program import SCHEMA, Ancestor, GraphEntry, NodeEntry, Program
from tlora_fx.inspect.rows import is_branch
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    Block,
    GroupGraph,
    JobGraph,
    Origin,
    TensorRef,
    ancestry,
    origin_of,
    output_of,
    placeholders,
)
from tlora_fx.ir.lora_sites import lowered_site
from tlora_fx.ir.verifier import owners
from tlora_fx.model.source import SHORT, input_names, size_names, statements
from tlora_fx.version import __version__

KINDS = {
    "placeholder": "input", "get_attr": "tensor", "call_module": "layer", "output": "output",
}  # fmt: skip
NO_KERNEL = frozenset({"sym_size", "getitem", "dropout", "contiguous"})
# Sizes of tables, which have symbols of their own: N sequences, J jobs, R rows with a target.
TABLE_SIZES = {
    ("cu_seqlens", 0): "N+1", ("segments", 0): "J+1", ("keys", 0): "J", ("token_index", 1): "T",
}  # fmt: skip
TARGET_SHAPES = {"target_rows": ["R"], "targets": ["R"], "target_segments": ["J+1"]}
# Operations a logit: the largest, the difference, the exponential and the sum.
SOFTMAX = 4


def make_program(
    graphs: GroupGraph | JobGraph, state: str, base: str = "", known: Known | None = None
) -> Program:
    """All graphs of one state: the fused ones, or those of the base and of each structure of jobs.

    state    name of the pass that ran last, or "trace"
    base     as the job file names it
    known    costs that were counted before
    """
    parts = [make_part(owner, known) for owner in owners(graphs)]
    jobs = graphs.job_names if isinstance(graphs, GroupGraph) else [graphs.name] * bool(graphs.name)
    return join(parts, state, base, graphs.form, jobs)


@dataclass(frozen=True, slots=True)
class Part:
    """The graphs of one owner, and the origins behind their nodes."""

    graphs: list[GraphEntry]
    origins: list[Origin]


@dataclass(frozen=True, slots=True)
class Known:
    """Costs by form, kept from one state to the next."""

    costs: dict[str, dict[object, Cost]] = field(default_factory=dict)


def make_part(owner: GroupGraph | JobGraph, known: Known | None = None) -> Part:
    """The data of one owner's root and blocks."""
    maker = _Maker(owner, known or Known())
    graphs = [maker.graph("root", owner.root, (), {})]
    for block in owner.blocks.values():
        names = input_names(owner.root, block)
        graphs.append(maker.graph(block.name, block.graph, block.instances, names))
    return Part(graphs, maker.origins)


def join(parts: Iterable[Part], state: str, base: str, form: str, jobs: list[str]) -> Program:
    """One program of the graphs of several owners."""
    every = list(parts)
    graphs = [graph for part in every for graph in part.graphs]
    alive = {node.key for graph in graphs for node in graph.nodes}
    history: dict[str, Ancestor] = {}
    for origin in (origin for part in every for origin in part.origins):
        for past in ancestry(origin):
            if past.key not in alive and past.key not in history:
                history[past.key] = Ancestor(past.target, past.made_by, _keys(past))
    return Program(SCHEMA, __version__, base, state, form, jobs, graphs, history)


class _Maker:
    """Makes entries from the graphs of one owner."""

    def __init__(self, owner: GroupGraph | JobGraph, known: Known) -> None:
        self.owner = owner
        self.sizes = size_names(owner)
        self.meter = Meter(owner.form, self.sizes, known.costs.setdefault(owner.form, {}))
        self.share = 1 / len(owner.jobs) if isinstance(owner, GroupGraph) else 1.0
        self.name = whose(owner)
        self.names = {**_table_sizes(owner), **self.sizes}
        self.origins: list[Origin] = []

    def graph(
        self, name: str, graph: fx.Graph, layers: tuple[str, ...], inputs: dict[str, str]
    ) -> GraphEntry:
        """One graph; inputs say what its placeholders are called."""
        told = _with_tensors(statements(graph, self.sizes, inputs))
        nodes = [self._node(node, told, layers) for node in graph.nodes]
        return GraphEntry(name, self.name, list(layers), nodes)

    def _node(
        self, node: fx.Node, told: dict[fx.Node, tuple[str, str]], layers: tuple[str, ...]
    ) -> NodeEntry:
        origin = origin_of(node)
        if origin is not None:
            self.origins.append(origin)
        name, code = told[node]
        cost = self._cost(node, layers)
        value = first_tensor(node.meta.get("val")) if node.op != "output" else None
        meta = node.meta
        return NodeEntry(
            id=name,
            key=origin.key if origin else "",
            kind=KINDS.get(node.op, "call"),
            target=target_name(node),
            inputs=[told[source][0] for source in node.all_input_nodes],
            code=code,
            shape=[] if value is None else self._shape(node, value),
            dtype="" if value is None else _dtype(value),
            flop_per_token=cost.flop_per_token,
            flop_per_length=cost.length,
            flop_per_row=cost.row,
            bytes=_bytes(node),
            launches=int(_launches(node)),
            module=str(meta.get("path") or ""),
            role=str(meta.get("role") or ""),
            jobs=list(meta.get("jobs") or ()),
            site=str(meta.get("site") or "") if meta.get("role") == "adapter" else "",
            source=str(meta.get("source") or ""),
            made_by=origin.made_by if origin else "",
            made_from=_keys(origin) if origin else [],
            note=str(meta.get("as_it_is") or ""),
        )

    def _shape(self, node: fx.Node, value: Tensor) -> list[int | str]:
        """A value's shape, with names for what a row brings."""
        if node.op == "placeholder" and node.target in TARGET_SHAPES:
            return [*TARGET_SHAPES[str(node.target)]]
        return [
            size if isinstance(size, int) and str(size) not in self.names
            else self.names.get(str(size), str(size))
            for size in value.shape
        ]  # fmt: skip

    def _cost(self, node: fx.Node, layers: tuple[str, ...]) -> Cost:
        if node.op == "call_module":
            return self._loss() if node.target == LOSS else Cost()
        cost = self.meter.node(node)
        if lowered_site(node) is not None:
            return cost + self._adapters(node, layers).share(self.share)
        return cost.share(self.share) if is_branch(node) else cost

    def _adapters(self, node: fx.Node, layers: tuple[str, ...]) -> Cost:
        """The adapters of a lowered site, mean over the layers, whose ranks may differ."""
        assert isinstance(self.owner, GroupGraph)
        site, jobs = str(node.meta["site"]), node.meta["jobs"]
        paths = [f"{layer}.{site}" for layer in layers if layer] or [site]
        sites = [job.sites for job in self.owner.jobs if job.name in jobs]
        ranks = [own[path].rank for own in sites for path in paths if path in own]
        costs = total(self.meter.adapter(node, rank) for rank in ranks)
        return costs.times(1 / len(paths))

    def _loss(self) -> Cost:
        logits = first_tensor(_head(self.owner.blocks).meta["val"])
        assert logits is not None
        return Cost(token=float(SOFTMAX * logits.shape[-1]))


def whose(owner: GroupGraph | JobGraph) -> str:
    """Whose graphs these are: "base", "job NAME" or "group"."""
    if isinstance(owner, GroupGraph):
        return "group"
    return f"job {owner.name}" if owner.name else "base"


def target_name(node: fx.Node) -> str:
    """What a node calls: "aten.linear.default", "operator.getitem", a tensor's or layer's name."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = str(getattr(target, "__module__", "")).removeprefix("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _with_tensors(told: dict[fx.Node, tuple[str, str]]) -> dict[fx.Node, tuple[str, str]]:
    """The same, with tensors called as the module that runs the code calls them."""
    taken: dict[str, int] = {}
    found = dict(told)
    for node in told:
        if node.op == "get_attr":
            name = str(node.target)
            taken[name] = taken.get(name, 0) + 1
            found[node] = (name if taken[name] == 1 else f"{name}#{taken[name]}", "")
    return found


def _table_sizes(owner: GroupGraph | JobGraph) -> dict[str, str]:
    """What the sizes of a row's tables are called, where they are symbols."""
    tables = placeholders(owner.root)
    letters = {"token_index": "S" if owner.form == "batch" else "T"}
    return {
        str(tables[name].meta["val"].shape[dim]): letters.get(name, letter)
        for (name, dim), letter in TABLE_SIZES.items()
        if name in tables and isinstance(tables[name].meta["val"].shape[dim], torch.SymInt)
    }


def _head(blocks: dict[str, Block]) -> fx.Node:
    result: Any = output_of(blocks[HEAD].graph).args[0]
    assert isinstance(result, fx.Node)
    return result


def _bytes(node: fx.Node) -> int:
    """Of the tensor that a node reads, in the first layer that it stands for."""
    ref = node.meta.get("tensor")
    if node.op != "get_attr" or not isinstance(ref, TensorRef):
        return 0
    return torch.Size(ref.shape).numel() * ref.dtype.itemsize


def _launches(node: fx.Node) -> bool:
    """Whether an operator computes something, rather than look at what is there."""
    if node.op == "call_module":
        return node.target == LOSS
    if node.op != "call_function" or short_name(node.target) in NO_KERNEL:
        return False
    if not isinstance(first_tensor(node.meta.get("val")), Tensor):
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or not any(
        item.alias_info is not None and not item.alias_info.is_write for item in schema.returns
    )


def _keys(origin: Origin) -> list[str]:
    return [source.key for source in origin.sources]


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return SHORT.get(name, name)
