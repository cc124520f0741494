"""Make the data of every node from graphs: of a compiled model, and of what every pass left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.host.version import __version__
from tlora_fx.inspect.flops import (
    Cost,
    FlopCounter,
    first_tensor,
    is_branch,
    loss_cost,
    short_name,
    total,
)
from tlora_fx.inspect.joint import joint_entries
from tlora_fx.inspect.schema import (
    SCHEMA,
    Ancestor,
    GraphEntry,
    JointEntry,
    NodeEntry,
    PassStage,
    Program,
)
from tlora_fx.ir.graph import (
    LOSS,
    TRACE,
    AdapterSite,
    GroupGraph,
    JobGraph,
    Origin,
    TensorRef,
    ancestry,
    origin_of,
    placeholders,
)
from tlora_fx.ir.lora_sites import is_adapted
from tlora_fx.ir.verifier import owners
from tlora_fx.model.source import SHORT, size_names, statements
from tlora_fx.pipeline import Done, Instrument, Pipeline

#: Costs of calls by form, kept from one state of the graphs to the next.
CostCache = dict[str, dict[object, Cost]]

KINDS = {
    "placeholder": "input", "get_attr": "tensor", "call_module": "layer", "output": "output",
}  # fmt: skip
NO_KERNEL = frozenset({"sym_size", "getitem", "dropout", "contiguous"})
# Sizes of tables, which have symbols of their own: N sequences, J jobs, R rows with a target.
TABLE_SIZES = {
    ("cu_seqlens", 0): "N+1", ("segments", 0): "J+1", ("keys", 0): "J", ("token_index", 1): "T",
}  # fmt: skip
TARGET_SHAPES = {"target_rows": ["R"], "targets": ["R"], "target_segments": ["J+1"]}


def make_program(
    graphs: GroupGraph | JobGraph, state: str, base: str = "", *, joint: bool = True
) -> Program:
    """All graphs of one state: the fused ones, or those of the base and of each structure of jobs.

    state    name of the pass that ran last, or "trace"
    base     as the job file names it
    joint    with joint graphs, for which the passes over them must be known
    """
    parts = [_describe(owner, {}, joint=joint) for owner in owners(graphs)]
    jobs = graphs.job_names if isinstance(graphs, GroupGraph) else [graphs.name] * bool(graphs.name)
    return _program(parts, state, base, graphs.form, jobs)


@dataclass(frozen=True, slots=True)
class _Described:
    """The graphs of one owner, and the origins behind their nodes."""

    graphs: list[GraphEntry]
    origins: list[Origin]
    joint: list[JointEntry]


def _describe(owner: GroupGraph | JobGraph, cache: CostCache, *, joint: bool = True) -> _Described:
    describer = _Describer(owner, cache)
    graphs = [describer.graph("root", owner.root, ())]
    blocks = owner.blocks.values()
    graphs += [describer.graph(block.name, block.graph, block.instances) for block in blocks]
    entries = joint_entries(owner) if joint and isinstance(owner, GroupGraph) else []
    return _Described(graphs, describer.origins, entries)


def _program(
    parts: Iterable[_Described], state: str, base: str, form: str, jobs: list[str]
) -> Program:
    every = list(parts)
    graphs = [graph for part in every for graph in part.graphs]
    alive = {node.key for graph in graphs for node in graph.nodes}
    history: dict[str, Ancestor] = {}
    for origin in (origin for part in every for origin in part.origins):
        for past in ancestry(origin):
            if past.key not in alive and past.key not in history:
                keys = [source.key for source in past.sources]
                history[past.key] = Ancestor(past.target, past.made_by, keys)
    joint = [entry for part in every for entry in part.joint]
    return Program(SCHEMA, __version__, base, state, form, jobs, graphs, history, joint)


class _Describer:
    def __init__(self, owner: GroupGraph | JobGraph, cache: CostCache) -> None:
        self.owner = owner
        self.sizes = size_names(owner)
        self.counter = FlopCounter(owner.form, self.sizes, cache.setdefault(owner.form, {}))
        self.share = 1 / len(owner.jobs) if isinstance(owner, GroupGraph) else 1.0
        self.name = owner.subject
        self.names = {**_table_sizes(owner), **self.sizes}
        self.origins: list[Origin] = []

    def graph(self, name: str, graph: fx.Graph, layers: tuple[str, ...]) -> GraphEntry:
        named = _with_tensors(statements(graph, self.sizes))
        nodes = [self._node(node, named, layers) for node in graph.nodes]
        return GraphEntry(name, self.name, list(layers), nodes)

    def _node(
        self, node: fx.Node, named: dict[fx.Node, tuple[str, str]], layers: tuple[str, ...]
    ) -> NodeEntry:
        origin = origin_of(node)
        if origin is not None:
            self.origins.append(origin)
        name, code = named[node]
        cost = self._cost(node, layers)
        value = first_tensor(node.meta.get("val")) if node.op != "output" else None
        meta = node.meta
        return NodeEntry(
            id=name,
            key=origin.key if origin else "",
            kind=KINDS.get(node.op, "call"),
            target=_target_name(node),
            inputs=[named[source][0] for source in node.all_input_nodes],
            code=code,
            shape=[] if value is None else self._shape(node, value),
            dtype="" if value is None else dtype_of(value),
            flop_per_token=cost.flop_per_token,
            flop_per_length=cost.length,
            flop_per_row=cost.row,
            bytes=tensor_bytes(node),
            launches=int(_launches(node)),
            module=str(meta.get("path") or ""),
            role=str(meta.get("role") or ""),
            jobs=list(meta.get("jobs") or ()),
            site=str(meta.get("site") or "") if meta.get("role") == "adapter" else "",
            source=str(meta.get("source") or ""),
            made_by=origin.made_by if origin else "",
            made_from=[source.key for source in origin.sources] if origin else [],
            note=str(meta.get("as_it_is") or ""),
            notes=dict(meta.get("notes") or {}),
            ranks=self._ranks(node, layers),
        )

    def _shape(self, node: fx.Node, value: Tensor) -> list[int | str]:
        if node.op == "placeholder" and node.target in TARGET_SHAPES:
            return [*TARGET_SHAPES[str(node.target)]]
        return shape_of(value, self.names)

    def _cost(self, node: fx.Node, layers: tuple[str, ...]) -> Cost:
        if node.op == "call_module":
            return loss_cost(self.owner.blocks) if node.target == LOSS else Cost()
        cost = self.counter.node(node)
        if is_adapted(node):
            return cost + self._adapters(node, layers).share(self.share)
        return cost.share(self.share) if is_branch(node) else cost

    def _adapters(self, node: fx.Node, layers: tuple[str, ...]) -> Cost:
        """The adapters of a lowered site, mean over the layers, whose ranks may differ."""
        sites = self._sites(node, layers)
        costs = total(self.counter.adapter(node, site.rank) for job in sites for site in job)
        return costs.times(1 / (len(layers) or 1))

    def _ranks(self, node: fx.Node, layers: tuple[str, ...]) -> list[list[int]]:
        """Of each job's adapter, in the order of the node's jobs; none where there is none."""
        if node.meta.get("role") != "adapter" or not node.meta.get("site"):
            return []
        sites = self._sites(node, layers)
        return [sorted({site.rank for site in job if site.rank}) for job in sites]

    def _sites(self, node: fx.Node, layers: tuple[str, ...]) -> list[list[AdapterSite]]:
        """What each of a node's jobs has at its site, in all layers that run the node."""
        jobs = self.owner.jobs if isinstance(self.owner, GroupGraph) else [self.owner]
        sites = {job.name: job.sites for job in jobs}
        paths = [f"{layer}.{node.meta['site']}" for layer in layers if layer]
        names = paths or [str(node.meta["site"])]
        of_jobs = [sites.get(job, {}) for job in node.meta.get("jobs") or ()]
        return [[job[path] for path in names if path in job] for job in of_jobs]


def _target_name(node: fx.Node) -> str:
    """What a node calls: "aten.linear.default", "operator.getitem", a tensor's or layer's name."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = str(getattr(target, "__module__", "")).removeprefix("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _with_tensors(named: dict[fx.Node, tuple[str, str]]) -> dict[fx.Node, tuple[str, str]]:
    """The same, with tensors called as the module that runs the code calls them."""
    times: dict[str, int] = {}
    renamed = dict(named)
    for node in named:
        if node.op == "get_attr":
            name = str(node.target)
            times[name] = times.get(name, 0) + 1
            renamed[node] = (name if times[name] == 1 else f"{name}#{times[name]}", "")
    return renamed


def _table_sizes(owner: GroupGraph | JobGraph) -> dict[str, str]:
    """What the sizes of a row's tables are called, where they are symbols."""
    tables = placeholders(owner.root)
    letters = {"token_index": "S" if owner.form == "batch" else "T"}
    return {
        str(tables[name].meta["val"].shape[dim]): letters.get(name, letter)
        for (name, dim), letter in TABLE_SIZES.items()
        if name in tables and isinstance(tables[name].meta["val"].shape[dim], torch.SymInt)
    }


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that a node reads, in the first layer that it stands for."""
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


def shape_of(value: Tensor, names: dict[str, str]) -> list[int | str]:
    """A value's shape, with names for the sizes that a row brings."""
    return [
        size if isinstance(size, int) and str(size) not in names
        else names.get(str(size), str(size))
        for size in value.shape
    ]  # fmt: skip


def dtype_of(value: Tensor) -> str:
    """A value's type in short: "bf16"."""
    name = str(value.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


@dataclass(slots=True)
class _State:
    """What one pass left, as far as it was seen: graphs by whose they are."""

    seconds: float = 0.0
    changed: bool = False
    parts: dict[str, _Described] = field(default_factory=dict)


class Recorder(Instrument):
    """Records the data of every node after every pass: the stages that `passes/` and the page show.

    When the driver begins again, in another form or with less folding, what was recorded before is
    dropped: the stages are those of the attempt that was kept. What the job file calls the base
    they do not know; `dump` writes it into them.
    """

    def __init__(self) -> None:
        self._cache: CostCache = {}
        self.started(Pipeline(()))

    @property
    def stages(self) -> list[PassStage]:
        """States of the program: the trace, and what each pass left, in order."""
        names = [TRACE, *(item.name for item in self._pipeline.passes)]
        texts = [TRACE, *(str(item) for item in self._pipeline.passes)]
        stages = []
        for place, state in sorted(self._states.items()):
            program = _program(state.parts.values(), names[place], "", self._form, self._jobs)
            stages.append(PassStage(place, texts[place], state.changed, state.seconds, program))
        return stages

    def started(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._states: dict[int, _State] = {}
        self._form = "packed"
        self._jobs: list[str] = []

    def traced(self, subject: str, graphs: JobGraph) -> None:
        self._form = graphs.form
        if graphs.name and graphs.name not in self._jobs:
            self._jobs.append(graphs.name)
        self._states.setdefault(0, _State()).parts[subject] = _describe(graphs, self._cache)

    def after(self, done: Done) -> None:
        """Keep what a pass left; where it changed nothing, what the one before it left."""
        state = self._states.setdefault(done.place, _State())
        state.seconds += done.seconds
        state.changed |= bool(done.changed)
        if isinstance(done.graphs, GroupGraph):
            self._jobs = done.graphs.job_names
        before = self._states.get(done.place - 1, _State()).parts
        subjects = [(done.subject, done.graphs)]
        if isinstance(done.graphs, GroupGraph):
            # Of a group that is not fused those of its base and jobs.
            subjects = [(owner.subject, owner) for owner in owners(done.graphs)]
        for subject, graphs in subjects:
            kept = before.get(subject) if not done.changed else None
            state.parts[subject] = kept or _describe(graphs, self._cache)
