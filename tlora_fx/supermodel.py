"""The Shared Super-Model: a fused graph as an nn.Module that owns its tensors.

It is built on the meta device. `materialize` gives it the base's weights and makes room for the
adapters; from then on it trains. Its code is the text of `ssm.py`.
"""

from __future__ import annotations

import itertools
import linecache
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import networkx as nx
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from tlora_fx.backbone import Backbone
from tlora_fx.bank import AdapterBank
from tlora_fx.batch import PackedBatch
from tlora_fx.compiled import compile_method, row_sizes
from tlora_fx.errors import SuperModelMisuse
from tlora_fx.exported import export_net
from tlora_fx.graph import Block, GroupGraph, TensorRef, output_of, placeholders
from tlora_fx.job import Job
from tlora_fx.loss import ChunkedLoss
from tlora_fx.lowered import LoweredSite, lowered_sites
from tlora_fx.ops import room, site_id
from tlora_fx.passes.lower_loss import HEAD, LOSS
from tlora_fx.source import class_name, group_source
from tlora_fx.stored import stored_value
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
        self._reformed: list[tuple[nn.Module, str, str, TensorRef]] = []
        self._unused: dict[str, Tensor] = {}
        self._own: dict[str, dict[str, tuple[nn.Module, str]]] = {job.name: {} for job in jobs}
        self._banks: dict[str, AdapterBank] = {}
        self._weights: list[tuple[nn.Module, str, AdapterBank]] = []
        self._roomy = False
        self._parameters_of: dict[str, dict[str, nn.Parameter]] = {}
        self._inputs = tuple(placeholders(group.root))
        self.net = self._build()

    @property
    def banks(self) -> Mapping[str, AdapterBank]:
        """The adapter storage of every lowered site, by the site's path in the base."""
        return self._banks

    def forward(self, row: PackedBatch) -> Tensor:
        """Each job's sum of token losses over one row; without lower-loss, the logits.

        row       on the model's device
        returns   [J], float32 or the base's dtype where that is wider
        raises    SuperModelMisuse before `materialize`
        """
        self._demand_weights()
        return self._run(*(getattr(row, name) for name in self._inputs))

    def _run(self, *inputs: Tensor) -> Tensor:
        """The loss sums by the tensors of a row."""
        return cast(Tensor, self.net(*inputs))

    def compile(
        self, *, fullgraph: bool = True, dynamic: bool | None = None, **options: Any
    ) -> None:
        """Compile layer by layer, in place: each structure of layers once, whatever their number.

        The loss's chunks are compiled too; embeddings and the last norm run as they are. A model
        that was compiled without layers is compiled as a whole. Rows of any size run the same
        code. `torch.compile(model)` compiles everything as one graph instead.

        On CUDA the frozen weights of sites with adapters move into buffers with 64 or 128 rows and
        columns more, where adapters can stand behind them (see ops/room.py); a weight that two
        modules share stays where it is, as all do where a site's adapters need more. Values, names
        and shapes stay; the buffers of a weight [4096, 4096] are 3 % larger, or 6 %.

        fullgraph, dynamic, options   as of `torch.compile`; `dynamic=False` compiles anew for each
                                      number of tokens
        """
        options = {"fullgraph": fullgraph, "dynamic": dynamic, **options}
        self._roomy = True
        self._leave_room()
        layers = [block for block in self.group.blocks.values() if block.name != HEAD]
        if not layers:
            compile_method([self], "_run", list(row_sizes(self.group.root).values()), options)
            return
        for block in layers:
            modules = [self.net.get_submodule(path) for path in block.instances]
            compile_method(modules, "forward", list(row_sizes(block.graph).values()), options)
        loss = self._loss()
        compile_method([loss], "chunk", loss.chunk_sizes(), options)

    def export(self, *, max_targets: int = 16384) -> ExportedProgram:
        """The model as a `torch.export` program, to be saved by `torch.export.save`.

        The program is flat: layers are inlined, and blocks, roles and provenance are gone. It takes
        the tensors of a row by name, of any number of tokens, sequences and targets of these jobs,
        and returns each job's loss sum [J], with gradients. To load it takes torch, and
        `import tlora_fx.ops`, which registers the operators. It stays on the model's device.

        max_targets   the loss runs in chunks whose size is right for so many targets in a row;
                      rows with more are as right, in larger chunks
        raises        SuperModelMisuse before `materialize`
        """
        self._demand_weights()
        return export_net(self.net, self.group, self._loss(), max_targets)

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
        self._fill_other_forms(base, device)
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
        reformed = {name for _, _, name, _ in self._reformed} - self._copied()
        unused = {name for name in base if name not in self._base and name not in reformed}
        self._unused = {name: base[name].to(device) for name in unused}
        self.ready = True
        self._parameters_of.clear()
        self._leave_room()

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

    def _loss(self) -> ChunkedLoss:
        if HEAD not in self.group.blocks:
            raise SuperModelMisuse(
                "the model returns logits, not losses",
                expected="a pipeline with lower-loss",
                help="add lower-loss to the pipeline; it runs last",
            )
        return cast(ChunkedLoss, self.net.get_submodule(LOSS))

    def to_networkx(self) -> nx.MultiDiGraph:
        """The fused graph for networkx: root and blocks, each layer's code once.

        Nodes carry everything that `program.json` says of them; see `inspect.networks`.
        """
        from tlora_fx.inspect.networks import to_networkx
        from tlora_fx.inspect.node_entries import make_program

        return to_networkx(make_program(self.group, "compiled", self.backbone.title))

    def _fill_other_forms(self, base: Mapping[str, Tensor], device: torch.device) -> None:
        """Store frozen tensors in the forms that passes asked for."""
        for module, slot, name, ref in self._reformed:
            tensor = base.get(name, self.backbone.values.get(name))
            if tensor is None or ref.original is None or tensor.shape != ref.original.shape:
                raise SuperModelMisuse(
                    "a tensor of the base is missing or of another shape",
                    tensor=name,
                    expected=None if ref.original is None else ref.original.shape,
                    found=None if tensor is None else tuple(tensor.shape),
                    help="check that the checkpoint belongs to the base's config",
                )
            module._buffers[slot] = stored_value(ref, tensor.detach().to(device))

    def _copied(self) -> set[str]:
        """The tensors of the base of which a job trains a copy, which starts as they are."""
        names = [name.removeprefix(PEFT_PREFIX) for own in self._own.values() for name in own]
        return {name.replace(".modules_to_save.default.", ".") for name in names}

    def _leave_room(self) -> None:
        """Give the weights of a compiled model's sites room for adapters."""
        if not (self.ready and self._roomy):
            return
        slots = [_slot(*place) for places in self._base.values() for place in places]
        owners = Counter(slot.data_ptr() for slot in slots)
        for module, name, bank in self._weights:
            weight = _slot(module, name)
            if owners[weight.data_ptr()] == 1:
                weight.data = room.around(weight, len(bank.a))

    def _demand_weights(self) -> None:
        if not self.ready:
            raise SuperModelMisuse(
                "the model has no weights yet",
                help="use tlora_fx.Trainer, or call materialize() first",
            )

    def _build(self) -> nn.Module:
        classes = _run_source(self.source)
        root = cast(nn.Module, classes["Root"]())
        self._hang_tensors(root, self.group.root, "")
        for block in self.group.blocks.values():
            for layer in block.instances:
                module = cast(nn.Module, classes[class_name(block)]())
                if block.name == HEAD:
                    _place(root, LOSS, self._chunked_loss(module, block))
                    self._hang_tensors(module, block.graph, "")
                else:
                    _place(root, layer, module)
                    self._hang_tensors(module, block.graph, layer)
        return root

    def _chunked_loss(self, head: nn.Module, block: Block) -> ChunkedLoss:
        logits: Any = output_of(block.graph).args[0]
        tables = tuple(placeholders(block.graph))[1:]
        size = int(logits.meta["val"].shape[-1])
        return ChunkedLoss(head, size, tables, lines=self.group.form == "batch")

    def _hang_tensors(self, module: nn.Module, graph: fx.Graph, layer: str) -> None:
        for site in lowered_sites(graph):
            bank = self._hang_bank(module, site, layer)
            weight = site.arguments.get("weight")
            if isinstance(weight, fx.Node) and _is_of_base(weight):
                self._weights.append((*_owner_of(module, str(weight.target)), bank))
        for node in graph.nodes:
            if node.op == "get_attr":
                self._hang(module, node, layer)

    def _hang_bank(self, module: nn.Module, site: LoweredSite, layer: str) -> AdapterBank:
        path = f"{layer}.{site.path}" if layer else site.path
        sites = [
            graph.sites.get(path) if graph.name in site.branches else None
            for graph in self.group.jobs
        ]
        a, b = (site.arguments[name].meta["tensor"] for name in ("a", "b"))
        shape = (a.shape[1], b.shape[1])
        key = site_id(f"{path}.lora_dropout")
        bank = AdapterBank(sites, shape, a.dtype, key, self._bank_rows(site, layer))
        _place(module, f"{site.path}.lora", bank)
        self._banks[path] = bank
        return bank

    def _bank_rows(self, site: LoweredSite, layer: str) -> int:
        """How many rows a site's bank has: as many in every layer that shares code."""
        layers = self.group.block_of(layer).instances if layer else ("",)
        paths = [f"{path}.{site.path}".removeprefix(".") for path in layers]
        adapters = [
            [graph.sites[path] for graph in self.group.jobs
             if graph.name in site.branches and path in graph.sites]
            for path in paths
        ]  # fmt: skip
        return max(sum(own.rank for own in sites) for sites in adapters)

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
        elif ref.original is not None:
            name = f"{layer}.{ref.name}" if layer else ref.name
            owner.register_buffer(slot, empty, persistent=False)
            self._reformed.append((owner, slot, name, ref))
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


def _is_of_base(node: fx.Node) -> bool:
    """Whether a node reads a tensor of the base as it is stored there."""
    ref: TensorRef | None = node.meta.get("tensor") if node.op == "get_attr" else None
    return ref is not None and ref.owner == "base" and ref.original is None


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
    # Nobody can import this module, and Dynamo imports what a function's globals are named after.
    del namespace["__name__"]
    return namespace
