"""Patterns of functions: what a function computes is what is looked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tlora_fx.errors import PatternWrong
from tlora_fx.rewriting.patterns import Call, Literal, Pattern, Sequenced, anything, stored

aten = torch.ops.aten
#: Whose first two arguments may stand in either order.
COMMUTING = (aten.add.Tensor, aten.mul.Tensor)
#: What tracing leaves behind a call without computing anything.
NOISE = (aten.detach.default, aten.lift_fresh_copy.default)


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
