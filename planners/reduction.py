"""Gradients of all adapters in a few flat buffers, each summed by one all-reduce.

Gradients of banks become views of the buffers, so nothing is copied before or after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh

# Kernels and reductions choose their arithmetic by alignment: every gradient begins on a boundary.
BOUNDARY_BYTES = 256


class GradientBuckets:
    """The gradients of what a process trains, by dtype and by who has to agree on them.

    The half of an adapter that is whole while the other is cut over tp has a partial gradient on
    each process of tp; all else only over dp.
    """

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        partial = {id(leaf) for leaf in model.partial_sums()}
        sorted_leaves: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
        for leaf in trained_leaves(model):
            group = mesh.dp_tp if id(leaf) in partial else mesh.dp
            if group is not None:
                sorted_leaves.setdefault((group, leaf.dtype), []).append(leaf)
        self.buckets = [
            (group, _move_gradients(leaves)) for (group, _), leaves in sorted_leaves.items()
        ]
        model.forget_views()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum every gradient over the processes that hold parts of it."""
        for group, flat in self.buckets:
            dist.all_reduce(flat, group=group)


def trained_leaves(model: SuperModel) -> list[nn.Parameter]:
    """Every leaf that this process trains: halves of banks, and what jobs train outside of them."""
    leaves = model.net.parameters()
    return [leaf for leaf in leaves if leaf.requires_grad and not leaf.is_meta]


def _move_gradients(leaves: Sequence[nn.Parameter]) -> Tensor:
    """A flat buffer of zeros whose pieces are the gradients of these leaves."""
    size = leaves[0].element_size()
    step = max(1, BOUNDARY_BYTES // size)
    places = [0]
    for leaf in leaves:
        places.append(places[-1] + -(-leaf.numel() // step) * step)
    flat = torch.zeros(places[-1], dtype=leaves[0].dtype, device=leaves[0].device)
    for leaf, place in zip(leaves, places, strict=False):
        leaf.grad = flat[place : place + leaf.numel()].view(leaf.shape)
    return flat
