"""Gradients of adapters that kernels add to those that there are, in place of a sum behind them.

Where a step holds gradients already, its backward makes others, and adds them: each is written and
read once more than it need be. So whoever runs a backward names the parameters and where their
gradients add up, and kernels that serve such a parameter add to that. Autograd is given zeros in
their place, which makes the sum right also where other operators read the same parameter. They are
one block of memory that nobody writes; who adds gradients afterwards leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNED = 16  # bytes, of a vector load
# Of the process: autograd runs backwards in threads of its own. By the parameter's address.
_targets: dict[int, Tensor] = {}
# Captured graphs may read an earlier, smaller block: none is freed.
_blocks: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}


@contextmanager
def adding(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within it kernels that can add the gradients of parameters themselves.

    pairs   a parameter, and what its gradient is added to
    """
    own = {
        leaf.data_ptr(): target
        for leaf, target in pairs
        if leaf.numel() and _is_plain(target) and _has_zeros(target)
    }
    _targets.update(own)
    try:
        yield
    finally:
        for address in own:
            _targets.pop(address, None)


def targets_of(leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """What gradients of these are to be added to; None where some are to be given back."""
    found = [_targets.get(leaf.data_ptr()) for leaf in leaves] if _targets else []
    targets = [
        target
        for leaf, target in zip(leaves, found, strict=False)
        if target is not None and (target.shape, target.dtype) == (leaf.shape, leaf.dtype)
    ]
    return targets if leaves and len(targets) == len(leaves) else None


def zeros_for(target: Tensor) -> Tensor:
    """Zeros of a target's shape, to be given back in place of what was added to it."""
    block = _blocks[target.device, target.dtype][-1]
    return block[: target.numel()].view(target.shape)


def is_added(gradient: Tensor) -> bool:
    """Whether a gradient is what `zeros_for` gives: nothing is left to be added."""
    blocks = _blocks.get((gradient.device, gradient.dtype), ())
    return any(gradient.data_ptr() == block.data_ptr() for block in blocks)


def _is_plain(target: Tensor) -> bool:
    """Whether kernels can write it as they write tensors of their own."""
    return target.is_contiguous() and target.data_ptr() % ALIGNED == 0


def _has_zeros(target: Tensor) -> bool:
    """Make a block that holds as many zeros; False where a capture forbids it."""
    blocks = _blocks.setdefault((target.device, target.dtype), [])
    if blocks and blocks[-1].numel() >= target.numel():
        return True
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    size = 1 << (target.numel() - 1).bit_length()
    blocks.append(torch.zeros(size, dtype=target.dtype, device=target.device))
    return True
