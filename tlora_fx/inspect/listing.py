"""Make the listing of a Shared Super-Model: a row a module, layers folded, with all sums.

A row is made of the nodes of one module: what runs for all jobs, and each job's branch. It says
what the module computes, costs and reads, and whom it serves. The model needs no weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from tlora_fx.host.version import __version__
from tlora_fx.inspect.flops import (
    MOVES,
    Cost,
    FlopCounter,
    first_tensor,
    is_branch,
    loss_cost,
    operator_name,
    total,
    training_cost,
)
from tlora_fx.inspect.program import dtype_of, shape_of, tensor_bytes
from tlora_fx.inspect.schema import (
    SCHEMA,
    AttentionEntry,
    BaseEntry,
    BlockEntry,
    BranchEntry,
    DropoutEntry,
    JobEntry,
    Listing,
    NoteEntry,
    RowEntry,
    Totals,
)
from tlora_fx.inspect.wording import layers_label
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    TensorRef,
    is_call,
    under,
)
from tlora_fx.ir.lora_sites import EXPERTS, is_adapted, lowered_site, serves_several
from tlora_fx.model.source import class_name, size_names
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.tracing.layers import layer_list

# Operators that a module is called by, the first that it holds, and what some of them are called.
PRINCIPAL = (
    "multi_lora_linear", "packed_attention", "scaled_dot_product_attention", "linear", "addmm",
    "embedding", "layer_norm", "native_layer_norm", "rms_norm", "softmax", "_softmax", "matmul",
    "bmm",
)  # fmt: skip
CALLED = {
    "scaled_dot_product_attention": "attention", "addmm": "linear", "bmm": "matmul",
    "native_layer_norm": "layer_norm", "_softmax": "softmax",
}  # fmt: skip
RMS_NORM = {"mean", "rsqrt"}
NOT_LOWERED = "no pass lowered it"
SHOWN_OPERATORS = 3
ops = torch.ops.tlora_fx


def make_listing(model: SuperModel) -> Listing:
    """A Shared Super-Model as plain data; the model needs no weights."""
    return _Lister(model).listing()


class _Lister:
    def __init__(self, model: SuperModel) -> None:
        self.model, self.group = model, model.group
        self.sizes = size_names(self.group)
        self.counter = FlopCounter(self.group.form, self.sizes)
        self.layers = layer_list(model.backbone.model)

    def listing(self) -> Listing:
        blocks, backbone = self._blocks(), self.model.backbone
        dtype = str(backbone.dtype).removeprefix("torch.")
        architecture = type(backbone.model).__name__
        return Listing(
            schema=SCHEMA,
            version=__version__,
            base=BaseEntry(_short_path(backbone.title), architecture, dtype, self.layers),
            form=self.group.form,
            adapter_dtype=str(self.model.jobs[0].adapter_dtype),
            jobs=[_job_entry(job, blocks) for job in self.group.jobs],
            blocks=blocks,
            attention=self._attention(),
            dropouts=self._dropouts(),
            totals=_totals(self.model, blocks, self.counter),
            notes=[NoteEntry(by, text) for by, text in self.group.notes],
        )

    def _blocks(self) -> list[BlockEntry]:
        """The root before its layers, the layers by structure, the root after them, the loss."""
        before, inside, after = self._split_root()
        layers = [b for name, b in self.group.blocks.items() if name != HEAD]
        order = {layer: index for index, layer in enumerate(self.layers)}
        layers.sort(key=lambda block: order.get(block.instances[0], 0))
        head = self.group.blocks.get(HEAD)
        blocks = [self._block("Root", (), before)]
        for block in layers:
            entry = self._block(class_name(block), block.instances, block.graph.nodes, True)
            blocks.append(replace(entry, why=self._why(block, layers)))
        for layer, nodes in inside.items():
            blocks.append(self._block("Root", (layer,), nodes))
        blocks.append(self._block("Root", (), after))
        if head is not None:
            entry = self._block(class_name(head), (), head.graph.nodes)
            entry.rows.append(self._loss(head))
            blocks.append(entry)
        return [block for block in blocks if block.rows]

    def _split_root(self) -> tuple[list[fx.Node], dict[str, list[fx.Node]], list[fx.Node]]:
        """Nodes of the root before its layers, of layers that are not folded, and after them."""
        before: list[fx.Node] = []
        inside: dict[str, list[fx.Node]] = {}
        after: list[fx.Node] = []
        seen = False
        for node in self.group.root.nodes:
            path = str(node.meta.get("path", ""))
            layer = next((name for name in self.layers if under(path, name)), None)
            if node.op == "call_function" and layer is not None:
                inside.setdefault(layer, []).append(node)
            else:
                (after if seen else before).append(node)
            seen = seen or layer is not None
        return before, inside, after

    def _why(self, block: Block, every: Sequence[Block]) -> str:
        """What tells a structure of layers apart from the ones before it."""
        mine = block.instances[0]
        before = [other.instances[0] for other in every[: every.index(block)]]
        code = _block_name(self.group.base, mine)
        same = [layer for layer in before if _block_name(self.group.base, layer) == code]
        if not before:
            return ""
        if not same:
            return "the base computes other things here"
        theirs = same[0]
        names = [
            job.name
            for job in self.group.jobs
            if _block_name(job, mine) != _block_name(job, theirs)
        ]
        return f"other adapters than in {layers_label([theirs])}: {', '.join(names)}"

    def _block(
        self, name: str, layers: Sequence[str], nodes: Iterable[fx.Node], folded: bool = False
    ) -> BlockEntry:
        rows = [self._row(module, layers if folded else ("",)) for module in _modules(nodes)]
        if not folded and layers:
            rows = [replace(row, module=row.module[len(layers[0]) + 1 :]) for row in rows]
        return BlockEntry(name, list(layers), folded, "", rows)

    def _attention(self) -> list[AttentionEntry]:
        calls = self._calls(ops.packed_attention.default)
        return [_attention_entry(node, layers) for layers, node in calls]

    def _dropouts(self) -> list[DropoutEntry]:
        dropouts = []
        for layers, node in self._calls(ops.keyed_dropout.default):
            rate = float(node.args[1].meta["rate"])  # type: ignore[union-attr]
            jobs = list(node.meta["jobs"]) if is_branch(node) else self.group.job_names
            dropouts.append(DropoutEntry(layers, str(node.meta["path"]), rate, jobs))
        return dropouts

    def _calls(self, target: Any) -> Iterator[tuple[list[str], fx.Node]]:
        for node in self.group.root.nodes:
            if is_call(node, target):
                path = str(node.meta.get("path", ""))
                yield [name for name in self.layers if under(path, name)], node
        for name, block in self.group.blocks.items():
            for node in block.graph.nodes:
                if is_call(node, target):
                    yield ([] if name == HEAD else list(block.instances)), node

    def _row(self, module: _ModuleNodes, layers: Sequence[str]) -> RowEntry:
        branches = [
            branch
            for job in self.group.jobs
            if (branch := self._branch(module, job, layers)) is not None
        ]
        cost = total(map(self.counter.node, module.nodes))
        known = [b.flop_per_token for b in branches if b.flop_per_token is not None]
        flop = cost.flop_per_token if len(known) == len(branches) else None
        if flop is not None:
            flop += sum(known) / len(self.group.jobs)
        alone = total(self.counter.node(n) for nodes in module.branches.values() for n in nodes)
        value = module.value
        return RowEntry(
            module=module.module,
            operator=module.operator(),
            detail=self._detail(module),
            shape=[] if value is None else shape_of(value, self.sizes),
            dtype="" if value is None else dtype_of(value),
            flop_per_token=flop,
            flop_per_length=cost.length,
            flop_per_row=cost.row + alone.row,
            weight_bytes=sum(map(tensor_bytes, module.reads("base"))),
            adapter_bytes=self._adapter_bytes(module, layers),
            role="shared",
            nodes=len(module.nodes),
            source=module.source,
            branches=branches,
        )

    def _branch(
        self, module: _ModuleNodes, job: JobGraph, layers: Sequence[str]
    ) -> BranchEntry | None:
        """What a job has at a module; layers are those that the module's graph stands for."""
        sites = [site for path in _full(module.module, layers) if (site := job.sites.get(path))]
        lowered = module.lowered
        if lowered is not None and job.name in lowered.meta["jobs"]:
            rank = sum(site.rank for site in sites) / len(sites)
            numbers = rank * self._width(lowered, sites[0])
            costs = (self.counter.adapter(lowered, site.rank) for site in sites)
            flop = total(costs).times(1 / len(sites)).flop_per_token
            return BranchEntry(job.name, _ranks(sites), sites[0].kind, True, None, numbers, flop)
        if job.name not in module.branches:
            return None
        nodes = module.branches[job.name]
        cost = total(map(self.counter.node, nodes))
        tensors = {
            source
            for node in nodes
            for source in node.all_input_nodes
            if source.op == "get_attr" and _owner_of(source) == "job"
        }
        return BranchEntry(
            job=job.name,
            ranks=_ranks(sites),
            kind=sites[0].kind if sites else "",
            lowered=False,
            as_it_is=module.reasons.get(job.name, ""),
            parameters=float(sum(torch.Size(n.meta["tensor"].shape).numel() for n in tensors)),
            flop_per_token=cost.flop_per_token,
        )

    def _width(self, lowered: fx.Node, site: AdapterSite) -> int:
        """What a rank at a lowered site has of numbers, of all experts where there are some."""
        if is_call(lowered, EXPERTS):
            (a, *_), (b, *_) = (cast(list[fx.Node], lowered.args[index]) for index in (5, 6))
            (rows, width), outer = a.meta["tensor"].shape, b.meta["tensor"].shape[0]
            rank: int = lowered.meta["branches"][a.meta["jobs"][0]].rank
            return int(rows // rank * (width + outer))
        bank = self.model.banks[site.path]
        return bank.a.shape[1] + bank.b.shape[1]

    def _adapter_bytes(self, module: _ModuleNodes, layers: Sequence[str]) -> float:
        banks = [self.model.banks[p] for p in _full(module.module, layers) if p in self.model.banks]
        stored = sum(t.numel() * t.dtype.itemsize for bank in banks for t in (bank.a, bank.b))
        return stored / max(1, len(banks)) + sum(map(tensor_bytes, module.reads("job")))

    def _detail(self, module: _ModuleNodes) -> str:
        node = next((n for n in module.nodes if is_call(n, ops.packed_attention.default)), None)
        return "" if node is None else _attention_detail(_attention_entry(node, []))

    def _loss(self, head: Block) -> RowEntry:
        """The operator that turns logits into each job's loss sum."""
        node = next(n for n in self.group.root.nodes if n.op == "call_module" and n.target == LOSS)
        value = node.meta["val"]
        return RowEntry(
            LOSS, "cross_entropy", "in chunks, on rows with a target only",
            shape_of(value, self.sizes), dtype_of(value), loss_cost({HEAD: head}).token, 0.0, 0.0,
            0, 0.0, "loss", 1, "", [],
        )  # fmt: skip


def _block_name(graph: JobGraph, layer: str) -> str:
    return next(block.name for block in graph.blocks.values() if layer in block.instances)


def _short_path(title: str) -> str:
    """A title that is a path below the working folder begins there."""
    path = Path(title)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return title


def _job_entry(job: JobGraph, blocks: Iterable[BlockEntry]) -> JobEntry:
    sites = list(job.sites.values())
    adapted = [site for site in sites if site.rank]
    branches = [
        (times, branch) for times, row in _rows(blocks) for branch in row.branches
        if branch.job == job.name
    ]  # fmt: skip
    return JobEntry(
        name=job.name,
        ranks=sorted({site.rank for site in adapted}),
        scalings=sorted({site.scaling for site in adapted}),
        dropouts=sorted({site.dropout for site in adapted}),
        kinds=list(dict.fromkeys(site.kind for site in sites)),
        targets=list(dict.fromkeys(site.path.rpartition(".")[2] for site in sites)),
        sites=len(sites),
        lowered=sum(times for times, branch in branches if branch.lowered),
        parameters=round(sum(times * branch.parameters for times, branch in branches)),
    )


def _totals(model: SuperModel, blocks: Sequence[BlockEntry], counter: FlopCounter) -> Totals:
    shared, alone = _counted(model.group)
    parameters = list(model.backbone.model.parameters())
    rows = _rows(blocks)
    sites = [site for job in model.group.jobs for site in job.sites.values()]
    branches = [(times, branch) for times, row in rows for branch in row.branches]
    cost = total(
        Cost(times * (row.flop_per_token or 0.0), times * row.flop_per_length)
        if row.flop_per_token is not None
        else Cost(unknown=(row.module,))
        for times, row in rows
    )
    training = training_cost(model.group, counter)
    return Totals(
        shared_parameters=sum(p.numel() for p in parameters),
        shared_bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
        adapter_parameters=round(sum(times * branch.parameters for times, branch in branches)),
        adapter_bytes=round(sum(times * row.adapter_bytes for times, row in rows)),
        sites=len({site.path for site in sites}),
        adapters=len(sites),
        lowered=sum(times for times, branch in branches if branch.lowered),
        shared_nodes=shared,
        branch_nodes=alone,
        flop_per_token=cost.flop_per_token,
        flop_per_length=cost.length,
        training_flop_per_token=None if training.unknown else round(training.token, 3),
        training_flop_per_length=None if training.unknown else round(training.length, 3),
    )


def _rows(blocks: Iterable[BlockEntry]) -> list[tuple[int, RowEntry]]:
    return [(max(1, len(block.layers)), row) for block in blocks for row in block.rows]


def _counted(group: GroupGraph) -> tuple[int, int]:
    """Operators that serve all jobs, and those that serve one, all layers counted."""
    counts = [0, 0]
    for times, graph in [(1, group.root)] + [
        (len(block.instances), block.graph) for block in group.blocks.values()
    ]:
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                counts[is_branch(node)] += times
    return counts[0], counts[1]


def _attention_entry(node: fx.Node, layers: list[str]) -> AttentionEntry:
    """What kind of attention a packed_attention node is."""
    args: Any = node.args
    query, key = args[0].meta["val"], args[1].meta["val"]
    causal, window, softcap, sinks, dropout = args[10:15]
    return AttentionEntry(
        layers, query.shape[-2], key.shape[-2], query.shape[-1], bool(causal), int(window),
        float(softcap), sinks is not None, float(dropout),
    )  # fmt: skip


def _attention_detail(entry: AttentionEntry) -> str:
    heads = f"{entry.heads} heads of {entry.head_dim}"
    if entry.key_value_heads != entry.heads:
        heads += f", {entry.key_value_heads} for K and V"
    parts = ["causal" if entry.causal else "both ways", heads]
    parts += [f"window {entry.window}"] if entry.window >= 0 else []
    parts += [f"soft cap {entry.softcap:g}"] if entry.softcap else []
    parts += ["sinks"] if entry.sinks else []
    return ", ".join(parts + ([f"dropout {entry.dropout:g}"] if entry.dropout else []))


def _full(module: str, layers: Sequence[str]) -> list[str]:
    """A module's path in the base for each layer; the layer "" is the root."""
    return [".".join(filter(None, (layer, module))) for layer in layers or ("",)]


def _ranks(sites: Iterable[AdapterSite]) -> list[int]:
    return sorted({site.rank for site in sites if site.rank})


@dataclass(slots=True)
class _ModuleNodes:
    """The nodes of one module.

    nodes       what runs for all jobs, the site's multi_lora_linear, or its part of one, included
    branches    what runs for one job alone, by job
    reasons     why it does, by job
    """

    module: str
    nodes: list[fx.Node] = field(default_factory=list)
    branches: dict[str, list[fx.Node]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def matters(self) -> bool:
        """Whether the module computes anything, reads weights or has a branch of a job."""
        moved = all(operator_name(node) in MOVES for node in self.nodes)
        return not moved or bool(self.branches) or self.reads("base") != set()

    @property
    def value(self) -> torch.Tensor | None:
        """The module's result, as a fake tensor."""
        for node in reversed(self.nodes):
            if (value := first_tensor(node.meta.get("val"))) is not None:
                return value
        return None

    @property
    def source(self) -> str:
        """The line of model code that the module's last operator comes from."""
        return next((n.meta["source"] for n in reversed(self.nodes) if n.meta.get("source")), "")

    @property
    def lowered(self) -> fx.Node | None:
        return next((n for n in self.nodes if is_adapted(n)), None)

    def reads(self, owner: str) -> set[fx.Node]:
        """The get_attr nodes of tensors of an owner ("base", "job") that the module reads."""
        return {
            source
            for node in (*self.nodes, *(n for nodes in self.branches.values() for n in nodes))
            for source in _read_by(node)
            if source.op == "get_attr" and _owner_of(source) == owner
        }

    def operator(self) -> str:
        names = Counter(operator_name(node) for node in self.nodes)
        principal = next((name for name in PRINCIPAL if name in names), None)
        if principal is not None:
            return CALLED.get(principal, principal)
        if set(names) >= RMS_NORM:
            return "rms_norm"
        counts = [(name, n) for name, n in names.items() if name not in MOVES]
        counts = counts or list(names.items())
        shown = [f"{name} ×{n}" if n > 1 else name for name, n in counts[:SHOWN_OPERATORS]]
        return ", ".join(shown) + (", …" if len(counts) > SHOWN_OPERATORS else "")


def _read_by(node: fx.Node) -> list[fx.Node]:
    """What a node reads; of an operator that several sites share, its own site's part."""
    site = lowered_site(node)
    return node.all_input_nodes if site is None else site.inputs


def _owner_of(node: fx.Node) -> str | None:
    ref = node.meta.get("tensor")
    return ref.owner if isinstance(ref, TensorRef) else None


def _modules(nodes: Iterable[fx.Node]) -> list[_ModuleNodes]:
    """The modules of a graph that matter, in the order in which they end."""
    modules: dict[str, _ModuleNodes] = {}
    for node in nodes:
        if node.op != "call_function" or first_tensor(node.meta.get("val")) is None:
            continue
        if serves_several(node):  # each of its sites has a result of its own
            continue
        alone = is_branch(node)
        key = str(node.meta.get("site" if alone else "path", ""))
        if (alone and not key) or node.meta.get("role") == "table":
            continue
        module = modules.pop(key, None) or _ModuleNodes(key)
        if alone:
            (job,) = node.meta["jobs"]
            module.branches.setdefault(job, []).append(node)
            if operator_name(node) == "segment_write":
                module.reasons[job] = str(node.meta.get("as_it_is", NOT_LOWERED))
        else:
            module.nodes.append(node)
        modules[key] = module
    return [module for module in modules.values() if module.matters]
