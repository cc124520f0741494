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

#: Bytes that are moved at once, for which the device holds a second copy.
_MOST = 1 << 26

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
    flat = torch.cat([_run_of(tensor) for _, tensor in named]).cpu()
    parts = torch.split(flat, [tensor.numel() for _, tensor in named])
    for (name, tensor), part in zip(named, parts, strict=True):
        turned = _is_turned(tensor)
        whole = part.view(tensor.shape[::-1] if turned else tensor.shape)
        yield name, whole.t().contiguous() if turned else whole


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
    flat = torch.cat([value.reshape(-1) for _, value in pairs]).to(device)
    parts = torch.split(flat, [value.numel() for _, value in pairs])
    shaped = [part.view(value.shape) for part, (_, value) in zip(parts, pairs, strict=True)]
    torch._foreach_copy_([target for target, _ in pairs], shaped)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _is_turned(tensor: Tensor) -> bool:
    """Whether it is the transposed view of a matrix that lies in rows."""
    return tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()


def _run_of(tensor: Tensor) -> Tensor:
    """Its numbers in one line, in the order of memory where they fill it."""
    return (tensor.t() if _is_turned(tensor) else tensor).reshape(-1)


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
