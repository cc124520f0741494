"""The Shared Super-Model: a fused graph as an nn.Module that owns its tensors.

It is built on the meta device. `materialize` gives it the base's weights and makes room for the
adapters; from then on it trains. Its code is the text of `ssm.py`.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from tlora_fx.backbone import Backbone
from tlora_fx.bank import AdapterBank
from tlora_fx.batch import PackedBatch
from tlora_fx.errors import SuperModelMisuse
from tlora_fx.graph import Block, GroupGraph, TensorRef, is_call, output_of, placeholders
from tlora_fx.job import Job
from tlora_fx.loss import ChunkedLoss
from tlora_fx.ops import site_id
from tlora_fx.passes.lower_loss import HEAD, LOSS
from tlora_fx.source import class_name, group_source
from tlora_fx.tracing.export import PEFT_PREFIX


class Container(nn.Module):
    """A module that only holds others; `container[0]` is its child named "0"."""

    def __getitem__(self, place: int) -> nn.Module:
        return cast(nn.Module, self._modules[str(place)])


class SuperModel(nn.Module):
    """Many LoRA jobs on one frozen base, as one model.

    group      the fused graph and the graphs that it was made of
    backbone   the frozen base
    jobs       in the order of every table
    net        the modules that run; base tensors keep the base's own names inside it
    """

    def __init__(self, group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> None:
        super().__init__()
        self.group = group
        self.backbone = backbone
        self.jobs = list(jobs)
        self.source = group_source(group, backbone.title)
        self.ready = False
        self._base: dict[str, list[tuple[nn.Module, str]]] = {}
        self._unused: dict[str, Tensor] = {}
        self._own: dict[str, dict[str, tuple[nn.Module, str]]] = {job.name: {} for job in jobs}
        self._banks: dict[str, AdapterBank] = {}
        self._parameters_of: dict[str, dict[str, nn.Parameter]] = {}
        self.net = self._build()

    @property
    def banks(self) -> Mapping[str, AdapterBank]:
        """The adapter storage of every lowered site, by the site's path in the base."""
        return self._banks

    def forward(self, row: PackedBatch) -> Tensor:
        """Each job's sum of token losses over one row.

        row       on the model's device
        returns   [J], float32 or the base's dtype where that is wider
        raises    SuperModelMisuse before `materialize`
        """
        if not self.ready:
            raise SuperModelMisuse(
                "the model has no weights yet",
                help="use tlora_fx.Trainer, or call materialize() first",
            )
        inputs = placeholders(self.group.root)
        return cast(Tensor, self.net(*(getattr(row, name) for name in inputs)))

    def materialize(self, base: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Take the base's weights and make room for adapters, all zero.

        base     tensors by canonical name; moved to the device where they are not there
        raises   SuperModelMisuse when one is missing or has another shape
        """
        device = torch.device(device)
        moved: dict[str, Tensor] = {}
        for name, places in self._base.items():
            tensor = base.get(name, self.backbone.values.get(name))
            expected = _slot(*places[0])
            if tensor is None or tensor.shape != expected.shape:
                raise SuperModelMisuse(
                    "a tensor of the base is missing or of another shape",
                    tensor=name,
                    expected=tuple(expected.shape),
                    found=None if tensor is None else tuple(tensor.shape),
                    help="check that the checkpoint belongs to the base's config",
                )
            moved[name] = tensor.detach().to(device, expected.dtype)
            for module, slot in places:
                _fill(module, slot, moved[name])
        for own in self._own.values():
            for module, slot in own.values():
                leaf = nn.Parameter(torch.zeros_like(_slot(module, slot), device=device))
                leaf.grad = torch.zeros_like(leaf)
                module._parameters[slot] = leaf
        for bank in self._banks.values():
            bank.materialize(device)
        for name, value in self.group.constants.items():
            for module in self.net.modules():
                if name in module._buffers:
                    module._buffers[name] = value.to(device)
        unused = {name for name in base if name not in self._base}
        self._unused = {name: base[name].to(device) for name in unused}
        self.ready = True
        self._parameters_of.clear()

    def job_parameters(self, job: str) -> dict[str, nn.Parameter]:
        """What a job trains, by PEFT's names.

        Where a bank holds it, value and gradient are views of the bank.
        """
        if job not in self._parameters_of:
            index = self.group.job_names.index(job)
            found = {name: _slot(*place) for name, place in self._own[job].items()}
            for path, bank in self._banks.items():
                if bank.serves(index):
                    a, b = bank.job_parameters(index)
                    found[f"{PEFT_PREFIX}{path}.lora_A.default.weight"] = a
                    found[f"{PEFT_PREFIX}{path}.lora_B.default.weight"] = b
            self._parameters_of[job] = dict(sorted(found.items()))  # type: ignore[arg-type]
        return self._parameters_of[job]

    def base_tensor_or_value(self, name: str) -> Tensor:
        """A tensor of the base by canonical name; one that only jobs' copies use, as it started.

        raises    SuperModelMisuse before `materialize`, or for a tensor that nobody has
        """
        if name in self._base:
            return _slot(*self._base[name][0])
        if name not in self._unused:
            raise SuperModelMisuse("the base has no such tensor", tensor=name, help="load it first")
        return self._unused[name]

    def _build(self) -> nn.Module:
        classes = _run_source(self.source)
        root = cast(nn.Module, classes["Root"]())
        self._hang_tensors(root, self.group.root, "")
        for block in self.group.blocks.values():
            for layer in block.instances:
                module = cast(nn.Module, classes[class_name(block)]())
                if block.name == HEAD:
                    _place(root, LOSS, self._loss(module, block))
                    self._hang_tensors(module, block.graph, "")
                else:
                    _place(root, layer, module)
                    self._hang_tensors(module, block.graph, layer)
        return root

    def _loss(self, head: nn.Module, block: Block) -> ChunkedLoss:
        logits: Any = output_of(block.graph).args[0]
        tables = tuple(placeholders(block.graph))[1:]
        size = int(logits.meta["val"].shape[-1])
        return ChunkedLoss(head, size, tables, lines=self.group.form == "batch")

    def _hang_tensors(self, module: nn.Module, graph: fx.Graph, layer: str) -> None:
        for node in graph.nodes:
            if is_call(node, torch.ops.tlora_fx.multi_lora_linear.default):
                self._hang_bank(module, node, layer)
        for node in graph.nodes:
            if node.op == "get_attr":
                self._hang(module, node, layer)

    def _hang_bank(self, module: nn.Module, node: fx.Node, layer: str) -> None:
        site = str(node.meta["site"])
        path = f"{layer}.{site}" if layer else site
        lowered = node.meta["branches"]
        sites = [
            graph.sites.get(path) if graph.name in lowered else None for graph in self.group.jobs
        ]
        a, b = (node.args[place].meta["tensor"] for place in (3, 4))  # type: ignore[union-attr]
        shape = (a.shape[1], b.shape[1])
        bank = AdapterBank(sites, shape, a.dtype, site_id(f"{path}.lora_dropout"))
        _place(module, f"{site}.lora", bank)
        self._banks[path] = bank

    def _hang(self, module: nn.Module, node: fx.Node, layer: str) -> None:
        ref: TensorRef = node.meta["tensor"]
        target = str(node.target)
        owner, slot = _owner_of(module, target)
        if slot in owner._parameters or slot in owner._buffers:
            return
        empty = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        if ref.owner == "job":
            name = f"{PEFT_PREFIX}{layer}.{ref.name}" if layer else ref.name
            owner._parameters[slot] = nn.Parameter(empty)
            self._own[node.meta["jobs"][0]][name] = (owner, slot)
        elif ref.owner == "base":
            name = f"{layer}.{ref.name}" if layer else ref.name
            floating = ref.dtype.is_floating_point
            owner._parameters[slot] = nn.Parameter(empty, requires_grad=False) if floating else None
            if not floating:
                del owner._parameters[slot]
                owner.register_buffer(slot, empty, persistent=False)
            self._base.setdefault(name, []).append((owner, slot))
        elif ref.owner == "constant":
            owner.register_buffer(slot, self.group.constants[ref.name], persistent=False)
        else:
            owner.register_buffer(slot, self._table(node, ref, layer), persistent=False)

    def _table(self, node: fx.Node, ref: TensorRef, layer: str) -> Tensor:
        """A table that a pass asked for: dropout rates, or a dropout's site."""
        if str(node.target).endswith(".rates"):
            return torch.full(ref.shape, node.meta["rate"], dtype=ref.dtype)
        inside, number = str(node.meta["site_path"]), int(node.meta["site_number"])
        path = ".".join(part for part in (layer, inside) if part) + (f"#{number}" if number else "")
        return torch.tensor(site_id(path), dtype=ref.dtype)


def _slot(module: nn.Module, name: str) -> Tensor:
    found = module._parameters.get(name)
    return cast(Tensor, found if found is not None else module._buffers[name])


def _fill(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


def _owner_of(module: nn.Module, target: str) -> tuple[nn.Module, str]:
    path, _, name = target.rpartition(".")
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, Container())
        module = cast(nn.Module, module._modules[part])
    return module, name


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Hang a module at a path; what containers already hung there move into it."""
    owner, name = _owner_of(root, path)
    before = owner._modules.get(name)
    for child, inner in (before._modules if before is not None else {}).items():
        module.add_module(child, inner)
    owner.add_module(name, module)


_SOURCES = itertools.count(1)


def _run_source(text: str) -> dict[str, Any]:
    """Execute generated source under a name of its own, so that tracebacks show its lines."""
    file = f"<tlora_fx ssm {next(_SOURCES)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": Path(file).stem}
    exec(compile(text, file, "exec"), namespace)  # noqa: S102  (our own printed graph)
    return namespace
