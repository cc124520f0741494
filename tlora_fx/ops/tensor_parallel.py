"""`tlora_fx::tp_copy`, `tp_reduce` and `tp_cross_entropy`: where tensor-parallel processes meet.

    tp_copy            identity; the backward sums gradients over the group
    tp_reduce          sums over the group; the backward is the identity
    tp_cross_entropy   losses of logits whose vocabulary is cut into pieces

(The backward of torch's own functional all-reduce sums again: gradients would grow with the group.)
All three are made of torch's functional collectives, which is what AOT graphs hold: Inductor may
schedule them, and CUDA graphs capture them. See tensor_groups.py for the names of groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.tensor_groups import GroupRank, all_reduced, place_of

# Targets that no loss counts, as of torch's cross_entropy.
IGNORED = -100

torch.library.define("tlora_fx::tp_copy", "(Tensor x, str group) -> Tensor")
torch.library.define("tlora_fx::tp_reduce", "(Tensor x, str group) -> Tensor")
torch.library.define(
    "tlora_fx::tp_cross_entropy", "(Tensor logits, Tensor targets, str group) -> Tensor"
)


def tp_copy(x: Tensor, group: str) -> Tensor:
    """Hand a value that all processes have alike to what each computes a piece of.

    x        any shape
    group    name of the group, see `use_group`
    returns  x; its gradient is the sum of all processes' gradients
    raises   TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_copy.default(x, group)
    return made


def tp_reduce(x: Tensor, group: str) -> Tensor:
    """Sum what each process computed a part of.

    x        any shape, the same in all processes
    group    name of the group, see `use_group`
    returns  the sum, the same bits in all processes; the gradient is the result's
    raises   TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_reduce.default(x, group)
    return made


def tp_cross_entropy(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    """The loss of each row, where each process holds the logits of a piece of the vocabulary.

    logits    float [n, V / processes], process p's columns begin at p * V / processes
    targets   int64 [n], in 0..V - 1, or -100 for a row without a loss
    group     name of the group, see `use_group`
    returns   [n] in the logits' dtype, the same in all processes
    raises    TensorGroupMissing
    """
    made: Tensor = torch.ops.tlora_fx.tp_cross_entropy.default(logits, targets, group)
    return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: GroupRank) -> Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.place), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: GroupRank) -> Tensor:
        return all_reduced(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.library.impl("tlora_fx::tp_copy", "CompositeImplicitAutograd")
def _copy(x: Tensor, group: str) -> Tensor:
    place = place_of(group, x)
    made: Tensor = x.view_as(x) if place is None else _Copy.apply(x, place)  # type: ignore[no-untyped-call]
    return made


@torch.library.impl("tlora_fx::tp_reduce", "CompositeImplicitAutograd")
def _reduce(x: Tensor, group: str) -> Tensor:
    place = place_of(group, x)
    made: Tensor = x.view_as(x) if place is None else _Reduce.apply(x, place)  # type: ignore[no-untyped-call]
    return made


@torch.library.impl("tlora_fx::tp_cross_entropy", "CompositeImplicitAutograd")
def _cross_entropy(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    place = place_of(group, logits)
    if place is None:
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    largest = all_reduced(logits.detach().amax(-1), place, "max")
    shifted = logits - largest.unsqueeze(-1)
    own = targets - place.rank * logits.shape[-1]
    inside = (own >= 0) & (own < logits.shape[-1])
    picked = shifted.gather(-1, torch.where(inside, own, 0).unsqueeze(-1)).squeeze(-1)
    # One sum for both: the exponentials, and the target's logit, which one process has.
    parts = torch.stack([shifted.exp().sum(-1), torch.where(inside, picked, 0)])
    total: Tensor = _Reduce.apply(parts, place)  # type: ignore[no-untyped-call]
    return torch.where(targets == IGNORED, 0, total[0].log() - total[1])
