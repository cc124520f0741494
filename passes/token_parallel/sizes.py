"""Check that sizes of a row say only how large tensors are, and become no values in them.

How many tokens a row has, or how many lines and how wide they are, depends on a job's neighbours.
A number that is made of a size may therefore say how large a tensor is, but not stand in it.
Numbers are followed through arguments; tensors that are made of sizes and weights alone are
computed at several sizes, and must hold the same wherever they overlap. Sizes around each number
that such a tensor is made with are among them: what is the same up to 2,048 tokens may be another
value beyond.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import TensorRef

aten = torch.ops.aten
Number = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Arguments that say how large a result is.
SHAPES = frozenset({"size", "sizes", "shape", "repeats", "output_size", "stride"})
MEANS = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
# Row sizes at which tensors are computed: tokens, or lines and width; one changes at a time.
PACKED = ((13,), (18,), (40,))
BATCH = ((3, 13), (4, 13), (3, 18), (3, 40))
#: A tensor of a fixed form is computed at so many sizes up to this one, and around powers of two.
SWEPT, POWERS = [*range(41, 512, 7), *range(512, 4200, 61), 4200], (17, 13)
#: Numbers of a tensor that is computed at a size far from those above.
MAX_FAR = 1 << 26
#: Tensors that hold one number, whatever the values of what they are made like.
FACTORIES = frozenset({
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
})  # fmt: skip
#: What counts the places of a row, of integers or truths.
COUNTERS = frozenset({"sum", "count_nonzero", "cumsum", "amax", "max", "argmax", "any", "all"})
COMPARES = frozenset({
    "gt", "ge", "lt", "le", "eq", "ne", "maximum", "minimum", "max", "min", "clamp", "clamp_min",
    "clamp_max", "floor_divide", "div", "remainder", "bucketize", "searchsorted",
})  # fmt: skip
ROUNDING = {2: 2e-2, 4: 1e-4, 8: 1e-9}


class SizeIsValue(Exception):
    """A size of the row became a value; the text says how."""


#: Numbers for the symbols of a row.
Sizes = Mapping[Any, sympy.Integer]


class RowSizes:
    """Follows sizes through graphs.

    values    of each node: what it holds at each size, or None where it depends on tokens
    counts    nodes that hold how many of a row's tokens are something
    """

    def __init__(self, shapes: Sequence[Any], constants: Mapping[str, Tensor]) -> None:
        """Follow the sizes of a row.

        shapes       of its ids and of what else has a place for each token; symbols are sizes
        constants    values lifted out of model code
        """
        self.rows = [
            [s.node.expr for s in shape if isinstance(s, torch.SymInt)] for shape in shapes
        ]
        self.tried = PACKED if len(self.rows[0]) == 1 else BATCH
        self.sizes = [self._sizes(numbers) for numbers in self.tried]
        self.symbols = set(self.sizes[0])
        self.constants = constants
        self.values: dict[fx.Node, _Known | None] = {}
        self.counts: set[fx.Node] = set()
        self.compared: set[int] = set()
        self._near: list[dict[int, Any]] = [{} for _ in self.sizes]

    def _sizes(self, numbers: Sequence[int]) -> dict[Any, sympy.Integer]:
        return {
            s: sympy.Integer(n) for names in self.rows for s, n in zip(names, numbers, strict=True)
        }

    def visit(self, node: fx.Node) -> None:
        """Follow sizes through one node.

        raises    SizeIsValue
        """
        value = node.meta.get("val")
        if isinstance(value, Number):
            self.values[node] = self._number(value)
        elif node.op == "get_attr":
            tensor = self._tensor(node)
            self.values[node] = _Known(lambda sizes, memo: tensor, sized=False)
        elif node.op == "call_function":
            self.values[node] = self._call(node)

    def _number(self, value: Any) -> _Known | None:
        expression = value.node.expr
        if not expression.free_symbols <= self.symbols:
            return None
        numbers = frozenset(int(n) for n in expression.atoms(sympy.Integer))
        return _Known(lambda sizes, memo: _python(expression.xreplace(sizes)), True, numbers)

    def _tensor(self, node: fx.Node) -> Tensor:
        ref: TensorRef = node.meta["tensor"]
        known = self.constants.get(ref.name) if ref.owner == "constant" else None
        return _stand_in(ref) if known is None else known

    def _call(self, node: fx.Node) -> _Known | None:
        sources = node.all_input_nodes
        known = {source: self.values.get(source) for source in sources}
        if node.target in FACTORIES and known[sources[0]] is None:
            known[sources[0]] = self._form_of(sources[0])
        self._require_shapes(node, with_tokens=None in known.values())
        found = {source: item for source, item in known.items() if item is not None}
        if len(found) == len(known):
            return self._computed(node, found)
        self._require_uncounted(node, found)
        for source, item in found.items():
            if isinstance(source.meta.get("val"), Tensor):
                self._require_same(source, item)
        return None

    def _form_of(self, node: fx.Node) -> _Known | None:
        """What a tensor of tokens is without its values: a form."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        sizes = [s.node.expr if isinstance(s, torch.SymInt) else s for s in value.shape]
        if not set().union(*(getattr(s, "free_symbols", ()) for s in sizes)) <= self.symbols:
            return None

        def form(numbers: Sizes, memo: Any) -> Tensor:
            shape = [int(s.xreplace(numbers)) if hasattr(s, "xreplace") else s for s in sizes]
            return torch.zeros((), dtype=value.dtype).expand(shape)

        return _Known(form, True)

    def _computed(self, node: fx.Node, inputs: Mapping[fx.Node, _Known]) -> _Known:
        """What an operator makes of sizes and weights alone."""

        def compute(sizes: Sizes, memo: dict[int, Any]) -> Any:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda source: inputs[source].at(sizes, memo)
            )
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            return node.target(*args, **kwargs)  # type: ignore[operator]

        if not any(item.sized for item in inputs.values()):
            return _Known(compute, False)
        numbers = frozenset(_literals(node)).union(*(item.numbers for item in inputs.values()))
        for item in inputs.values():
            if not item.sized:
                numbers |= self._numbers_in(item)
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, Tensor) else ()
        fixed, grows = 1, Counter[Any]()
        for size in shape:
            if isinstance(size, torch.SymInt):
                grows.update(size.node.expr.free_symbols)
            else:
                fixed *= size
        open_dims = max(grows.values(), default=0)
        fixed *= self.tried[0][0] if len(grows) > 1 else 1
        return _Known(
            compute, True, numbers,
            max([fixed, *(item.fixed for item in inputs.values())]),
            max([open_dims, *(item.open_dims for item in inputs.values())]),
        )  # fmt: skip

    def _numbers_in(self, item: _Known) -> frozenset[int]:
        """The numbers of a tensor that is the same at every size, where they are few."""
        value = item.tried(self.sizes[0], self._near[0])
        if not isinstance(value, Tensor) or value.numel() > 16:
            return frozenset()
        return frozenset(_whole(value.flatten().tolist()))

    def _require_same(self, node: fx.Node, known: _Known) -> None:
        """A tensor that tokens meet must hold the same at every size."""
        if not known.sized or id(known) in self.compared or not self._comparable(node):
            return
        self.compared.add(id(known))
        values = [known.tried(*each) for each in zip(self.sizes, self._near, strict=True)]
        if any(value is None for value in values):
            return  # the probe of the whole model sees it
        first, *others = values
        last: Any = node.meta["val"].shape[-1:]
        shifts = bool(last) and isinstance(last[0], torch.SymInt)
        if not all(_overlap(first, other, shifts) for other in others):
            raise SizeIsValue("it holds values that depend on the size of the row")
        still = not any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
        for place, word in enumerate(("lines", "tokens")[-len(self.tried[0]) :]):
            self._require_same_far(known, place, word, first, still=still, shifts=shifts)

    def _require_same_far(
        self, known: _Known, place: int, word: str, first: Any, *, still: bool, shifts: bool
    ) -> None:
        """The same at sizes around the numbers that it was made with, and at far larger ones."""
        before = first
        for number in (*self._few(known), *self._far(known, still=still)):
            numbers = [*self.tried[0]]
            numbers[place] = number
            value = known.tried(self._sizes(numbers), {})
            if value is None:
                continue
            few = number < self.tried[0][place]
            if not _overlap(first if few else before, value, shifts):
                raise SizeIsValue(
                    f"it holds values that depend on the size of the row: others "
                    f"{'up to' if few else 'from'} {number} {word}{'' if few else ' on'}"
                )
            before = before if few else value

    def _few(self, known: _Known) -> list[int]:
        """Sizes below the usual ones, around the numbers that a tensor was made with."""
        least = min(numbers[-1] for numbers in self.tried)
        tried = {n + d for n in known.numbers if 1 < n <= least for d in (-1, 0, 1)}
        return sorted(n for n in tried if 1 < n < least)

    def _far(self, known: _Known, *, still: bool) -> list[int]:
        """Sizes to try a tensor at besides the usual ones, in order."""
        largest = max(itertools.chain(*self.tried))
        numbers = {n for n in known.numbers if largest < n < 1 << 20}
        few = sorted(n for n in known.numbers if 1 < n <= 64)[:4]
        around = {n * k for n in numbers for k in few} | {n // k for n in numbers for k in few}
        tried = {n + d for n in numbers | around for d in (-1, 0, 1)}
        tried |= {2 * n for n in numbers | around}  # one token in ten thousand is a rounding
        if known.open_dims <= 1:
            powers = range(largest.bit_length(), POWERS[known.open_dims] + 1)
            tried |= {(1 << n) + d for n in powers for d in (-1, 0, 1)}
        if still:
            tried |= {*SWEPT}
        most = MAX_FAR // max(known.fixed, 1)
        return sorted(n for n in tried if n > largest and n**known.open_dims <= most)

    def _require_uncounted(self, node: fx.Node, known: Mapping[fx.Node, _Known]) -> None:
        """A count of the row's tokens, such as `(ids >= 0).sum(1)`, may meet no large number.

        Padding counts too, so the count is the width; up to the number no probe may see it.
        """
        name = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
        counted = [source for source in node.all_input_nodes if source in self.counts]
        same = all(source in self.counts or source in known for source in node.all_input_nodes)
        if (counted and same) or (name in COUNTERS and self._counts(node)):
            self.counts.add(node)
        if not counted or name not in COMPARES:
            return
        numbers = set(_literals(node))
        for item in known.values():
            numbers |= item.numbers if item.sized else self._numbers_in(item)
        large = [number for number in numbers if number > max(itertools.chain(*self.tried))]
        if large:
            raise SizeIsValue(f"it compares a count of the row's tokens with {min(large)}")

    def _counts(self, node: fx.Node) -> bool:
        """Whether an operator reduces integers or truths over the row."""
        value = node.all_input_nodes[0].meta.get("val")
        if not isinstance(value, Tensor) or value.dtype.is_floating_point:
            return False
        return self._reduces_size(node)

    def _comparable(self, node: fx.Node) -> bool:
        """Whether each dimension is a size, give or take a number: then places keep their index."""
        sizes = [s.node.expr for s in node.meta["val"].shape if isinstance(s, torch.SymInt)]
        return all(
            any((expression - symbol).is_number for symbol in self.symbols) for expression in sizes
        )

    def _require_shapes(self, node: fx.Node, *, with_tokens: bool) -> None:
        """A size may only be given where an operator takes a shape."""
        name = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
        for argument, value in _arguments(node):
            if not self._has_size(value) or argument.name in SHAPES or name == "arange":
                continue
            moves = with_tokens and not self._is_extent(name, argument.name, value)
            if _is_scalar(argument) or moves:
                raise SizeIsValue("it computes with the size of the row")
        if name in MEANS and self._reduces_size(node):
            raise SizeIsValue("it reduces over the row, and divides by the size of the row")

    def _has_size(self, value: Any) -> bool:
        nodes: list[fx.Node] = []
        fx.map_arg(value, nodes.append)
        numbers = [n.meta.get("val") for n in nodes]
        return any(
            isinstance(number, Number) and number.node.expr.free_symbols & self.symbols
            for number in numbers
        )

    def _is_extent(self, name: str, argument: str, value: Any) -> bool:
        """Whether a number says only where a slice ends, which moves no value."""
        if (name, argument) not in {("slice", "end"), ("narrow", "length")}:
            return name == "constant_pad_nd" and argument == "pad" and not any(
                self._has_size(side) for side in value[::2]
            )  # fmt: skip
        expression = value.meta["val"].node.expr
        return any((expression - symbol).is_number for symbol in self.symbols)

    def _reduces_size(self, node: fx.Node) -> bool:
        source = node.all_input_nodes[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        chosen: Any = [dims] if isinstance(dims, int) else dims or range(len(source))
        sizes = [source[dim] for dim in chosen if isinstance(source[dim], torch.SymInt)]
        return any(size.node.expr.free_symbols & self.symbols for size in sizes)


@dataclass(slots=True, eq=False)
class _Known:
    """What a node holds at each size, computed when it is asked for.

    sized        whether a size takes part
    numbers      whole numbers that it was made with
    fixed        the most numbers that any tensor on the way holds, without its open dimensions
    open_dims    the most dimensions of such a tensor that grow with one size of the row
    """

    compute: Callable[[Sizes, dict[int, Any]], Any]
    sized: bool
    numbers: frozenset[int] = frozenset()
    fixed: int = 1
    open_dims: int = 0

    def at(self, sizes: Sizes, memo: dict[int, Any]) -> Any:
        """Its value.

        memo    values at the same sizes by the id of what holds them
        """
        if id(self) not in memo:
            memo[id(self)] = self.compute(sizes, memo)
        return memo[id(self)]

    def tried(self, sizes: Sizes, memo: dict[int, Any]) -> Any:
        """Its value; None where it has none, as an index into a table that ends."""
        try:
            return self.at(sizes, memo)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None


def _literals(node: fx.Node) -> Iterator[int]:
    """The whole numbers that an operator computes with; those of shapes are none."""
    for argument, value in _arguments(node):
        if argument.name not in SHAPES:
            yield from _whole(value if isinstance(value, (list, tuple)) else [value])


def _whole(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        if type(value) in (int, float) and abs(value) < 1 << 30:
            yield from {int(value), int(value) + (value != int(value))}


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.startswith("tlora_fx::"):
        return []
    named = {argument.name: argument for argument in schema.arguments}
    pairs = list(zip(schema.arguments, node.args, strict=False))
    return [*pairs, *((named[name], value) for name, value in node.kwargs.items() if name in named)]


def _is_scalar(argument: Any) -> bool:
    """Whether an operator takes a number there to compute with; places and sizes are ints."""
    return any(word in str(argument.type) for word in ("number", "Scalar", "float", "Tensor"))


def _python(number: Any) -> Any:
    if number in (sympy.true, sympy.false):
        return bool(number)
    return int(number) if number.is_integer else float(number)


def _stand_in(ref: TensorRef) -> Tensor:
    """A tensor of a weight's form, another value at each place, in the memory of its edges."""
    if ref.dtype == torch.bool or not ref.dtype.is_floating_point:
        edges = torch.arange(sum(ref.shape) + 1).to(ref.dtype)
    else:
        generator = torch.Generator().manual_seed(0)
        edges = torch.rand(sum(ref.shape) + 1, generator=generator).to(ref.dtype)
    return edges.as_strided(ref.shape, (1,) * len(ref.shape))


def _overlap(left: Any, right: Any, shifts: bool) -> bool:
    """Whether two tensors agree where both have places.

    shifts    what is added to a whole line of scores changes no softmax
    """
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left == right)
    places = tuple(slice(min(a, b)) for a, b in zip(left.shape, right.shape, strict=True))
    left, right = left[places], right[places]
    if torch.equal(left, right):  # as nearly always, and a sixth of the work
        return True
    if not left.dtype.is_floating_point:
        return False
    bound = ROUNDING.get(left.dtype.itemsize, 2e-2)
    same = torch.allclose(left, right, rtol=bound, atol=bound, equal_nan=True)
    if same or not shifts:
        return same
    moved = right - left
    return torch.allclose(moved, moved[..., :1].expand_as(moved), rtol=bound, atol=bound)
