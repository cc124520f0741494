"""Make the plain data of a dump from a Shared Super-Model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tlora_fx import __version__
from tlora_fx.graph import AdapterSite, Block, JobGraph, is_call, under
from tlora_fx.inspect.cost import Cost, Meter, total
from tlora_fx.inspect.rows import ModuleNodes, is_branch, modules_of, tensor_bytes
from tlora_fx.inspect.schema import (
    SCHEMA,
    Attention,
    BaseEntry,
    BlockEntry,
    Branch,
    Dropout,
    JobEntry,
    Listing,
    Note,
    Row,
    Totals,
)
from tlora_fx.passes.lower_loss import HEAD, LOSS
from tlora_fx.source import SHORT, class_name, size_names
from tlora_fx.supermodel import SuperModel
from tlora_fx.tracing.layers import layer_list

ops = torch.ops.tlora_fx
SOFTMAX = 4


def make_listing(model: SuperModel) -> Listing:
    """A Shared Super-Model as plain data; the model needs no weights."""
    return _Lister(model).listing()


class _Lister:
    """Reads one model's graphs."""

    def __init__(self, model: SuperModel) -> None:
        self.model, self.group = model, model.group
        self.sizes = size_names(self.group)
        self.meter = Meter(self.group.form, self.sizes)
        self.layers = layer_list(model.backbone.model)

    def listing(self) -> Listing:
        """All of it."""
        blocks = self._blocks()
        return Listing(
            schema=SCHEMA,
            version=__version__,
            base=self._base(),
            form=self.group.form,
            adapter_dtype=str(self.model.jobs[0].adapter_dtype),
            jobs=[self._job(job, blocks) for job in self.group.jobs],
            blocks=blocks,
            attention=self._attention(),
            dropouts=self._dropouts(),
            totals=self._totals(blocks),
            notes=[Note(by, text) for by, text in self.group.notes],
        )

    def _base(self) -> BaseEntry:
        backbone = self.model.backbone
        return BaseEntry(
            title=_short_path(backbone.title),
            architecture=type(backbone.model).__name__,
            dtype=str(backbone.dtype).removeprefix("torch."),
            layers=self.layers,
        )

    def _job(self, job: JobGraph, blocks: Iterable[BlockEntry]) -> JobEntry:
        sites = list(job.sites.values())
        adapted = [site for site in sites if site.rank]
        own = [
            (max(1, len(block.layers)), branch)
            for block in blocks
            for row in block.rows
            for branch in row.branches
            if branch.job == job.name
        ]
        return JobEntry(
            name=job.name,
            ranks=sorted({site.rank for site in adapted}),
            scalings=sorted({site.scaling for site in adapted}),
            dropouts=sorted({site.dropout for site in adapted}),
            kinds=list(dict.fromkeys(site.kind for site in sites)),
            targets=list(dict.fromkeys(site.path.rpartition(".")[2] for site in sites)),
            sites=len(sites),
            lowered=sum(layers for layers, branch in own if branch.lowered),
            parameters=round(sum(layers * branch.parameters for layers, branch in own)),
        )

    def _blocks(self) -> list[BlockEntry]:
        """The root before its layers, the layers by structure, the root after them, the loss."""
        before, inside, after = self._split_root()
        layers = [b for name, b in self.group.blocks.items() if name != HEAD]
        order = {layer: place for place, layer in enumerate(self.layers)}
        layers.sort(key=lambda block: order.get(block.instances[0], 0))
        head = self.group.blocks.get(HEAD)
        found = [self._block("Root", (), before)]
        for block in layers:
            entry = self._block(class_name(block), block.instances, block.graph.nodes, True)
            found.append(_with_reason(entry, self._why(block, layers[0])))
        for layer, nodes in inside.items():
            found.append(self._block("Root", (layer,), nodes))
        found.append(self._block("Root", (), after))
        if head is not None:
            entry = self._block(class_name(head), (), head.graph.nodes)
            entry.rows.append(self._loss(head))
            found.append(entry)
        return [block for block in found if block.rows]

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

    def _why(self, block: Block, first: Block) -> str:
        """What tells a structure of layers apart from the first one."""
        if block is first:
            return ""
        mine, theirs = block.instances[0], first.instances[0]
        if _block_name(self.group.base, mine) != _block_name(self.group.base, theirs):
            return "the base computes other things in these layers"
        names = [
            job.name for job in self.group.jobs if _block_name(job, mine) != _block_name(job, theirs)
        ]
        return "other adapters in these layers: " + ", ".join(names)

    def _block(
        self, name: str, layers: Sequence[str], nodes: Iterable[fx.Node], folded: bool = False
    ) -> BlockEntry:
        rows = [self._row(module, layers if folded else ("",)) for module in modules_of(nodes)]
        if not folded and layers:
            rows = [_relative(row, layers[0]) for row in rows]
        return BlockEntry(name, list(layers), folded, "", rows)

    def _row(self, module: ModuleNodes, layers: Sequence[str]) -> Row:
        branches = [
            found
            for job in self.group.jobs
            if (found := self._branch(module, job, layers)) is not None
        ]
        cost = total(map(self.meter.node, module.nodes))
        own = [branch.flop_per_token for branch in branches]
        known = [flop for flop in own if flop is not None]
        flop = cost.flop_per_token
        if flop is not None:
            whole = len(known) == len(own)
            flop = flop + sum(known) / len(self.group.jobs) if whole else None
        alone = total(self.meter.node(n) for nodes in module.branches.values() for n in nodes)
        value = module.value
        return Row(
            module=module.module,
            operator=module.operator(),
            detail=self._detail(module),
            shape=self._shape(value),
            dtype="" if value is None else _dtype(value),
            flop_per_token=flop,
            flop_per_length=cost.length,
            flop_per_row=cost.row + alone.row,
            weight_bytes=tensor_bytes(module.reads("base")),
            adapter_bytes=self._adapter_bytes(module, layers),
            role="shared",
            nodes=len(module.nodes),
            source=module.source,
            branches=branches,
        )

    def _branch(
        self, module: ModuleNodes, job: JobGraph, layers: Sequence[str]
    ) -> Branch | None:
        """What a job has at a module; layers are those that the module's graph stands for."""
        sites = [site for path in _full(module.module, layers) if (site := job.sites.get(path))]
        lowered = module.lowered
        if lowered is not None and job.name in lowered.meta["jobs"]:
            widths = sum(torch.Size(lowered.args[place].meta["val"].shape)[1] for place in (3, 4))  # type: ignore[union-attr]
            numbers = widths * sum(site.rank for site in sites) / len(sites)
            return Branch(job.name, _ranks(sites), "lora", True, None, numbers, 2 * numbers)
        if job.name not in module.branches:
            return None
        nodes = module.branches[job.name]
        cost = total(map(self.meter.node, nodes))
        tensors = {
            source
            for node in nodes
            for source in node.all_input_nodes
            if source.op == "get_attr" and source.meta["tensor"].owner == "job"
        }
        return Branch(
            job=job.name,
            ranks=_ranks(sites),
            kind=sites[0].kind if sites else "",
            lowered=False,
            as_it_is=module.reasons.get(job.name, ""),
            parameters=float(sum(torch.Size(n.meta["tensor"].shape).numel() for n in tensors)),
            flop_per_token=cost.flop_per_token,
        )

    def _adapter_bytes(self, module: ModuleNodes, layers: Sequence[str]) -> float:
        banks = [self.model.banks[p] for p in _full(module.module, layers) if p in self.model.banks]
        stored = sum(t.numel() * t.dtype.itemsize for bank in banks for t in (bank.a, bank.b))
        return stored / max(1, len(banks)) + tensor_bytes(module.reads("job"))

    def _detail(self, module: ModuleNodes) -> str:
        node = next((n for n in module.nodes if is_call(n, ops.packed_attention.default)), None)
        return "" if node is None else _attention_detail(_attention(node, []))

    def _shape(self, value: torch.Tensor | None) -> list[int | str]:
        shape = () if value is None else value.shape
        return [
            size if isinstance(size, int) else self.sizes.get(str(size), str(size))
            for size in shape
        ]

    def _loss(self, head: Block) -> Row:
        """The operator that turns logits into each job's loss sum."""
        node = next(n for n in self.group.root.nodes if n.op == "call_module" and n.target == LOSS)
        (logits,) = (n for n in head.graph.nodes if n.op == "output")
        shape = logits.args[0].meta["val"].shape  # type: ignore[union-attr]
        value = node.meta["val"]
        return Row(
            LOSS, "cross_entropy", "in chunks, on rows with a target only", self._shape(value),
            _dtype(value), float(SOFTMAX * shape[-1]), 0.0, 0.0, 0, 0.0, "loss", 1, "", [],
        )  # fmt: skip

    def _attention(self) -> list[Attention]:
        return [
            _attention(node, layers)
            for layers, node in self._calls(ops.packed_attention.default)
        ]

    def _dropouts(self) -> list[Dropout]:
        found = []
        for layers, node in self._calls(ops.keyed_dropout.default):
            rate = float(node.args[1].meta["rate"])  # type: ignore[union-attr]
            alone = list(node.meta["jobs"]) if is_branch(node) else self.group.job_names
            found.append(Dropout(layers, str(node.meta["path"]), rate, alone))
        return found

    def _calls(self, target: Any) -> Iterable[tuple[list[str], fx.Node]]:
        """Calls of an operator, each with the layers that run it."""
        for node in self.group.root.nodes:
            if is_call(node, target):
                path = str(node.meta.get("path", ""))
                yield [name for name in self.layers if under(path, name)], node
        for name, block in self.group.blocks.items():
            for node in block.graph.nodes:
                if is_call(node, target):
                    yield ([] if name == HEAD else list(block.instances)), node

    @cached_property
    def _counted(self) -> tuple[int, int]:
        """Operators that serve all jobs, and those that serve one, all layers counted."""
        counts = [0, 0]
        for times, graph in [(1, self.group.root)] + [
            (len(block.instances), block.graph) for block in self.group.blocks.values()
        ]:
            for node in graph.nodes:
                if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                    counts[is_branch(node)] += times
        return counts[0], counts[1]

    def _totals(self, blocks: Iterable[BlockEntry]) -> Totals:
        parameters = list(self.model.backbone.model.parameters())
        rows = [(max(1, len(block.layers)), row) for block in blocks for row in block.rows]
        sites = [site for job in self.group.jobs for site in job.sites.values()]
        own = [(times, branch) for times, row in rows for branch in row.branches]
        cost = total(
            Cost(times * (row.flop_per_token or 0.0), times * row.flop_per_length)
            if row.flop_per_token is not None
            else Cost(unknown=(row.module,))
            for times, row in rows
        )
        return Totals(
            shared_parameters=sum(p.numel() for p in parameters),
            shared_bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
            adapter_parameters=round(sum(times * branch.parameters for times, branch in own)),
            adapter_bytes=round(sum(times * row.adapter_bytes for times, row in rows)),
            sites=len({site.path for site in sites}),
            adapters=len(sites),
            lowered=sum(times for times, branch in own if branch.lowered),
            shared_nodes=self._counted[0],
            branch_nodes=self._counted[1],
            flop_per_token=cost.flop_per_token,
            flop_per_length=cost.length,
        )


def _attention(node: fx.Node, layers: list[str]) -> Attention:
    args: Any = node.args
    query, key = args[0].meta["val"], args[1].meta["val"]
    causal, window, softcap, sinks, dropout = args[10:15]
    return Attention(
        layers, query.shape[-2], key.shape[-2], query.shape[-1], bool(causal), int(window),
        float(softcap), sinks is not None, float(dropout),
    )  # fmt: skip


def _attention_detail(found: Attention) -> str:
    heads = f"{found.heads} heads of {found.head_dim}"
    if found.key_value_heads != found.heads:
        heads += f", {found.key_value_heads} for keys and values"
    parts = ["causal" if found.causal else "both ways", heads]
    parts += [f"window {found.window}"] if found.window >= 0 else []
    parts += [f"soft cap {found.softcap:g}"] if found.softcap else []
    parts += ["sinks"] if found.sinks else []
    return ", ".join(parts + ([f"dropout {found.dropout:g}"] if found.dropout else []))


def _full(module: str, layers: Sequence[str]) -> list[str]:
    """A module's path in the base for each layer; the layer "" is the root."""
    return [".".join(filter(None, (layer, module))) for layer in layers or ("",)]


def _ranks(sites: Iterable[AdapterSite]) -> list[int]:
    return sorted({site.rank for site in sites if site.rank})


def _relative(row: Row, layer: str) -> Row:
    from dataclasses import replace

    return replace(row, module=row.module[len(layer) + 1 :])


def _with_reason(entry: BlockEntry, why: str) -> BlockEntry:
    return BlockEntry(entry.name, entry.layers, entry.folded, why, entry.rows)


def _block_name(graph: JobGraph, layer: str) -> str:
    return next(block.name for block in graph.blocks.values() if layer in block.instances)


def _dtype(value: torch.Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _short_path(title: str) -> str:
    """A title that is a path below the working folder is told from there."""
    path = Path(title)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return title
