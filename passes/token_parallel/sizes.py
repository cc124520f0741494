"""Sizes of a row carry shapes and are no values.

How many tokens a row has, or how many lines and how wide they are, depends on a job's neighbours.
A number that is made of a size may therefore say how large a tensor is, but not stand in it.
Numbers are followed through arguments; tensors that are made of sizes and weights alone are
computed at several sizes, and must hold the same wherever they overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
ROUNDING = {2: 2e-2, 4: 1e-4, 8: 1e-9}


class SizeIsValue(Exception):
    """A size of the row became a value; the text says how."""


class RowSizes:
    """Follows sizes through graphs.

    values    of each node: what it holds at each size, or None where it depends on tokens
    """

    def __init__(self, shapes: Sequence[Any], constants: Mapping[str, Tensor]) -> None:
        """Follow the sizes of a row.

        shapes       of its ids and of what else has a place for each token; symbols are sizes
        constants    values lifted out of model code
        """
        symbols = [[s.node.expr for s in shape if isinstance(s, torch.SymInt)] for shape in shapes]
        tried = PACKED if len(symbols[0]) == 1 else BATCH
        self.sizes = [
            {s: sympy.Integer(n) for names in symbols for s, n in zip(names, sizes, strict=True)}
            for sizes in tried
        ]
        self.symbols = set(self.sizes[0])
        self.constants = constants
        self.values: dict[fx.Node, _Known | None] = {}
        self.compared: set[int] = set()

    def visit(self, node: fx.Node) -> None:
        """Follow sizes through one node.

        raises    SizeIsValue
        """
        value = node.meta.get("val")
        if isinstance(value, Number):
            self.values[node] = self._number(value)
        elif node.op == "get_attr":
            self.values[node] = _Known(functools.partial(self._tensor, node), sized=False)
        elif node.op == "call_function":
            self.values[node] = self._call(node)

    def _number(self, value: Any) -> _Known | None:
        expression = value.node.expr
        if not expression.free_symbols <= self.symbols:
            return None
        return _Known(lambda: [_python(expression.xreplace(sizes)) for sizes in self.sizes], True)

    def _tensor(self, node: fx.Node) -> list[Any]:
        ref: TensorRef = node.meta["tensor"]
        known = self.constants.get(ref.name) if ref.owner == "constant" else None
        return [_stand_in(ref) if known is None else known] * len(self.sizes)

    def _call(self, node: fx.Node) -> _Known | None:
        inputs = [self.values.get(source) for source in node.all_input_nodes]
        self._require_shapes(node, with_tokens=None in inputs)
        if None not in inputs:
            sized = any(known is not None and known.sized for known in inputs)
            return _Known(lambda: [self._run(node, i) for i in range(len(self.sizes))], sized)
        for source, known in zip(node.all_input_nodes, inputs, strict=True):
            if known is not None and isinstance(source.meta.get("val"), Tensor):
                self._require_same(source, known)
        return None

    def _run(self, node: fx.Node, index: int) -> Any:
        def value_of(source: fx.Node) -> Any:
            known = self.values[source]
            assert known is not None
            return known.at(index)

        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _require_same(self, node: fx.Node, known: _Known) -> None:
        """A tensor that tokens meet must hold the same at every size."""
        if not known.sized or id(known) in self.compared or not self._comparable(node):
            return
        self.compared.add(id(known))
        try:
            first, *others = [known.at(index) for index in range(len(self.sizes))]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return  # an index table without values: the probe of the whole model sees it
        last: Any = node.meta["val"].shape[-1:]
        shifts = bool(last) and isinstance(last[0], torch.SymInt)
        if not all(_overlap(first, other, shifts) for other in others):
            raise SizeIsValue("it holds values that depend on the size of the row")

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
            if _is_scalar(argument) or (
                with_tokens and not self._is_extent(name, argument.name, node, value)
            ):
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

    def _is_extent(self, name: str, argument: str, node: fx.Node, value: Any) -> bool:
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


class _Known:
    """What a node holds at each size, computed when it is asked for."""

    def __init__(self, compute: Any, sized: bool) -> None:
        self.compute, self.sized = functools.cache(compute), sized

    def at(self, index: int) -> Any:
        return self.compute()[index]


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
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    bound = ROUNDING.get(left.dtype.itemsize, 2e-2)
    same = torch.allclose(left, right, rtol=bound, atol=bound, equal_nan=True)
    if same or not shifts:
        return same
    moved = right - left
    return torch.allclose(moved, moved[..., :1].expand_as(moved), rtol=bound, atol=bound)
