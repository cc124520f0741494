"""Parts of all captures of CUDA graphs: rows of their own, sums of gradients, failed captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.reads import parameter_reads
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.loss import segments_of_chunks
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.kernels import refresh
from tlora_fx.ops.kernels.added_gradients import adding, is_added, thrown_away


def overwrite(own: PackedBatch, row: PackedBatch) -> None:
    """Overwrite the row of a graph by another one with the same key, on the CPU."""
    for name, tensor in row.tensors().items():
        getattr(own, name).copy_(tensor, non_blocking=True)
    if own.terms is not None and row.terms is not None:
        own.terms.values.copy_(row.terms.values, non_blocking=True)
    refresh(own.segments, own.keys, own.target_segments, *segments_of_chunks(own.target_segments))


def copied(row: PackedBatch) -> PackedBatch:
    """The row in tensors of its own."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in row.tensors().items()}
    return replace(row, **copies, terms=None if row.terms is None else row.terms.unasked())


def add_gradients(losses: Tensor, model: nn.Module, kept: int) -> None:
    """Do `losses.sum().backward()`, with one sum over all parameters in place of one for each.

    Of a Llama layer's fourteen banks that would be as many kernels, each of a few microseconds.
    What is summed stays until the end, in the place of activations that are gone by then. Kernels
    of adapters add theirs themselves, where they may.

    losses   [J]; nothing is done where they depend on no parameter
    kept     bytes of those activations: larger gradients are added one by one
    """
    if not losses.requires_grad:
        return
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    if not may_add_together(leaves, kept):
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return
    with adding(added_by_kernels(model)):
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    add_together(leaves, found)


def throw_gradients_away(losses: Tensor, model: nn.Module, kept: int) -> None:
    """Start what `add_gradients` starts for these losses; the gradients that there are stay."""
    if not losses.requires_grad:
        return
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    pairs = added_by_kernels(model) if may_add_together(leaves, kept) else []
    with adding(thrown_away([leaf for leaf, _ in pairs])):
        torch.autograd.grad(losses.sum(), leaves, allow_unused=True)


def added_by_kernels(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Parameters whose gradients kernels of adapters may add, and what they add them to.

    Processes that train together sum gradients on the way to a parameter, and hooks change them
    there. Of a parameter that is read twice autograd, or a compiler, sums both gradients.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return []
    return [
        (leaf, leaf.grad)
        for leaf in adapters_read_once(model)
        if leaf.grad is not None and not (_is_watched(leaf) or leaf._backward_hooks)
    ]


# By a model's graph: the paths of its sites whose adapters are read once.
_once: WeakKeyDictionary[nn.Module, tuple[GroupGraph, frozenset[str]]] = WeakKeyDictionary()


def adapters_read_once(model: nn.Module) -> list[nn.Parameter]:
    """A and B of the sites of a Shared Super-Model that one operator reads, once in a row."""
    if not isinstance(model, SuperModel):
        return []
    group, paths = _once.get(model, (None, frozenset[str]()))
    if group is not model.group:
        reads: Counter[int] = Counter()
        for name, count in parameter_reads(model.group).items():
            path, _, side = name.rpartition(".lora.")
            if side in ("a", "b") and path in model.banks:
                # A module may stand at several paths.
                reads[id(getattr(model.banks[path], side))] += count
        paths = frozenset(
            path
            for path, bank in model.banks.items()
            if reads[id(bank.a)] == reads[id(bank.b)] == 1
        )
        _once[model] = model.group, paths
    banks = [model.banks[path] for path in model.banks if path in paths]
    return [leaf for bank in banks for leaf in (bank.a, bank.b) if leaf.requires_grad]


def may_add_together(leaves: Sequence[Tensor], kept: int) -> bool:
    """Whether gradients of these leaves fit where activations were, and each has one already."""
    large = sum(leaf.nbytes for leaf in leaves) > kept
    return not large and not any(leaf.grad is None or _is_watched(leaf) for leaf in leaves)


def add_together(leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add to the gradients of leaves what was found, where anything was."""
    pairs = [
        (leaf.grad, new)
        for leaf, new in zip(leaves, found, strict=True)
        if new is not None and not is_added(new)
    ]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def _is_watched(leaf: Tensor) -> bool:
    """Whether somebody waits for the moment at which a gradient has been added."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a capture failed for lack of memory, which may be there another time."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error)


def free_gpu_bytes(device: torch.device) -> int:
    """Bytes of a GPU that new tensors can have."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def forget_capture(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Restore streams, memory and random numbers after a capture that failed.

    torch leaves the stream of a capture, and tells its allocator and its generator of the end, only
    where it ends well.

    stream   which was the current one before the capture
    pool     in which the capture allocated
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # where the allocator was told
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator: Any = torch.cuda.default_generators[index]
    fresh: Any = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh)
