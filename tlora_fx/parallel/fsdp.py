"""Shard the frozen base over replicas with PyTorch's FSDP2, and gather it layer by layer.

Adapters stay whole on every replica; FSDP2 does not know of them. Frozen weights have no gradient,
so nothing is reduced here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from tlora_fx.cost.plan import Plan
from tlora_fx.ir.graph import LOSS, under
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.peer_copies import SideStreams, copy_from_peers


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers that one call runs, one after the other.

    caller   the module that is called: the model, or a stage of a pipeline
    nodes    what the call computes, in order
    paths    of its layers, and at the end of the loss where the call computes it
    lowest   index in `paths` of the first that has a backward; None where none has
    """

    caller: nn.Module
    nodes: Sequence[fx.Node]
    paths: Sequence[str]
    lowest: int | None


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def shard_layer(model: SuperModel, plan: Plan, mesh: Mesh, path: str) -> None:
    """Shard one layer, or the loss; to be called as soon as its weights are there."""
    module = model.net.get_submodule(path)
    # The head's backward comes right after its forward, but where all forwards come first.
    keep = plan.keep_gathered or (path == LOSS and plan.schedule != "gpipe")
    if not _is_sharded(module):
        _shard(module, mesh, reshard_after_forward=not keep)


@dataclass(frozen=True, slots=True)
class Sharded:
    """Result of sharding.

    tables      for each span the paths of its embeddings
    gathering   streams on which weights are copied from peers; None where a collective gathers
    """

    tables: list[list[str]]
    gathering: SideStreams | None


def shard_base(model: SuperModel, plan: Plan, mesh: Mesh) -> Sharded:
    """Shard what is not yet sharded, and say what is gathered while what runs.

    To be called when all weights are there and the graph has its last form.
    """
    paths = [*model.layer_order(), LOSS]
    every = LayerSpan(model, list(model.group.root.nodes), paths, first_trained(model, paths))
    return shard_spans(model, model, [every], plan, mesh)


def shard_spans(
    model: SuperModel, root: nn.Module, spans: Sequence[LayerSpan], plan: Plan, mesh: Mesh
) -> Sharded:
    """Shard the layers and embeddings of a process, each to be gathered around its use.

    root        through whose call all layers of the process run
    spans   those of the process; the same on every process of dp
    """
    for span in spans:
        for path in span.paths:
            shard_layer(model, plan, mesh, path)
    tables = _tables(model, spans)
    for path in chain(*tables):
        _shard(model.net.get_submodule(path), mesh, reshard_after_forward=True)
    _shard(root, mesh, reshard_after_forward=False, only=())
    paths = [*chain(*(span.paths for span in spans)), *chain(*tables)]
    gathering = copy_from_peers([model.net.get_submodule(path) for path in paths], mesh)
    if gathering is not None:
        for span in spans:
            _tell(span.caller, gathering, mesh.device)
    for span, own in zip(spans, tables, strict=True):
        layers = [model.net.get_submodule(path) for path in span.paths]
        _prefetch(layers, span.lowest, root)
        _gather_around(span.caller, [model.net.get_submodule(path) for path in own], layers[0])
    return Sharded(tables, gathering)


def gathered_bytes(model: SuperModel) -> int:
    """Most bytes that weights copied from peers take at once.

    One layer's in use and the next one's.
    """
    layers = [model.net.get_submodule(path) for path in (*model.layer_order(), LOSS)]
    sizes = [sum(leaf.numel() * leaf.element_size() for leaf in _frozen(one)) for one in layers]
    return 2 * max(sizes)


def first_trained(model: SuperModel, paths: Sequence[str]) -> int:
    """The first layer that trains anything: what is below has no backward."""
    for index, path in enumerate(paths):
        if any(leaf.requires_grad for leaf in model.net.get_submodule(path).parameters()):
            return index
    return len(paths) - 1


def _shard(
    module: nn.Module,
    mesh: Mesh,
    *,
    reshard_after_forward: bool,
    only: Sequence[Tensor] | None = None,
) -> None:
    """Shard a module's frozen parameters of two or more dimensions."""
    from torch.distributed.fsdp import fully_shard

    assert mesh.device_mesh is not None
    wanted = {id(tensor) for tensor in (_frozen(module) if only is None else only)}
    ignored = {leaf for leaf in module.parameters() if id(leaf) not in wanted}
    with _without_buffers(module):
        fully_shard(
            module,
            mesh=mesh.device_mesh["dp"],
            reshard_after_forward=reshard_after_forward,
            ignored_params=ignored,
        )


def _frozen(module: nn.Module) -> list[nn.Parameter]:
    return [leaf for leaf in module.parameters() if not leaf.requires_grad and leaf.dim() > 1]


@contextmanager
def _without_buffers(module: nn.Module) -> Iterator[None]:
    """Hide buffers: FSDP2 would move the tables that kernels read on the host to the device."""
    hidden = [(inner, inner._buffers) for inner in module.modules()]
    for inner, _ in hidden:
        inner._buffers = {}
    try:
        yield
    finally:
        for inner, buffers in hidden:
            inner._buffers = buffers


def _tables(model: SuperModel, spans: Sequence[LayerSpan]) -> list[list[str]]:
    """Modules whose tensors one span reads before its first layer and never after: embeddings.

    What another span of the process reads too is no table: it stays whole.
    """
    read = [_read_directly(span) for span in spans]
    readers = Counter(chain(*read))
    called = [*model.layer_order(), LOSS]

    def is_table(path: str) -> bool:
        if not path or readers[path] > 1 or any(under(one, path) for one in called):
            return False
        module = model.net.get_submodule(path)
        return not _is_sharded(module) and bool(_frozen(module))

    return [[path for path, early in own.items() if early and is_table(path)] for own in read]


def _read_directly(span: LayerSpan) -> dict[str, bool]:
    """The modules whose tensors a call reads itself, and whether only before its first layer."""
    order = {node: index for index, node in enumerate(span.nodes)}
    first = span.paths[0]
    begin = next(order[n] for n in order if n.op == "call_module" and n.target == first)
    early_only: dict[str, bool] = {}
    for node in order:
        if node.op == "get_attr":
            path = str(node.target).rpartition(".")[0]
            early = all(order[user] < begin for user in node.users if user in order)
            early_only[path] = early_only.get(path, True) and early
    return early_only


def _prefetch(modules: Sequence[Any], lowest: int | None, nothing: nn.Module) -> None:
    """Gather each layer while the one before it runs, forwards and backwards.

    nothing   a module without shards: FSDP2 would guess what comes before the lowest
    """
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
    if lowest is None:
        return
    modules[lowest].set_modules_to_backward_prefetch([nothing])
    for before, module in pairwise(modules[lowest:]):
        module.set_modules_to_backward_prefetch([before])


def _tell(caller: nn.Module, gathering: SideStreams, device: torch.device) -> None:
    """Let gathers know the stream on which a span computes, forwards and backwards."""

    def begin(*_: object) -> None:
        gathering.begin(device)

    caller.register_forward_pre_hook(begin)


def _gather_around(caller: nn.Module, tables: Sequence[nn.Module], first: nn.Module) -> None:
    """Gather embeddings when a span is called, and let go of them before its first layer."""
    gathered: list[Any] = list(tables)
    following: Any = first

    def gather(*_: object) -> None:
        handles = [module.unshard(async_op=True) for module in gathered]
        following.unshard(async_op=True)
        for handle in handles:
            handle.wait()

    def let_go(*_: object) -> None:
        for module in gathered:
            module.reshard()

    caller.register_forward_pre_hook(gather)
    # Before FSDP2's own hook, which takes memory for the layer behind the first.
    first.register_forward_pre_hook(let_go, prepend=True)
