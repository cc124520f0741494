"""Merge the backbone nodes that all jobs compute identically.

Reads   the base's graph with the axis of every value, and each job's graph.
Writes  the group's root and blocks: every base node once (role "shared"), and for each job and
        site a branch on the job's segment (role "adapter").
Keeps   every number that a job alone would compute: a branch reads the job's segment of what it
        needs and writes the job's segment of the value that it replaces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from tlora_fx.errors import FusionError, JobsDiffer, PipelineError
from tlora_fx.ir.graph import (
    INPUTS,
    TABLES,
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    TensorRef,
    behind,
    derive,
    is_call,
    output_of,
    placeholders,
    under,
)
from tlora_fx.ir.names import block_name
from tlora_fx.ir.shapes import fake_like, fake_mode_of
from tlora_fx.pipeline import GroupPass, Numerics, count, register

aten = torch.ops.aten
ops = torch.ops.tlora_fx
#: What PEFT calls a wrapped module, and a wrapper of it, inside its own wrapper.
PEFT_INNER = ("base_layer", "token_adapter")
OWN_TABLES = ("cu_seqlens", "segments", "keys")


@register
@dataclass(frozen=True, slots=True)
class FuseBackbone(GroupPass):
    """Merge backbone nodes into one Shared Super-Model.

    max_jobs   largest number of jobs in one model
    """

    name: ClassVar[str] = "fuse-backbone"
    requires: ClassVar[frozenset[str]] = frozenset({"fold-layers", "token-parallel"})
    statistics: ClassVar[Mapping[str, str]] = {
        "shared": "operators that run once for all jobs",
        "branches": "branches of jobs",
    }
    preserves_numerics: ClassVar[Numerics] = "bound"

    max_jobs: int = 64

    def run(self, group: GroupGraph) -> None:
        if group.fused:
            raise PipelineError(
                "pass 'fuse-backbone' runs on jobs that are fused",
                expected="each job's own graph",
                found="a fused graph, which it would make anew, without what passes did to it",
                help="name fuse-backbone once, before the passes on the fused graph",
            )
        if len(group.jobs) > self.max_jobs:
            raise JobsDiffer(
                "the group has more jobs than one model may hold",
                expected=f"at most {self.max_jobs}",
                found=len(group.jobs),
                help="split the group, or raise fuse-backbone{max-jobs=...}",
            )
        structures: dict[int, _Structure] = {}
        for job in group.jobs:
            if id(job.root) not in structures:
                structures[id(job.root)] = _Structure(job, group.base)
        aligned = [structures[id(job.root)] for job in group.jobs]
        layers: dict[tuple[Hashable, ...], list[str]] = {}
        for layer in group.base.plan.layers if group.base.blocks and group.base.plan else ():
            key = tuple(_block_at(job, layer).name for job in (group.base, *group.jobs))
            layers.setdefault(key, []).append(layer)
        for members in layers.values():
            name = block_name(tuple(members))
            group.blocks[name] = Block(name, _fused(group, aligned, members[0]), tuple(members))
        group.root = _fused(group, aligned)
        group.notes.extend(_missing_notes(group, aligned))
        called = [n for graph in group.graphs() for n in graph.nodes if n.op == "call_function"]
        count("shared", sum(node.meta["role"] == "shared" for node in called))
        count("branches", sum(is_call(node, ops.segment_write.default) for node in called))


class _Structure:
    """Graphs that equal jobs share, lined up with the base's: the root, and each pair of blocks."""

    def __init__(self, job: JobGraph, base: JobGraph) -> None:
        self.job, self.base = job, base
        subject = f"job '{job.name}'"
        own, theirs = placeholders(job.root), placeholders(base.root)
        layers = [layer for block in base.blocks.values() for layer in block.instances]
        self.root = align(
            Side(base.root, base.constants),
            Side(job.root, job.constants),
            {node: theirs[name] for name, node in own.items()},
            [path for path in job.sites if not any(under(path, layer) for layer in layers)],
            subject,
        )
        self.blocks: dict[tuple[str, str], Alignment] = {}

    def block(self, layer: str) -> Alignment:
        """The alignment of the block that this layer runs."""
        mine, theirs = _block_at(self.job, layer), _block_at(self.base, layer)
        key = (mine.name, theirs.name)
        if key not in self.blocks:
            self.blocks[key] = align(
                Side(theirs.graph, self.base.constants),
                Side(mine.graph, self.job.constants),
                self._inputs(layer, mine, theirs),
                [path[len(layer) + 1 :] for path in self.job.sites if under(path, layer)],
                f"job '{self.job.name}'",
            )
        return self.blocks[key]

    def _inputs(self, layer: str, mine: Block, theirs: Block) -> dict[fx.Node, fx.Node]:
        """Which input of the job's layer is which of the base's: by what the roots pass in."""
        own_call, base_call = _call_of(self.job, layer), _call_of(self.base, layer)
        slots: dict[Any, int] = {arg: slot for slot, arg in enumerate(base_call.args)}
        stands: dict[Any, fx.Node] = dict(self.root.stands)
        base_inputs = list(placeholders(theirs.graph).values())
        return {
            node: base_inputs[slots[stands[arg]]]
            for node, arg in zip(placeholders(mine.graph).values(), own_call.args, strict=True)
            if stands.get(arg) in slots
        }


def _block_at(job: JobGraph, layer: str) -> Block:
    return next(block for block in job.blocks.values() if layer in block.instances)


def _call_of(job: JobGraph, layer: str) -> fx.Node:
    calls: Iterator[fx.Node] = iter(job.root.nodes)
    return next(node for node in calls if node.op == "call_module" and node.target == layer)


def _fused(group: GroupGraph, aligned: list[_Structure], layer: str = "") -> fx.Graph:
    """The fused graph of the root, or of a layer's block."""
    base = _block_at(group.base, layer).graph if layer else group.base.root
    writer, prefix = _BranchWriter(group, base, layer), f"{layer}." if layer else ""
    for job, structure in zip(group.jobs, aligned, strict=True):
        sites = {p[len(prefix) :]: s for p, s in job.sites.items() if p.startswith(prefix)}
        writer.add_job(job, structure.block(layer) if layer else structure.root, sites)
    return writer.write()


def _missing_notes(group: GroupGraph, aligned: list[_Structure]) -> list[tuple[str, str]]:
    notes = []
    for job, structure in zip(group.jobs, aligned, strict=True):
        named = ((f"{name}.", alignment) for (_, name), alignment in structure.blocks.items())
        for where, alignment in [("", structure.root), *named]:
            for node in alignment.missing:
                path = where + (node.meta.get("path") or node.name)
                notes.append(
                    f"job '{job.name}' does not use the base's {path} ({node.target}): "
                    "it trains a copy of its own"
                )
    return [("fuse-backbone", note) for note in dict.fromkeys(notes)]


class _BranchWriter:
    """Writes one fused graph: the base's nodes in order, each job's branches at their anchors."""

    def __init__(self, group: GroupGraph, base: fx.Graph, layer: str) -> None:
        self.group, self.base, self.layer = group, base, layer
        self.mode = fake_mode_of(base)
        self.graph = fx.Graph()
        self.before: dict[fx.Node, fx.Node] = {}
        self.after: dict[fx.Node, fx.Node] = {}
        self.tables: dict[str, fx.Node] = {}
        self.branches: dict[fx.Node, list[tuple[int, JobGraph, Alignment, JobBranch]]] = {}
        self.sites: list[dict[str, AdapterSite]] = []

    def add_job(self, job: JobGraph, alignment: Alignment, sites: dict[str, AdapterSite]) -> None:
        """Take a job's branches; they are written when the base reaches their anchors."""
        index = len(self.sites)
        self.sites.append(sites)
        for branch in alignment.branches:
            self.branches.setdefault(branch.anchor, []).append((index, job, alignment, branch))

    def write(self) -> fx.Graph:
        """The fused graph."""
        names = self.group.job_names
        if self.branches or not self.layer:
            self._place_inputs()
        for node in self.base.nodes:
            if node.op == "placeholder" and node in self.before:
                continue
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.after[n]))
                continue
            copied = self.graph.node_copy(node, lambda n: self.after[n])
            copied.meta = {**node.meta, "role": "shared", "jobs": tuple(names)}
            if node.op == "call_module":
                copied.args = self._call_args(node)
            if node.op == "placeholder" and str(node.target) in TABLES:
                self.tables[str(node.target)] = copied
            self.before[node] = self.after[node] = copied
            for entry in self.branches.get(node, ()):
                self._write_branch(*entry)
        return self.graph

    def _place_inputs(self) -> None:
        """All placeholders first: the base's own, then the tables that branches may need."""
        for node in self.base.nodes:
            if node.op == "placeholder":
                copied = self.graph.node_copy(node)
                copied.meta = {**node.meta, "role": "shared", "jobs": tuple(self.group.job_names)}
                self._fit_jobs(copied)
                self.before[node] = self.after[node] = copied
                self.tables[str(node.target)] = copied
        root = placeholders(self.group.base.root)
        for name in INPUTS if not self.layer else ("segments", "token_index", "keys"):
            if name not in self.tables:
                copied = self.graph.placeholder(name)
                copied.meta = {**root[name].meta, "role": "table", "jobs": ()}
                self._fit_jobs(copied)
                self.tables[name] = copied

    def _fit_jobs(self, table: fx.Node) -> None:
        """Give a table of jobs an entry for each: the row that was traced has fewer jobs."""
        jobs, value = len(self.group.jobs), table.meta["val"]
        rows = {"segments": jobs + 1, "keys": jobs}.get(str(table.target), 0)
        if rows and value.shape[0] < rows:
            shape = (rows, *value.shape[1:])
            table.meta["val"] = fake_like(value.fake_mode, shape, value.dtype, value.device)

    def _call_args(self, call: fx.Node) -> tuple[fx.Node, ...]:
        """What a fused layer takes: the base layer's arguments, then the tables added to it."""
        block = self.group.block_of(str(call.target))
        given = [self.after[arg] for arg in call.args]  # type: ignore[index]
        names = list(placeholders(block.graph))[len(given) :]
        return (*given, *(self.tables[name] for name in names))

    def _write_branch(
        self, index: int, job: JobGraph, alignment: Alignment, branch: JobBranch
    ) -> None:
        axis = branch.anchor.meta["axis"]
        if axis is None:
            raise _of_no_token(job, branch)
        site = self.sites[index].get(branch.site)
        copies: dict[fx.Node, fx.Node] = {}

        def take(source: fx.Node) -> fx.Node:
            if source not in copies:
                copies[source] = self._job_value(index, job, alignment, source)
            return copies[source]

        for node in branch.nodes:
            if node.op == "get_attr":
                copies[node] = self._job_tensor(index, job, node, site)
                continue
            sizes = [n for n in node.all_input_nodes if n not in copies and _is_row_size(n)]
            for size in sizes:
                copies[size] = self._segment_size(job, size, alignment, take)
            copies[node] = self.graph.node_copy(node, take)
            copies[node].meta = {**node.meta, "role": "adapter", "jobs": (job.name,)}
            copies[node].meta["site"] = branch.site
            derive(copies[node], node)
            _set_numbers(copies[node], site)
        args = (
            self.after[branch.anchor],
            copies[branch.result],
            self.tables["segments"],
            index,
            axis,
        )
        write = self.graph.call_function(ops.segment_write.default, args)
        self._tag(write, job, branch.site, self.after[branch.anchor].meta["val"])
        derive(write, branch.result, branch.anchor)
        self.after[branch.anchor] = write

    def _job_value(
        self, index: int, job: JobGraph, alignment: Alignment, source: fx.Node
    ) -> fx.Node:
        """A base value as the job sees it: its own segment, or the whole where all share it."""
        stands = alignment.stands.get(source)
        base = stands if stands is not None else alignment.twins[source]
        value = self.after[base] if stands is not None else self.before[base]
        axis = base.meta.get("axis")
        if base.op == "placeholder" and base.target in OWN_TABLES:
            return self._own_table(index, job, str(base.target))
        if axis is None:
            return value
        args = (value, self.tables["segments"], index, axis)
        read = self.graph.call_function(ops.segment_read.default, args)
        self._tag(read, job, "", value.meta["val"])
        return derive(read, source)

    def _own_table(self, index: int, job: JobGraph, name: str) -> fx.Node:
        """A table of the row as it would be for the job's segment alone."""
        segments = self.tables["segments"]

        def call(target: Any, *args: Any) -> fx.Node:
            table = self.graph.call_function(target, args)
            table.meta.update(role="table", jobs=(job.name,), path="", source="")
            return table

        if name == "keys":
            return call(aten.slice.Tensor, self.tables[name], 0, index, index + 1)
        start, stop = (call(aten.select.int, segments, 0, bound) for bound in (index, index + 1))
        if name == "segments":
            bounds = call(aten.slice.Tensor, segments, 0, index, index + 2)
        else:
            bounds = call(aten.clamp.Tensor, self.tables[name], start, stop)
        return call(aten.sub.Tensor, bounds, start)

    def _segment_size(
        self, job: JobGraph, size: fx.Node, alignment: Alignment, take: Any
    ) -> fx.Node:
        """The row's size inside a branch is the size of the job's segment."""
        known = {**alignment.twins, **alignment.stands}
        for source, base in known.items():
            axis = base.meta.get("axis")
            value = source.meta.get("val")
            if not isinstance(axis, int) or not isinstance(value, torch.Tensor):
                continue
            if str(value.shape[axis]) == str(size.meta["val"]):
                args = (take(source), axis)
                result = self.graph.call_function(torch.ops.aten.sym_size.int, args)
                result.meta = {**size.meta, "role": "adapter", "jobs": (job.name,)}
                return derive(result, size)
        whole: fx.Node = take(size)
        return whole

    def _job_tensor(
        self, index: int, job: JobGraph, node: fx.Node, site: AdapterSite | None
    ) -> fx.Node:
        """A tensor that the job trains, under the job's own name in the fused model."""
        ref: TensorRef = node.meta["tensor"]
        if ref.owner == "constant":
            name = f"j{index}_{ref.name}"
            self.group.constants[name] = job.constants[ref.name]
            stored = self.graph.create_node("get_attr", name)
            stored.meta = {**node.meta, "tensor": TensorRef("constant", name, ref.shape, ref.dtype)}
            return derive(stored, node)
        shape = _with_rank(ref, site)
        target = f"j{index}.{node.target}"
        stored = self.graph.create_node("get_attr", target)
        stored.meta = {**node.meta, "role": "adapter", "jobs": (job.name,)}
        derive(stored, node)
        stored.meta["tensor"] = TensorRef("job", ref.name, shape, ref.dtype)
        stored.meta["val"] = fake_like(self.mode, shape, ref.dtype)
        return stored

    def _tag(self, node: fx.Node, job: JobGraph, site: str, value: Any) -> None:
        node.meta.update(
            role="adapter", jobs=(job.name,), site=site, path=site, source="", val=value
        )


def _of_no_token(job: JobGraph, branch: JobBranch) -> FusionError:
    return FusionError(
        f"job '{job.name}' adapts a module that the base runs on what is no token of the row",
        module=branch.site,
        source=branch.anchor.meta.get("source") or None,
        expected="a module that runs on tokens alone; relative positions are none",
        help="leave it out of target_modules, or name it in exclude_modules: of DeBERTa, "
        "value_proj and dense can be adapted",
    )


def _is_row_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _with_rank(ref: TensorRef, site: AdapterSite | None) -> tuple[int, ...]:
    """Shape of a tensor for a job whose rank may differ from the traced one's."""
    if site is None or site.kind != "lora":
        return ref.shape
    if ".lora_A." in ref.name:
        return (site.rank, *ref.shape[1:])
    if ".lora_B." in ref.name and len(ref.shape) == 2:
        return (ref.shape[0], site.rank)
    return ref.shape


def _set_numbers(node: fx.Node, site: AdapterSite | None) -> None:
    """Give a plain LoRA branch the scaling and rate of this job's site."""
    if site is None or site.kind != "lora":
        return
    if node.meta.get("part") == "scale":
        node.update_arg(1, site.scaling)
    if node.meta.get("part") == "dropout":
        node.update_arg(1, site.dropout)


# A job's graph, lined up with its base's graph.
#
# Module paths guide the search; operators and arguments decide. A job's node is the twin of a base
# node when it applies the same operator to values that stand for the same base values. Where PEFT
# wrapped a module, the wrapper's result stands for the module's result. The job's graph then is
# the base's graph with some values replaced by branches, or the alignment fails.


@dataclass(slots=True)
class JobBranch:
    """Value that a job computes in place of one base value.

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
    """Alignment of one job's graph with the base's.

    twins      job node to the base node that it repeats
    stands     job node to the base node that it stands for downstream
    branches   in the order of their anchors
    missing    base nodes that the job does not compute
    """

    twins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    stands: dict[fx.Node, fx.Node] = field(default_factory=dict)
    branches: list[JobBranch] = field(default_factory=list)
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
    alignment = Alignment()
    for node in job.graph.nodes:
        twin = _twin(node, inputs, index, alignment, job)
        if twin is not None:
            alignment.twins[node] = twin
            if twin not in replaced:
                alignment.stands[node] = twin
        if node in anchors:
            alignment.stands[node] = anchors[node][0]
    _require_same_result(base.graph, job.graph, alignment, subject)
    _cut_branches(anchors, job.graph, alignment)
    done = set(alignment.twins.values())
    alignment.missing = [n for n in base.graph.nodes if n not in done and n.op == "call_function"]
    return alignment


def _anchors(
    base: fx.Graph, job: fx.Graph, sites: Iterable[str]
) -> dict[fx.Node, tuple[fx.Node, str]]:
    """The job's node and the base's node that are a result of each wrapped module.

    A module that runs several times has a result of each run, in the order of the runs.
    """
    anchors: dict[fx.Node, tuple[fx.Node, str]] = {}
    for site in sites:
        mine, theirs = _results(job, site), _results(base, site)
        if len(mine) == len(theirs):
            anchors.update(zip(mine, ((result, site) for result in theirs), strict=True))
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
    alignment: Alignment,
    job: Side,
) -> fx.Node | None:
    if node.op == "placeholder":
        return inputs.get(node)
    if node.op == "output":
        return None
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef) and ref.owner == "job":
        return None
    if any(source not in alignment.stands for source in node.all_input_nodes):
        return None
    candidates = index.get(_key(node, alignment.stands, job), [])
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
    names = node.meta.get("path", "").split(".")
    path = ".".join(name for name in names if name not in PEFT_INNER)
    args, kwargs = fx.map_arg((node.args, node.kwargs), stands.__getitem__)
    return (node.op, str(node.target), path, str(args), str(kwargs))


def _content(value: Tensor) -> Hashable:
    return (
        str(value.dtype),
        tuple(value.shape),
        bytes(value.contiguous().view(-1).view(torch.uint8)),
    )


def _require_same_result(base: fx.Graph, job: fx.Graph, alignment: Alignment, subject: str) -> None:
    result, expected = output_of(job).args[0], output_of(base).args[0]
    if isinstance(result, fx.Node) and alignment.stands.get(result) is expected:
        return
    strangers = [
        node
        for node in job.nodes
        if node.op == "call_function"
        and node not in alignment.stands
        and node.meta.get("role") != "adapter"
        and node not in alignment.twins
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
    anchors: dict[fx.Node, tuple[fx.Node, str]], job: fx.Graph, alignment: Alignment
) -> None:
    order = {node: position for position, node in enumerate(job.nodes)}
    known = {*alignment.twins, *alignment.stands}
    for result, (anchor, site) in sorted(anchors.items(), key=lambda item: order[item[0]]):
        if alignment.twins.get(result) is anchor:
            continue
        members = {result, *behind(result.all_input_nodes, known.__contains__) - known}
        alignment.branches.append(
            JobBranch(anchor, site, sorted(members, key=order.__getitem__), result)
        )
