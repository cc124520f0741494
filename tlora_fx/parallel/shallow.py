"""A model of few of its layers, whose compiled code is that of the whole model.

`torch.compile` makes code for each structure of layers, and other code for a layer whose input
needs no gradient. A model that keeps one layer of each such kind, its embeddings and its loss gives
rise to the same code, and takes a small part of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import copy_graph
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.stages import cut_stages, legal_cuts

# Of random weights: sums stay finite.
_DEVIATION = 0.02


def why_not_shallow(model: SuperModel) -> str:
    """Why no layer of a model can be left out, "" where layers can."""
    layers = model.layer_order()
    if not layers:
        return "the model was compiled without layers"
    if not model.is_of_graphs:
        return "somebody edited the model's code"
    if legal_cuts(model) != tuple(range(1, len(layers))):
        return "more than one value travels from layer to layer"
    return ""


def shallow(model: SuperModel) -> SuperModel:
    """Another model of few of the layers of a model, without weights.

    model    without weights; `why_not_shallow` has nothing against it
    """
    group = replace(model.group, root=_shallow_root(model))
    return SuperModel(group, model.backbone, model.jobs, model.resolve)


def _shallow_root(model: SuperModel) -> fx.Graph:
    root = copy_graph(model.group.root)
    original: dict[fx.Node, fx.Node] = dict(zip(model.group.root.nodes, root.nodes, strict=True))
    cuts = range(1, len(model.layer_order()))
    stages = cut_stages(model, cuts)
    kinds: set[tuple[str, bool]] = set()
    given: dict[fx.Node, fx.Node] = {}
    for stage in stages:
        kind = model.group.block_of(stage.layers[0]).name, stage.needs_grad
        source = stage.source
        if source is not None and not stage.last and kind in kinds:
            below = original[source]
            given[original[stage.result]] = given.get(below) or below
        kinds.add(kind)
    for result, below in given.items():
        result.replace_all_uses_with(below)
    for node in reversed(list(root.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            root.erase_node(node)
    root.lint()
    return root


def _read_by(root: fx.Graph) -> LocalShard:
    """The modules and tensors that a root reads."""
    read = [str(node.target) for node in root.nodes if node.op in ("get_attr", "call_module")]
    return LocalShard(frozenset(read))


def shallow_bytes(model: SuperModel) -> int:
    """Bytes of the weights and adapters that `shallow` keeps of a model."""
    part = _read_by(_shallow_root(model))
    named = (*model.net.named_parameters(), *model.net.named_buffers())
    return sum(tensor.nbytes for name, tensor in named if part.holds(name))


def fill_at_random(model: SuperModel, device: torch.device, part: LocalShard | None = None) -> None:
    """Give a model random weights and zero adapters; the rest stays on meta.

    part   what gets them; None: what the model's root reads
    """
    model.materialize(_RandomBase(model, device), device, part or _read_by(model.group.root))


class _RandomBase(Mapping[str, Tensor]):
    """Tensors of a base by canonical name, as far as they are not known drawn when asked for."""

    def __init__(self, model: SuperModel, device: torch.device) -> None:
        self._known, self._shapes = model.backbone.values, model.base_shapes()
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        if name in self._known:
            return self._known[name]
        shape = self._shapes[name]
        blank = torch.zeros(shape.shape, dtype=shape.dtype, device=self._device)
        drawn = blank.is_floating_point() and blank.itemsize > 1
        return blank.normal_(std=_DEVIATION) if drawn else blank

    def __iter__(self) -> Iterator[str]:
        # All that is held is asked for by name.
        return iter(())

    def __len__(self) -> int:
        return 0
