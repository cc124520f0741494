"""Let the layers of a Shared Super-Model run on nano-batches, a number that may change any time.

Each number is a variant: another root over the same layers, tensors and adapters. A variant is
made, and compiled as the model is, when it is first asked for, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tlora_fx.errors import NanoBatchesWrong
from tlora_fx.ir.graph import GroupGraph, placeholders
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.compiled import compile_method, row_sizes
from tlora_fx.model.module_builder import Container, hang
from tlora_fx.model.source import group_source
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.nano_batches import remember_starts
from tlora_fx.planners.nano_regions import (
    LAYERS,
    REGIONS,
    Region,
    nano_batched,
    outline_regions,
)
from tlora_fx.planners.overlap_graph import region_options

# Each count is compiled once, so a run never meets more variants than these.
COUNTS = (1, 2, 3, 4, 6, 8)


class NanoModel:
    """Cuts the rows of a model into nano-batches, also where others call the model.

    model     with its weights
    counts    of nano-batches that may be asked for
    layers    consecutive layers that are compiled as one graph
    inside    clone layers' code, not their calls: each layer is called once a row, and is compiled
              by itself. For layers whose weights are gathered when they are called (FSDP)
    count     nano-batches of the next rows; a row of fewer sequences is cut into fewer
    sources   code of the variants that were made
    """

    def __init__(
        self,
        model: SuperModel,
        counts: Sequence[int] = COUNTS,
        *,
        layers: int = 2,
        inside: bool = False,
    ) -> None:
        self.model = model
        self.counts = tuple(sorted({1, *counts}))
        self.layers = max(1, layers)
        self.inside = inside
        self.count = 1
        self.sources: dict[int, str] = {}
        self._variants: dict[int, nn.Module] = {}
        self._limit_bytes: int | None = None
        self._compiled_with: Mapping[str, Any] | None = None
        self._starts = list(placeholders(model.group.root)).index("cu_seqlens")
        # An instance's own attribute stands before its class's method.
        model.__dict__["_run"] = self._run

    def compile(self, *, limit_bytes: int | None = None, **options: Any) -> None:
        """Compile the model, and each variant when it is first run.

        A model that was compiled by itself, before or since, needs this only for a limit.

        limit_bytes   of values within a region (see overlap.py)
        options       as of `SuperModel.compile`; variants are compiled with the same, and by
                      Inductor under the overlap schedule
        """
        self._limit_bytes = limit_bytes
        self.model.compile(**options)

    def __call__(self, row: PackedBatch) -> Tensor:
        """Each job's sum of token losses over one row; see `SuperModel.forward`."""
        return cast(Tensor, self.model(row))

    def moved(self, row: PackedBatch, device: torch.device | str) -> PackedBatch:
        """A row on a device, whose cuts need not be read back from there.

        row      on the CPU
        """
        made = row.to(device)
        if made.cu_seqlens is not row.cu_seqlens:
            remember_starts(made.cu_seqlens, row.cu_seqlens)
        return made

    def count_for(self, sequences: int) -> int:
        """Into how many nano-batches a row of so many sequences is cut.

        raises    NanoBatchesWrong for a count that is not among the counts
        """
        if self.count not in self.counts:
            raise NanoBatchesWrong(
                "this number of nano-batches was not asked for at first",
                expected=", ".join(map(str, self.counts)),
                found=self.count,
            )
        most = max(1, min(self.count, sequences))
        return max(count for count in self.counts if count <= most)

    def _run(self, *inputs: Tensor) -> Tensor:
        """What the model runs in place of its own root."""
        count = self.count_for(len(inputs[self._starts]) - 1)
        root = self.model.net if count == 1 else self._variant(count)
        return cast(Tensor, root(*inputs))

    def _variant(self, count: int) -> nn.Module:
        if self.model.compiled_with is not self._compiled_with:
            self._compiled_with = self.model.compiled_with
            self._variants.clear()
        if count not in self._variants:
            group = nano_batched(self.model.group, count, inside=self.inside)
            make = self._cloned_inside if self.inside else self._cloned_calls
            self._variants[count] = make(group, count)
        return self._variants[count]

    def _cloned_calls(self, group: GroupGraph, count: int) -> nn.Module:
        regions = outline_regions(group, count, self.layers)
        root = self._hang(group, count)
        for region in regions:
            inner = Container()
            for place, path in enumerate(region.layers):
                inner.add_module(str(place), self.model.net.get_submodule(path))
            root.get_submodule(region.path).add_module(LAYERS, inner)
        if self._compiled_with is not None:
            options = region_options(self._compiled_with, self._limit_bytes)
            _compile_regions(root, group, regions, options)
        return root

    def _cloned_inside(self, group: GroupGraph, count: int) -> nn.Module:
        net = self.model.net
        own = {path: net.get_submodule(path) for path in self.model.layer_order()}
        hung = hang(group, self._source(group, count)).net
        clones = {path: hung.get_submodule(path) for path in own}
        for path, layer in own.items():
            _share(clones[path], layer)
        if self._compiled_with is not None:
            options = region_options(self._compiled_with, self._limit_bytes)
            for block in group.blocks.values():
                owners = [clones[path] for path in block.instances if path in clones]
                sizes = list(row_sizes(block.graph).values())
                if owners:
                    compile_method(owners, "forward", sizes, dict(options))
        for path, layer in own.items():
            known = layer.__dict__.get("forward")
            if not isinstance(known, _ByInputs):
                layer.__dict__["forward"] = known = _ByInputs(layer.forward)
            block = group.block_of(path)
            known.others[len(placeholders(block.graph))] = clones[path].forward
        _share(hung, net)
        return hung

    def _hang(self, group: GroupGraph, count: int) -> nn.Module:
        """A new root, over what the model has, and the regions that it calls."""
        root = hang(group, self._source(group, count)).net
        made = root._modules[REGIONS]
        _share(root, self.model.net)
        root._modules = {**root._modules, REGIONS: made}
        return root

    def _source(self, group: GroupGraph, count: int) -> str:
        self.sources[count] = group_source(group, self.model.backbone.title)
        return self.sources[count]


class _ByInputs:
    """The forward of a layer that several variants call, each with as many inputs of its own.

    plain    what runs a whole row
    others   by number of inputs
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self.others: dict[int, Callable[..., Any]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        return self.others.get(len(inputs), self.plain)(*inputs)


def _share(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the very tensors and children of another."""
    module._modules, module._parameters = other._modules, other._parameters
    module._buffers = other._buffers


def _compile_regions(
    root: nn.Module, group: GroupGraph, regions: Sequence[Region], options: Mapping[str, Any]
) -> None:
    """Compile each structure of regions once."""
    by_path = {region.path: region for region in regions}
    sizes = {name: row_sizes(block.graph) for name, block in group.blocks.items()}
    for block in group.blocks.values():
        if block.instances[0] not in by_path:
            continue
        inputs = by_path[block.instances[0]].inputs
        dynamic = [sizes[group.block_of(layer).name][name] for layer, name in inputs]
        owners = [root.get_submodule(path) for path in block.instances]
        compile_method(owners, "forward", dynamic, dict(options))
