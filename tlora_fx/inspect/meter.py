"""Count operators of a graph without running them on data.

Sizes that a row brings (tokens, lines) are symbols; a cost is kept as a number for each way in
which it grows with them. Operators are counted at sizes that are primes, and the primes are divided
out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.inspect.cost import (
    MOVES,
    PER_ELEMENT,
    Cost,
    arithmetic,
    operand,
    operator_name,
    short_name,
    total,
)
from tlora_fx.inspect.flops import (
    Leaf,
    first_tensor,
    formula_of,
    forward_leaves,
    is_composite,
    trained_leaves,
)
from tlora_fx.ir.graph import Form
from tlora_fx.ir.lora_sites import ADD, ONE, lowered_site, serves_several

ATTENTION = torch.ops.tlora_fx.packed_attention.default
# Places of tables that say how a row is divided, with their lengths for one sequence of one job,
# as which it is counted.
DIVIDING = {
    ONE: {5: 2, 6: 1, 7: 1, 8: 2},
    ADD: {4: 2, 5: 1, 6: 1, 7: 2},
    ATTENTION: {3: 2},
}
# Places of a lowered site's A and B, and of the largest rank, where 0 is that of A.
BANK = {ONE: (3, 4), ADD: (2, 3)}
MAX_RANK = {ONE: 13, ADD: 12}
# What sizes are counted as: a size that grows with tokens or lines, a line's length, any other.
UNIT, LENGTH, OTHER = 104_729, 99_991, 99_989
_PRIMES = {"T": UNIT, "B": UNIT, "S": LENGTH}


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts operators of graphs whose symbols have these names.

    sizes    size to its name: "T", "B", "S", or a job's part such as "T0" (see source.size_names)
    """

    form: Form
    sizes: dict[str, str]
    _known: dict[object, Cost] = field(default_factory=dict)

    def node(self, node: fx.Node) -> Cost:
        """The forward of one node; the adapters of a lowered site are not in it.

        What several sites share costs nothing itself: each site's result has the site's cost.
        """
        name, value = operator_name(node), first_tensor(node.meta.get("val"))
        if not _computes(node, name) or value is None:
            return Cost()
        if not _is_counted(node, name):
            return self._plain(node, name, value)
        return self._counted(node, forward_leaves, (), 0, self._whole)

    def adapter(self, node: fx.Node, rank: int) -> Cost:
        """The forward of one job's adapter of this rank at a lowered site, a token of it."""
        both = self._counted(node, forward_leaves, (), rank, self._whole)
        return both - self.node(node)

    def trained(self, node: fx.Node, learning: Collection[fx.Node], rank: int = 0) -> Cost:
        """Forward and backward of one node, products of matrices and attention only.

        learning    what the node reads that needs a gradient
        rank        of the adapters of a lowered site, summed over its jobs
        """
        name, value = operator_name(node), first_tensor(node.meta.get("val"))
        if not _computes(node, name) or value is None:
            return Cost()
        if not _is_counted(node, name):
            known = arithmetic(name, node.target, (), value, ()) is not None
            return Cost() if known else Cost(unknown=(name,))
        return self._counted(node, trained_leaves, learning, rank, self._products)

    def _plain(self, node: fx.Node, name: str, value: Tensor) -> Cost:
        given = operand(node, 0)
        shape = () if given is None else self._sizes(given)
        return self._sorted(name, arithmetic(name, node.target, shape, value, self._sizes(value)))

    def _counted(
        self,
        node: fx.Node,
        leaves_of: Callable[..., list[Leaf]],
        learning: Collection[fx.Node],
        rank: int,
        price: Callable[[str, Leaf], Cost],
    ) -> Cost:
        """A node's cost as the sum over the operators that it comes down to."""
        target, args, kwargs = self._given(node, learning, rank)
        key = (target, leaves_of, repr((args, kwargs)))
        if key not in self._known:
            try:
                leaves = leaves_of(target, _made(args), _made(kwargs))
            except (RuntimeError, TypeError, ValueError):
                # What refuses tensors without values cannot be counted, which is said, not hidden.
                self._known[key] = Cost(unknown=(operator_name(node),))
            else:
                self._known[key] = total(price(operator_name(node), leaf) for leaf in leaves)
        return self._known[key]

    def _given(
        self, node: fx.Node, learning: Collection[fx.Node], rank: int
    ) -> tuple[Any, Any, Any]:
        """What a node calls, with its arguments, tensors as `_Spec`, sizes as numbers."""
        target, args, kwargs = _call_of(node)
        mapped: Any = fx.map_arg(
            (args, kwargs), lambda source: self._spec(source, source in learning)
        )
        given, kwargs = list(mapped[0]), dict(mapped[1])
        for place, length in DIVIDING.get(target, {}).items():
            given[place] = _Spec((length,), given[place].dtype, False)
        if target in BANK:
            for place in BANK[target]:
                given[place] = given[place].of_rank(rank)
            given[MAX_RANK[target]] = 0
        return target, tuple(given), kwargs

    def _spec(self, node: fx.Node, learning: bool) -> Any:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return _Spec(self._sizes(value), value.dtype, learning)
        if isinstance(value, (list, tuple)):
            return [_Spec(self._sizes(one), one.dtype, learning) for one in value]
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _whole(self, name: str, leaf: Leaf) -> Cost:
        """The registry's count of an operator, else that of its arithmetic."""
        if leaf.flops is not None:
            return self._sorted(name, leaf.flops)
        called = short_name(leaf.target)
        if called in MOVES or leaf.result is None:
            return Cost()
        shape = tuple(leaf.result.shape)
        found = arithmetic(called, leaf.target, leaf.given, leaf.result, shape)
        return self._sorted(name, found)

    def _products(self, name: str, leaf: Leaf) -> Cost:
        return Cost() if leaf.flops is None else self._sorted(name, leaf.flops)

    def _sorted(self, name: str, count: int | None) -> Cost:
        """A count at prime sizes, sorted by how it grows with the row."""
        if not count:
            return Cost(unknown=(name,)) if count is None else Cost()
        if count % OTHER == 0:
            return Cost(unknown=(name,))
        number, units = _divided(count, UNIT)
        number, lengths = _divided(number, LENGTH)
        if self.form == "packed":
            units, lengths = min(units, 1), max(units - 1, 0)
        elif units:
            lengths -= 1
        if (units, lengths) == (0, 0):
            return Cost(row=float(number))
        if (units, lengths) == (1, 0):
            return Cost(token=float(number))
        if (units, lengths) == (1, 1):
            return Cost(length=float(number))
        return Cost(unknown=(name,))

    def _sizes(self, value: Tensor) -> tuple[int, ...]:
        return tuple(self._size(size) for size in value.shape)

    def _size(self, size: Any) -> int:
        """A size as a number, with a prime for each of the row's sizes in it."""
        name = self.sizes.get(str(size))
        if name is not None:
            return _PRIMES[name[:1]]
        if isinstance(size, int):
            return self._number(size)
        found = 1
        for base, power in size.node.expr.as_powers_dict().items():
            if base.is_number:
                found *= self._number(int(base**power))
            else:
                name = self.sizes.get(str(base))
                found *= (_PRIMES[name[:1]] if name else OTHER) ** int(power)
        return found

    def _number(self, number: int) -> int:
        """A plain size, which may be a multiple of the size that stands for a job's segment."""
        for size, name in self.sizes.items():
            if size.isdigit() and number >= int(size) and number % int(size) == 0:
                return number // int(size) * _PRIMES[name[:1]]
        return number


@dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor without values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learning: bool

    def of_rank(self, rank: int) -> _Spec:
        """A bank of this many rows, which trains."""
        return _Spec((rank, *self.shape[1:]), self.dtype, self.learning)

    def made(self) -> Tensor:
        """A meta tensor of this shape."""
        learning = self.learning and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=learning)


def _call_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """Operator and arguments of a node; of a site that shares an operator, as if it had its own."""
    site = lowered_site(node)
    if site is None:
        return node.target, node.args, node.kwargs
    return site.operator, tuple(site.arguments.values()), {}


def _computes(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and name not in MOVES and not serves_several(node)


def _is_counted(node: fx.Node, name: str) -> bool:
    """Whether a node comes down to operators that the registry may know."""
    target: Any = _call_of(node)[0]
    return formula_of(target) is not None or (name not in PER_ELEMENT and is_composite(target))


def _made(value: Any) -> Any:
    if isinstance(value, _Spec):
        return value.made()
    if isinstance(value, (list, tuple)):
        return type(value)(_made(item) for item in value)
    if isinstance(value, dict):
        return {name: _made(item) for name, item in value.items()}
    return value


def _divided(number: int, prime: int) -> tuple[int, int]:
    """A number without a prime, and how often it held it."""
    times = 0
    while number % prime == 0:
        number, times = number // prime, times + 1
    return number, times
