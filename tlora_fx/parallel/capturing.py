"""What captures of CUDA graphs share: rows of their own, sums of gradients, and failed captures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.loss import segments_of_chunks
from tlora_fx.ops.kernels import refresh
from tlora_fx.ops.kernels.added_gradients import adding, is_added


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
    What is summed stays until the end, in the place of activations that are gone by then. Where one
    process trains, kernels of adapters add theirs themselves.

    losses   [J]; nothing is done where they depend on no parameter
    kept     bytes of those activations: larger gradients are added one by one
    """
    if not losses.requires_grad:
        return
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    if not may_add_together(leaves, kept):
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return
    with adding_to(leaves, [leaf.grad for leaf in leaves]):
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    add_together(leaves, found)


def throw_gradients_away(losses: Tensor, model: nn.Module) -> None:
    """Start what `add_gradients` starts for these losses; the gradients that there are stay."""
    if not losses.requires_grad:
        return
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    # Whatever stands there in the end: one place for all, for activations need the rest of memory.
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for leaf in leaves:
        kind = leaf.device, leaf.dtype
        sizes[kind] = max(sizes.get(kind, 0), leaf.numel())
    places = {
        (device, dtype): torch.empty(size, dtype=dtype, device=device)
        for (device, dtype), size in sizes.items()
    }
    targets = [places[leaf.device, leaf.dtype][: leaf.numel()].view(leaf.shape) for leaf in leaves]
    with adding_to(leaves, targets):
        torch.autograd.grad(losses.sum(), leaves, allow_unused=True)


def adding_to(
    leaves: Sequence[Tensor], targets: Sequence[Tensor | None]
) -> AbstractContextManager[None]:
    """Within it kernels of adapters add gradients of leaves to these, where they may.

    Processes that train together sum gradients on the way to a leaf, and hooks change them there.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return nullcontext()
    pairs = zip(leaves, targets, strict=True)
    return adding(
        (leaf, target)
        for leaf, target in pairs
        if target is not None and not (_is_watched(leaf) or leaf._backward_hooks)
    )


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
