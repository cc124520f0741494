"""Many small tensors between a device and main memory, by few transfers.

A transfer of its own for each waits for the device as often, and where two processes share one, for
the other's turn as often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

#: Bytes that are moved at once: for so many there is a second copy on the device, and a buffer that
#: its driver reads and writes without a copy of its own.
_MOST = 1 << 23

_First = TypeVar("_First", str, Tensor)


@torch.no_grad()
def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory, each contiguous; those of one transfer are parts of one buffer."""
    found: dict[str, Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_cpu or not _is_plain(tensor):
            found[name] = tensor.detach().to(
                "cpu", copy=True, memory_format=torch.contiguous_format
            )
        else:
            alike[tensor.device, tensor.dtype].append((name, tensor.detach()))
    for named in alike.values():
        for some in _portions(named):
            found |= _fetched(some)
    return {name: found[name] for name in tensors}


def _fetched(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one device and dtype, by one transfer."""
    flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
    staging = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)
    parts = torch.split(staging.copy_(flat).clone(), [tensor.numel() for _, tensor in named])
    for (name, tensor), part in zip(named, parts, strict=True):
        yield name, part.view(tensor.shape)


@torch.no_grad()
def fill(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy values into tensors on any device.

    pairs    a tensor, and a value of its shape
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, value in pairs:
        together = value.is_cpu and not target.is_cpu and value.shape == target.shape
        if together and _is_plain(target) and _is_plain(value):
            alike[target.device, value.dtype].append((target, value))
        else:
            target.copy_(value)
    for (device, _), same in alike.items():
        for some in _portions(same):
            _send(some, device)


def _send(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Values of one dtype to tensors of one device, by one transfer."""
    sizes = [value.numel() for _, value in pairs]
    pinned = device.type == "cuda"
    staging = torch.empty(sum(sizes), dtype=pairs[0][1].dtype, pin_memory=pinned)
    torch.cat([value.reshape(-1) for _, value in pairs], out=staging)
    parts = torch.split(staging.to(device, non_blocking=pinned), sizes)
    shaped = [part.view(value.shape) for part, (_, value) in zip(parts, pairs, strict=True)]
    torch._foreach_copy_([target for target, _ in pairs], shaped)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _portions(entries: Sequence[tuple[_First, Tensor]]) -> Iterator[list[tuple[_First, Tensor]]]:
    """Entries whose tensors are moved at once."""
    some: list[tuple[_First, Tensor]] = []
    size = 0
    for entry in entries:
        if some and size + entry[1].nbytes > _MOST:
            yield some
            some, size = [], 0
        some.append(entry)
        size += entry[1].nbytes
    if some:
        yield some
