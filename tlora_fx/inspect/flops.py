"""What the registry of `torch.utils.flop_counter` says of one call.

The call runs on meta tensors, forward and backward, so that composite operators (linear, matmul)
come down to those that have a formula, as they do under `FlopCounterMode`. A generated kernel is
counted as soon as `register_flop_formula` knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tlora_fx.ops  # noqa: F401  (registers the formulas of our own operators)


@dataclass(frozen=True, slots=True)
class Leaf:
    """An operator that a call comes down to.

    given    the shape of its first tensor, () where it takes none
    result   its first tensor, None where it gives none
    flops    by the registry, None where it has no formula
    """

    target: Any
    given: tuple[int, ...]
    result: Tensor | None
    flops: int | None


class _Leaves(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no type there
    """Notes every operator that runs below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Leaf] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = formula_of(func)
        if formula is None:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        flops = None if formula is None else int(formula(*args, **kwargs, out_val=out))
        given = first_tensor((args, kwargs))
        shape = () if given is None else tuple(given.shape)
        self.found.append(Leaf(func, shape, first_tensor(out), flops))
        return out


def formula_of(target: Any) -> Callable[..., Any] | None:
    """The registry's formula for an operator, None where there is none."""
    found: Callable[..., Any] | None = flop_registry.get(getattr(target, "_overloadpacket", target))
    return found


def is_composite(target: Any) -> bool:
    """Whether an operator is made of others."""
    return isinstance(target, torch._ops.OpOverload) and target._can_decompose()


def forward_leaves(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Leaf]:
    """The operators that a call on meta tensors comes down to."""
    leaves = _Leaves()
    with torch.no_grad(), leaves:
        target(*args, **kwargs)
    return leaves.found


def trained_leaves(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Leaf]:
    """The operators of a call and of its backward, for the arguments that require gradients."""
    leaves = _Leaves()
    with torch.enable_grad(), leaves:
        made = pytree.tree_leaves(target(*args, **kwargs))
        out = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
        if out:
            torch.autograd.backward(out[:1], [torch.empty_like(out[0])])
    return leaves.found


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested arguments, None where there is none."""
    return next((one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)), None)
