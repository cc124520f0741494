"""How patterns are written: by words such as `call` and `add`, or as a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tlora_fx.errors import PatternWrong
from tlora_fx.rewriting.patterns import (
    Anything,
    Call,
    Cast,
    Constant,
    Either,
    Having,
    Literal,
    Pattern,
    Sequenced,
    Shaped,
    Stored,
    Where,
)

aten = torch.ops.aten
#: Whose first two arguments may stand in either order.
COMMUTING = (aten.add.Tensor, aten.mul.Tensor)
#: What tracing leaves behind a call without computing anything.
NOISE = (aten.detach.default, aten.lift_fresh_copy.default)


def call(
    operators: Any, *given: Any, name: str = "", commutes: bool = False, **named: Any
) -> Pattern:
    """A call of an operator, or of one of a tuple of them.

    given, named   patterns or plain values, by the schema's positions and names; `...` as the
                   last one leaves the others open, without it they are at their default
    commutes       the first two arguments may stand in either order
    raises         PatternWrong for an argument that an operator does not have
    """
    wanted = tuple(operators) if isinstance(operators, tuple) else (operators,)
    opened = bool(given) and given[-1] is ...
    return Call(
        wanted,
        tuple(_pattern(item) for item in given[: len(given) - opened]),
        tuple((key, _pattern(item)) for key, item in named.items()),
        opened,
        commutes,
        name=name,
    )


def add(left: Any, right: Any, name: str = "") -> Pattern:
    """A sum in either order, unscaled."""
    return call(aten.add.Tensor, left, right, name=name, commutes=True)


def mul(left: Any, right: Any, name: str = "") -> Pattern:
    """A product in either order, element by element."""
    return call(aten.mul.Tensor, left, right, name=name, commutes=True)


def anything(name: str = "") -> Pattern:
    """Any value; a name that stands twice must be the same value."""
    return Anything(name=name)


def stored(name: str = "", owner: str = "") -> Pattern:
    """A tensor that the graph reads by name; of an owner ("base", "job", …) where one is given."""
    return Stored(owner, name=name)


def constant(name: str = "", *kinds: type, test: Callable[[Any], bool] | None = None) -> Pattern:
    """A plain value in the graph: a number, where no types are given."""
    return Constant(kinds or (int, float), test, name=name)


def either(*choices: Any) -> Pattern:
    """One of several patterns or values; the first that fits counts."""
    return Either(tuple(_pattern(choice) for choice in choices))


def uncast(inner: Any) -> Pattern:
    """Any number of casts of a value."""
    return Cast(_pattern(inner))


def where(says: str, test: Callable[[Mapping[str, Any]], bool], inner: Any) -> Pattern:
    """A pattern of which something more holds.

    says    the condition as a sentence: "its rank is 8 or more"
    test    whether it holds, of the captures so far
    """
    return Where(_pattern(inner), says, test)


def read_by(inner: Any, readers: int = 1) -> Pattern:
    """A pattern at a node that so many others read."""
    return Having(
        _pattern(inner),
        f"is read by {readers}",
        lambda node: len(node.users) == readers,
        lambda node: f"is read by {len(node.users)}",
    )


def typed(inner: Any, *dtypes: torch.dtype) -> Pattern:
    """A pattern at a tensor of one of these types."""
    return Having(
        _pattern(inner),
        f"is of type {' or '.join(map(_dtype_name, dtypes))}",
        lambda node: getattr(node.meta.get("val"), "dtype", None) in dtypes,
        lambda node: f"is of type {_dtype_name(getattr(node.meta.get('val'), 'dtype', None))}",
    )


def shaped(inner: Any, *sizes: Any) -> Pattern:
    """A pattern at a tensor of a shape.

    sizes    a number, None for any size, or a name that captures a size: the same one wherever the
             name stands, symbols too; `...` as the first one lets others stand before
    """
    opened = bool(sizes) and sizes[0] is ...
    return Shaped(_pattern(inner), tuple(sizes[opened:]), opened)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _pattern(item: Any) -> Pattern:
    if isinstance(item, Pattern):
        return item
    if isinstance(item, (list, tuple)):
        return Sequenced(tuple(_pattern(inner) for inner in item))
    return Literal(item)


def pattern_of(
    function: Callable[..., Tensor], *example: Tensor, weights: Collection[str] = ()
) -> Pattern:
    """The pattern of what a function computes of tensors.

    Its parameters are captured by their names, and so is a value that it reads twice. Numbers that
    stand in it must stand in the graph. Sums and products fit in either order.

    example    a tensor for each parameter, of a shape and type that it takes
    weights    parameters that are tensors which the graph stores
    raises     PatternWrong for a function that is no pattern: one without a result of its own, or
               one that decides by values
    """
    names = list(inspect.signature(function).parameters)[: len(example)]
    try:
        graph = make_fx(function, pre_dispatch=True)(*example).graph
    except Exception as error:
        raise _wrong(function, f"{type(error).__name__}: {error}") from error
    known: dict[fx.Node, Pattern] = {}
    inputs = iter(names)
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(inputs)
            known[node] = stored(name) if name in weights else anything(name)
        elif node.op == "call_function" and node.target in NOISE:
            known[node] = known[node.args[0]]
        elif node.op == "call_function":
            known[node] = _called(node, known)
        elif node.op == "output":
            result = node.args[0]
            if not isinstance(result, fx.Node) or not isinstance(known[result], Call):
                raise _wrong(function, "it returns no value that it computes")
            return known[result]
        else:
            raise _wrong(function, f"it reads {node.target}, which is none of its parameters")
    raise _wrong(function, "it returns nothing")


def _called(node: fx.Node, known: dict[fx.Node, Pattern]) -> Pattern:
    twice = node.name if len(node.users) > 1 else ""
    return Call(
        (node.target,),
        tuple(_part(arg, known) for arg in node.args),
        tuple((name, _part(arg, known)) for name, arg in node.kwargs.items()),
        commutes=node.target in COMMUTING,
        name=twice,
    )


def _part(value: Any, known: dict[fx.Node, Pattern]) -> Pattern:
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, (list, tuple)):
        return Sequenced(tuple(_part(item, known) for item in value))
    return Literal(value)


def _wrong(function: Callable[..., Any], found: str) -> PatternWrong:
    return PatternWrong(
        "a function is no pattern",
        function=getattr(function, "__qualname__", function),
        found=found,
        help="compute one tensor of the parameters by operators alone",
    )
