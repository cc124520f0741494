"""Lets kernels add the gradients of adapters to those that there are, in place of a later sum.

Where a step holds gradients already, its backward makes others, and adds them: each is written and
read once more than it need be. So whoever runs a backward names parameters and where their
gradients add up, and kernels that serve such a parameter add to that. Autograd is given zeros in
their place, which are one block of memory that nobody writes; who adds gradients afterwards leaves
them out. A parameter may be named only where a row reads it once: compilers may merge two equal
calls, and write a sum of two gradients where the first one stands. In short rows the operator of dX
adds dB, and the one of dA adds dA: whoever names parameters runs both, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNED = 16  # bytes, of a vector load
Kind = tuple[torch.device, torch.dtype]
# Of the process: autograd runs backwards in threads of its own. By the parameter's address.
_targets: dict[int, Tensor] = {}
# Captured graphs may read an earlier, smaller block: none is freed.
_blocks: dict[Kind, list[Tensor]] = {}


@contextmanager
def adding(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within it kernels add the gradients of parameters themselves, if they can.

    pairs   a parameter, and what its gradient is added to
    """
    named = [
        (leaf, target)
        for leaf, target in pairs
        if leaf.numel() and target.is_contiguous() and target.data_ptr() % ALIGNED == 0
    ]
    reserved = _reserve_zeros([target for _, target in named])
    taken = {leaf.data_ptr(): target for leaf, target in named if _kind(target) in reserved}
    _targets.update(taken)
    try:
        yield
    finally:
        for address in taken:
            _targets.pop(address, None)


def thrown_away(leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters with targets that nobody reads, which share one place.

    Each begins elsewhere in it: launches tell tensors by their addresses.
    """
    sizes = _largest(leaves)
    places = {
        (device, dtype): torch.empty(
            size + len(leaves) * ALIGNED // dtype.itemsize, dtype=dtype, device=device
        )
        for (device, dtype), size in sizes.items()
    }
    pairs = []
    for number, leaf in enumerate(leaves):
        first = number * ALIGNED // leaf.dtype.itemsize
        place = places[_kind(leaf)][first : first + leaf.numel()]
        pairs.append((leaf, place.view(leaf.shape)))
    return pairs


def targets_of(leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """Targets of the gradients of these parameters; None where some are to be given back."""
    if not _targets:
        return None
    targets: dict[int, Tensor] = {}
    for leaf in leaves:
        target = _targets.get(leaf.data_ptr())
        if target is None or (target.shape, target.dtype) != (leaf.shape, leaf.dtype):
            return None
        targets[target.data_ptr()] = target
    return list(targets.values()) if len(targets) == len(leaves) else None


def zeros_for(target: Tensor) -> Tensor:
    """Zeros of a target's shape, to be given back in place of what was added to it."""
    block = _blocks[_kind(target)][-1]
    return block[: target.numel()].view(target.shape)


def is_added(gradient: Tensor) -> bool:
    """Whether a gradient is what `zeros_for` gives: nothing is left to be added."""
    blocks = _blocks.get(_kind(gradient), ())
    return any(gradient.data_ptr() == block.data_ptr() for block in blocks)


def _reserve_zeros(targets: Sequence[Tensor]) -> set[Kind]:
    """Make blocks with zeros enough for these; of which there are such, for captures make none."""
    reserved = set()
    for kind, size in _largest(targets).items():
        blocks = _blocks.setdefault(kind, [])
        if not blocks or blocks[-1].numel() < size:
            device, dtype = kind
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                continue
            blocks.append(torch.zeros(size, dtype=dtype, device=device))
        reserved.add(kind)
    return reserved


def _largest(tensors: Iterable[Tensor]) -> dict[Kind, int]:
    sizes: dict[Kind, int] = {}
    for tensor in tensors:
        sizes[_kind(tensor)] = max(sizes.get(_kind(tensor), 0), tensor.numel())
    return sizes


def _kind(tensor: Tensor) -> Kind:
    return tensor.device, tensor.dtype
