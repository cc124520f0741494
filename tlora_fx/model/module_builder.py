"""Build the modules that run a fused graph, with its tensors and adapter banks, all empty."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    PEFT_PREFIX,
    Block,
    GroupGraph,
    Pieces,
    TensorRef,
    is_call,
    output_of,
    placeholders,
)
from tlora_fx.ir.lora_sites import EXPERTS, LoweredSite, lowered_sites
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.adapter_bank import AdapterBank
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.model.source import class_name
from tlora_fx.ops import site_id


class Container(nn.Module):
    """A module that only holds others; `container[0]` is its child named "0"."""

    def __getitem__(self, index: int) -> nn.Module:
        return cast(nn.Module, self._modules[str(index)])


class TensorLocation(NamedTuple):
    """Location where a tensor is stored.

    path    of the tensor in the whole net
    cut     how it is cut where processes hold pieces
    """

    module: nn.Module
    slot: str
    path: str
    cut: Pieces | None = None

    @property
    def tensor(self) -> Tensor:
        """Tensor that is stored there."""
        parameter = self.module._parameters.get(self.slot)
        return cast(Tensor, parameter if parameter is not None else self.module._buffers[self.slot])

    def fill(self, tensor: Tensor) -> None:
        """Store a frozen tensor there."""
        if self.slot in self.module._parameters:
            self.module._parameters[self.slot] = nn.Parameter(tensor, requires_grad=False)
        else:
            self.module._buffers[self.slot] = tensor


class Reformed(NamedTuple):
    """Frozen tensors of the base, by name, that are stored as one in another form."""

    location: TensorLocation
    names: tuple[str, ...]
    ref: TensorRef


class Weight(NamedTuple):
    """The frozen weight of a site, and its adapters."""

    location: TensorLocation
    bank: AdapterBank


@dataclass(slots=True)
class ModuleLayout:
    """The modules of a fused graph, and where their tensors are.

    base       frozen tensors by the base's names
    reformed   frozen tensors in other forms
    own        what one job trains outside of banks: by job, by PEFT's name
    again      what one job trains and two modules read: the job, and both locations
    banks      adapters of every lowered site, by its path in the base
    homes      where each bank's site is in the net, by the same path
    weights    frozen weights of sites, those together that one operator multiplies with
    """

    net: nn.Module
    base: dict[str, list[TensorLocation]] = field(default_factory=dict)
    reformed: list[Reformed] = field(default_factory=list)
    own: dict[str, dict[str, TensorLocation]] = field(default_factory=dict)
    again: list[tuple[str, TensorLocation, TensorLocation]] = field(default_factory=list)
    banks: dict[str, AdapterBank] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    weights: list[list[Weight]] = field(default_factory=list)

    def held_by_layer(
        self, layers: Sequence[str], part: LocalShard
    ) -> dict[str, list[tuple[str | Reformed, TensorLocation]]]:
        """Tensors of the base that a process takes, by layer; those of no layer at the end."""
        by_layer: dict[str, list[tuple[str | Reformed, TensorLocation]]] = {
            name: [] for name in (*layers, "")
        }
        every: list[tuple[str | Reformed, TensorLocation]] = [
            (name, location) for name, places in self.base.items() for location in places
        ]
        every += [(entry, entry.location) for entry in self.reformed]
        known = set(layers)
        for name, location in every:
            if part.holds(location.path):
                parts = location.path.split(".")
                paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
                by_layer[next((path for path in paths if path in known), "")].append(
                    (name, location)
                )
        return by_layer

    def held_banks(self, part: LocalShard) -> dict[str, AdapterBank]:
        """The banks of a process, by path."""
        return {path: bank for path, bank in self.banks.items() if part.holds(self.homes[path])}

    def copied_names(self) -> set[str]:
        """The tensors of the base of which a job trains a copy, which starts as they are."""
        names = [name.removeprefix(PEFT_PREFIX) for own in self.own.values() for name in own]
        return {name.replace(".modules_to_save.default.", ".") for name in names}


def build_module(group: GroupGraph, source: str) -> ModuleLayout:
    """Modules of the classes in `source`, with all tensors of the group's graphs on meta."""
    classes = run_source(source)
    root = cast(nn.Module, classes["Root"]())
    builder = _TensorBuilder(group, ModuleLayout(root, own={name: {} for name in group.job_names}))
    builder.add_tensors(root, group.root, "")
    for block in group.blocks.values():
        for layer in block.instances:
            module = cast(nn.Module, classes[class_name(block)]())
            if block.name == HEAD:
                _add_module(root, LOSS, _chunked_loss(group, module, block))
                builder.add_tensors(module, block.graph, "", f"{LOSS}.head")
            else:
                _add_module(root, layer, module)
                builder.add_tensors(module, block.graph, layer, layer)
    return builder.layout


class _TensorBuilder:
    """Stores the tensors of one graph after the other in its modules."""

    def __init__(self, group: GroupGraph, layout: ModuleLayout) -> None:
        self.group, self.layout = group, layout

    def add_tensors(self, module: nn.Module, graph: fx.Graph, layer: str, within: str = "") -> None:
        """Store empty what a graph reads.

        layer    path of the layer in the base, "" for the root and the head
        within   path of `module` in the net
        """
        weights: dict[fx.Node, list[Weight | None]] = {}
        for site in lowered_sites(graph):
            bank = self.layout.banks.get(_joined(layer, site.path)) or self._bank(
                module, site, layer
            )
            self.layout.homes[_joined(layer, site.path)] = _joined(within, site.path)
            weight = site.arguments.get("weight")
            found = None
            if isinstance(weight, fx.Node) and _is_of_base(weight):
                found = Weight(_location(module, weight, within), bank)
            weights.setdefault(site.call, []).append(found)
        for served in weights.values():
            known = [weight for weight in served if weight is not None]
            whole = len(known) == len(served)
            self.layout.weights += [known] if whole else [[weight] for weight in known]
        # The B of all jobs on experts: kernels read each expert's columns.
        by_column = {
            lower
            for node in graph.nodes
            if is_call(node, EXPERTS)
            for lower in cast(Sequence[fx.Node], node.args[6])
        }
        for node in graph.nodes:
            if node.op == "get_attr":
                location = _location(module, node, within)
                self._tensor(location, node, layer, by_column=node in by_column)

    def _bank(self, module: nn.Module, site: LoweredSite, layer: str) -> AdapterBank:
        path = _joined(layer, site.path)
        sites = [
            graph.sites.get(path) if graph.name in site.branches else None
            for graph in self.group.jobs
        ]
        a, b = (site.arguments[name].meta["tensor"] for name in ("a", "b"))
        shape = (a.shape[1], b.shape[1])
        key = site_id(f"{path}.lora_dropout")
        slots, cuts = self.group.open, (a.shard, b.shard)
        if slots is None:
            rows = self._bank_rows(site, layer)
            bank = AdapterBank(sites, shape, a.dtype, key, rows, cuts)
        else:
            nobody = [None] * len(sites)
            bank = AdapterBank(nobody, shape, a.dtype, key, slots.rows, cuts)
            bank.open(slots.rank)
        _add_module(module, f"{site.path}.lora", bank)
        self.layout.banks[path] = bank
        return bank

    def _bank_rows(self, site: LoweredSite, layer: str) -> int:
        """How many rows a site's bank has: as many in every layer that shares code."""
        layers = self.group.block_of(layer).instances if layer else ("",)
        paths = [_joined(path, site.path) for path in layers]
        adapters = [
            [graph.sites[path] for graph in self.group.jobs
             if graph.name in site.branches and path in graph.sites]
            for path in paths
        ]  # fmt: skip
        return max(sum(own.rank for own in sites) for sites in adapters)

    def _tensor(
        self, location: TensorLocation, node: fx.Node, layer: str, *, by_column: bool
    ) -> None:
        ref: TensorRef = node.meta["tensor"]
        owner, slot = location.module, location.slot
        if slot in owner._parameters or slot in owner._buffers:
            return
        empty = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        name = _joined(layer, ref.name)
        if by_column:
            empty = torch.empty(ref.shape[::-1], dtype=ref.dtype, device="meta").t()
        if ref.owner == "job":
            owner._parameters[slot] = nn.Parameter(empty)
            peft = f"{PEFT_PREFIX}{name}" if layer else ref.name
            job = str(node.meta["jobs"][0])
            first = self.layout.own[job].setdefault(peft, location)
            if first is not location:
                owner._parameters[slot] = cast(nn.Parameter, first.tensor)
                self.layout.again.append((job, first, location))
        elif ref.originals:
            owner.register_buffer(slot, empty, persistent=False)
            names = tuple(_joined(layer, original.name) for original in ref.originals)
            self.layout.reformed.append(Reformed(location, names, ref))
        elif ref.owner == "base":
            if ref.dtype.is_floating_point:
                owner._parameters[slot] = nn.Parameter(empty, requires_grad=False)
            else:
                owner.register_buffer(slot, empty, persistent=False)
            self.layout.base.setdefault(name, []).append(location)
        elif ref.owner == "constant":
            owner.register_buffer(slot, self.group.constants[ref.name], persistent=False)
        else:
            owner.register_buffer(slot, _table(node, ref, layer), persistent=False)


def _table(node: fx.Node, ref: TensorRef, layer: str) -> Tensor:
    """A table that a pass asked for: dropout rates, or a dropout's site."""
    if str(node.target).endswith(".rates"):
        return torch.full(ref.shape, node.meta["rate"], dtype=ref.dtype)
    inside, number = str(node.meta["site_path"]), int(node.meta["site_number"])
    path = _joined(layer, inside) + (f"#{number}" if number else "")
    return torch.tensor(site_id(path), dtype=ref.dtype)


def _chunked_loss(group: GroupGraph, head: nn.Module, block: Block) -> ChunkedLoss:
    logits: Any = output_of(block.graph).args[0]
    tables = tuple(placeholders(block.graph))[1:]
    size = int(logits.meta["val"].shape[-1])
    shards, lines = group.vocabulary // size, group.form == "batch"
    trained = any(_is_trained(node) for node in block.graph.nodes)
    return ChunkedLoss(head, size, tables, lines=lines, shards=shards, frozen=not trained)


def _is_trained(node: fx.Node) -> bool:
    """Whether a node reads a tensor of a job, or the adapters of a lowered site."""
    ref: TensorRef | None = node.meta.get("tensor") if node.op == "get_attr" else None
    return ref is not None and ref.owner not in ("base", "constant")


def _is_of_base(node: fx.Node) -> bool:
    """Whether a node reads a tensor of the base as it is stored there."""
    ref: TensorRef | None = node.meta.get("tensor") if node.op == "get_attr" else None
    return ref is not None and ref.owner == "base" and not ref.originals


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _location(module: nn.Module, node: fx.Node, within: str) -> TensorLocation:
    """Where a get_attr node's tensor is stored."""
    target = str(node.target)
    owner, slot = _owner_of(module, target)
    return TensorLocation(owner, slot, _joined(within, target), node.meta["tensor"].shard)


def _owner_of(module: nn.Module, target: str) -> tuple[nn.Module, str]:
    path, _, name = target.rpartition(".")
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, Container())
        module = cast(nn.Module, module._modules[part])
    return module, name


def _add_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path; what a container holds there moves into it."""
    owner, name = _owner_of(root, path)
    before = owner._modules.get(name)
    for child, inner in (before._modules if before is not None else {}).items():
        module.add_module(child, inner)
    owner.add_module(name, module)


_SOURCES = itertools.count(1)


def run_source(text: str) -> dict[str, Any]:
    """Execute generated source under a name of its own, so that tracebacks show its lines."""
    file = f"<tlora_fx ssm {next(_SOURCES)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": Path(file).stem}
    exec(compile(text, file, "exec"), namespace)  # noqa: S102  (our own printed graph)
    # Nobody can import this module, and Dynamo imports what a function's globals are named after.
    del namespace["__name__"]
    return namespace
