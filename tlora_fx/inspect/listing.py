"""Make the plain data of a dump from a Shared Super-Model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tlora_fx.inspect.row_maker import RowMaker, attention_of
from tlora_fx.inspect.rows import is_branch, modules_of
from tlora_fx.inspect.schema import (
    SCHEMA,
    Attention,
    BaseEntry,
    BlockEntry,
    Dropout,
    Listing,
    Note,
    Row,
)
from tlora_fx.inspect.totals import job_entry, totals_of
from tlora_fx.inspect.wording import layers_label
from tlora_fx.ir.graph import HEAD, Block, JobGraph, is_call, under
from tlora_fx.model.source import class_name
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.tracing.layers import layer_list
from tlora_fx.version import __version__

ops = torch.ops.tlora_fx


def make_listing(model: SuperModel) -> Listing:
    """A Shared Super-Model as plain data; the model needs no weights."""
    return _Lister(model).listing()


class _Lister:
    """Reads one model's graphs."""

    def __init__(self, model: SuperModel) -> None:
        self.model, self.group = model, model.group
        self.rows = RowMaker(model)
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
            jobs=[job_entry(job, blocks) for job in self.group.jobs],
            blocks=blocks,
            attention=self._attention(),
            dropouts=self._dropouts(),
            totals=totals_of(self.model, blocks, self.rows.meter),
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
            found.append(replace(entry, why=self._why(block, layers)))
        for layer, nodes in inside.items():
            found.append(self._block("Root", (layer,), nodes))
        found.append(self._block("Root", (), after))
        if head is not None:
            entry = self._block(class_name(head), (), head.graph.nodes)
            entry.rows.append(self.rows.loss(head))
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
        rows = [self.rows.row(module, layers if folded else ("",)) for module in modules_of(nodes)]
        if not folded and layers:
            rows = [_relative(row, layers[0]) for row in rows]
        return BlockEntry(name, list(layers), folded, "", rows)

    def _attention(self) -> list[Attention]:
        return [
            attention_of(node, layers) for layers, node in self._calls(ops.packed_attention.default)
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


def _relative(row: Row, layer: str) -> Row:
    return replace(row, module=row.module[len(layer) + 1 :])


def _block_name(graph: JobGraph, layer: str) -> str:
    return next(block.name for block in graph.blocks.values() if layer in block.instances)


def _short_path(title: str) -> str:
    """A title that is a path below the working folder is told from there."""
    path = Path(title)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return title
