"""What an operator of a fused graph costs, per token of the row, without running it.

A multiply-add counts two, other floating-point arithmetic one an element of its result (of its
input where it reduces), moving data nothing. Sizes that a row brings (tokens, lines) are symbols;
a cost is kept as a number for each way in which it grows with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.graph import Form

# Operations an element of the first input, for what is one operator here and several elsewhere.
PER_ELEMENT = {
    "_softmax": 4, "softmax": 4, "_log_softmax": 4, "log_softmax": 4, "rms_norm": 4,
    "layer_norm": 7, "native_layer_norm": 7, "group_norm": 7, "linalg_norm": 2,
    "linalg_vector_norm": 2, "var": 3, "var_mean": 3, "cumsum": 1, "keyed_dropout": 1,
}  # fmt: skip
# Operator to the argument whose last dimension is summed over.
PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1}
# What moves data or makes it, without arithmetic.
_MOVES = (
    "_to_copy alias arange argmax cat chunk clone contiguous copy detach dropout embedding empty "
    "expand expand_as eye flatten full full_like gather getitem index index_select lift_fresh_copy "
    "masked_fill movedim narrow new_ones new_zeros numpy_T numpy_t ones ones_like permute repeat "
    "repeat_interleave reshape roll scalar_tensor select segment_read segment_switch segment_write "
    "slice split split_with_sizes squeeze stack sym_size t tensor to topk transpose tril triu "
    "type_as unbind unflatten unsqueeze view zeros zeros_like"
)
MOVES = frozenset(_MOVES.split())


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of a forward.

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

    @property
    def flop_per_token(self) -> float | None:
        """The cost of a token, None where a part is unknown."""
        return None if self.unknown else self.token


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return sum(costs, Cost())


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts operators of graphs whose symbols have these names.

    sizes    size to its name: "T", "B", "S", or a job's part such as "T0" (see source.size_names)
    """

    form: Form
    sizes: dict[str, str]

    def node(self, node: fx.Node) -> Cost:
        """The cost of one node; the adapters of a multi_lora_linear are not in it."""
        name = operator_name(node)
        value = _first(node.meta.get("val"))
        if name in MOVES or not isinstance(value, torch.Tensor):
            return Cost()
        if name == "packed_attention":
            heads, dim = value.shape[-2:]
            return Cost(length=float(2 * heads * (_operand(node, 0).shape[-1] + dim)))
        if name == "multi_lora_linear":
            return self.count(name, [2, *_operand(node, 0).shape, value.shape[-1]])
        if name in PRODUCTS:
            inner = _operand(node, PRODUCTS[name]).shape[-1]
            return self.count(name, [2, *value.shape, inner])
        if not value.dtype.is_floating_point:
            return Cost()
        if name in PER_ELEMENT:
            return self.count(name, [PER_ELEMENT[name], *_operand(node, 0).shape])
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags:
            return self.count(name, value.shape)
        if torch.Tag.reduction in tags:
            return self.count(name, _operand(node, 0).shape)
        return Cost(unknown=(name,))

    def count(self, name: str, dims: Iterable[Any]) -> Cost:
        """A product of sizes, sorted by how it grows with the row."""
        number, units, lengths = 1.0, 0, 0
        for dim in dims:
            factor, symbols = self._factor(dim)
            number *= factor
            units += sum(symbol[:1] in ("T", "B") for symbol in symbols)
            lengths += symbols.count("S")
            if "?" in symbols:
                return Cost(unknown=(name,))
        grows = lengths - 1 if self.form == "batch" else lengths
        if units == 0 and lengths == 0:
            return Cost(row=number)
        if units == 1 and grows == 0:
            return Cost(token=number)
        if units == 1 and grows == 1:
            return Cost(length=number)
        return Cost(unknown=(name,))

    def _factor(self, dim: Any) -> tuple[float, list[str]]:
        """A size as a number and the names of the row's sizes in it, "?" for one without name."""
        if str(dim) in self.sizes:
            return 1.0, [self.sizes[str(dim)]]
        if isinstance(dim, (int, float)):
            return self._number(dim)
        number, symbols = 1.0, []
        for base, power in dim.node.expr.as_powers_dict().items():
            if base.is_number:
                factor, inside = self._number(int(base**power))
                number *= factor
                symbols += inside
            else:
                symbols += [self.sizes.get(str(base), "?")] * int(power)
        return number, symbols

    def _number(self, number: float) -> tuple[float, list[str]]:
        """A plain size, which may be a multiple of the size that stands for a job's segment."""
        for size, name in self.sizes.items():
            if size.isdigit() and number >= int(size) and number % int(size) == 0:
                return number / int(size), [name]
        return float(number), []


def operator_name(node: fx.Node) -> str:
    """The short name of what a node calls: "mul", "multi_lora_linear"."""
    target: Any = node.target
    return str(getattr(target, "__name__", target)).partition(".")[0]


def operand(node: fx.Node, place: int) -> torch.Tensor | None:
    """The fake tensor that a node takes at a place, None where there is none."""
    given: Any = node.args[place] if place < len(node.args) else None
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _operand(node: fx.Node, place: int) -> torch.Tensor:
    found = operand(node, place)
    assert found is not None, f"{node.format_node()} takes no tensor at {place}"
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and value else value
