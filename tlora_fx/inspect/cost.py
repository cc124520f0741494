"""What an operator of a fused graph costs, per token of the row.

Products of matrices and attention cost what the registry of `torch.utils.flop_counter` says, two a
multiply-add (meter.py). The registry leaves out other arithmetic: here it counts one an element of
its result (of its input where it reduces), and moving data nothing. What neither knows is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.inspect.flops import first_tensor
from tlora_fx.ir.lora_sites import lowered_site

# Operations an element of the first input, for what is one operator here and several elsewhere.
PER_ELEMENT = {
    "_softmax": 4, "softmax": 4, "_log_softmax": 4, "log_softmax": 4, "rms_norm": 4,
    "layer_norm": 7, "native_layer_norm": 7, "group_norm": 7, "linalg_norm": 2,
    "linalg_vector_norm": 2, "var": 3, "var_mean": 3, "cumsum": 1, "keyed_dropout": 1,
}  # fmt: skip
# What moves data or makes it, without arithmetic.
_MOVES = (
    "_to_copy _unsafe_view alias arange argmax cat chunk clone contiguous copy detach dropout "
    "embedding empty empty_like expand expand_as eye flatten full full_like gather getitem index "
    "index_select lift_fresh_copy masked_fill movedim narrow new_empty new_ones new_zeros numpy_T "
    "numpy_t ones ones_like permute repeat repeat_interleave reshape resolve_conj roll "
    "scalar_tensor segment_read segment_switch segment_write select slice split split_with_sizes "
    "squeeze stack sym_size t tensor to topk transpose tril triu type_as unbind unflatten "
    "unsqueeze view zeros zeros_like"
)
MOVES = frozenset(_MOVES.split())


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations.

    token      for each token
    length     for each token and token of its sequence
    row        once, whatever the row holds
    unknown    names of operators whose cost is not known
    """

    token: float = 0.0
    length: float = 0.0
    row: float = 0.0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.token + other.token,
            self.length + other.length,
            self.row + other.row,
            self.unknown + other.unknown,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + other.times(-1)

    def times(self, factor: float) -> Cost:
        """So many of them."""
        return Cost(self.token * factor, self.length * factor, self.row * factor, self.unknown)

    def share(self, part: float) -> Cost:
        """The cost of a token of the row where only this part of its tokens has it."""
        return Cost(self.token * part, self.length * part, self.row, self.unknown)

    @property
    def flop_per_token(self) -> float | None:
        """The cost of a token, None where a part is unknown."""
        return None if self.unknown else self.token


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return reduce(Cost.__add__, costs, Cost())


def arithmetic(
    name: str, target: Any, given: tuple[int, ...], value: Tensor, shape: tuple[int, ...]
) -> int | None:
    """Operations of an operator that is no product of matrices, None where it is not known.

    given    shape of its first argument
    shape    of its value, where sizes are numbers
    """
    if not value.dtype.is_floating_point:
        return 0
    if name in PER_ELEMENT:
        return PER_ELEMENT[name] * prod(given)
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return prod(shape)
    if torch.Tag.reduction in tags:
        return prod(given)
    return None


def operator_name(node: fx.Node) -> str:
    """The short name of what a node computes: "mul", "multi_lora_linear".

    The latter also for a site's part of an operator that several sites share.
    """
    site = lowered_site(node)
    return short_name(node.target if site is None else site.operator)


def operand(node: fx.Node, place: int) -> Tensor | None:
    """The fake tensor that a node takes at a place, None where there is none."""
    given: Any = node.args[place] if place < len(node.args) else None
    return first_tensor(given.meta.get("val")) if isinstance(given, fx.Node) else None


def short_name(target: Any) -> str:
    """The short name of an operator."""
    return str(getattr(target, "__name__", target)).partition(".")[0]
