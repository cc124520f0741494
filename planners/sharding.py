"""Shard the frozen base over replicas with PyTorch's FSDP2, and gather it layer by layer.

Adapters stay whole on every replica; FSDP2 does not know of them. Frozen weights have no gradient,
so nothing is reduced here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tlora_fx.graph import under
from tlora_fx.passes.lower_loss import LOSS
from tlora_fx.planners.mesh import Mesh
from tlora_fx.planners.peer_copies import copy_from_peers
from tlora_fx.planners.plan import Plan
from tlora_fx.supermodel import SuperModel


def shard_layer(model: SuperModel, plan: Plan, mesh: Mesh, path: str) -> None:
    """Shard one layer, or the loss; to be called as soon as its weights are there."""
    module = model.net.get_submodule(path)
    # The head's backward comes right after its forward.
    keep = plan.keep_gathered or path == LOSS
    if not isinstance(module, FSDPModule):
        _shard(module, mesh, reshard_after_forward=not keep)


def shard_base(model: SuperModel, plan: Plan, mesh: Mesh) -> None:
    """Shard what is not yet sharded, and say what is gathered while what runs.

    To be called when all weights are there and the graph has its last form.
    """
    layers = model.layer_order()
    for path in (*layers, LOSS):
        shard_layer(model, plan, mesh, path)
    first, *_ = (model.net.get_submodule(path) for path in layers)
    tables = [module for module in _tables_before(model, layers[0]) if _frozen(module)]
    for module in tables:
        _shard(module, mesh, reshard_after_forward=True)
    _shard(model, mesh, reshard_after_forward=False, only=())
    copy_from_peers([model.net.get_submodule(path) for path in (*layers, LOSS)] + tables, mesh)
    _prefetch(model, [*layers, LOSS])
    _gather_around(model, tables, first)


def _shard(
    module: nn.Module,
    mesh: Mesh,
    *,
    reshard_after_forward: bool,
    only: Sequence[Tensor] | None = None,
) -> None:
    """Shard a module's frozen parameters of two or more dimensions."""
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


def _tables_before(model: SuperModel, first: str) -> list[nn.Module]:
    """Modules whose tensors the root reads before its first layer and never after: embeddings."""
    nodes = list(model.group.root.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    begin = next(order[n] for n in nodes if n.op == "call_module" and n.target == first)
    found: dict[str, bool] = {}
    for node in nodes:
        if node.op == "get_attr":
            path = str(node.target).rpartition(".")[0]
            early = all(order[user] < begin for user in node.users)
            found[path] = found.get(path, True) and early
    inner = [path for path, early in found.items() if path and early and not under(first, path)]
    modules = [model.net.get_submodule(path) for path in inner]
    return [module for module in modules if not isinstance(module, FSDPModule)]


def _prefetch(model: SuperModel, paths: Sequence[str]) -> None:
    """Gather each layer while the one before it runs, forwards and backwards."""
    modules: list[Any] = [model.net.get_submodule(path) for path in paths]
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
    lowest = _lowest_with_backward(model, paths)
    for place in range(lowest + 1, len(modules)):
        modules[place].set_modules_to_backward_prefetch([modules[place - 1]])


def _lowest_with_backward(model: SuperModel, paths: Sequence[str]) -> int:
    """The first layer that trains anything: what is below has no backward."""
    for place, path in enumerate(paths):
        if any(leaf.requires_grad for leaf in model.net.get_submodule(path).parameters()):
            return place
    return len(paths) - 1


def _gather_around(model: SuperModel, tables: Sequence[nn.Module], first: nn.Module) -> None:
    """Gather embeddings when the model is called, and let go of them before its first layer."""
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

    model.register_forward_pre_hook(gather)
    first.register_forward_pre_hook(let_go)
