"""The arguments of a call by name, as its operator's schema has them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

# Stands for the default of an argument that must be given.
REQUIRED: Any = object()


@cache
def parameters_of(target: Any) -> dict[str, Any] | None:
    """Names and defaults of an operator's arguments, None for a callable without a schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return {
        argument.name: argument.default_value if argument.has_default_value() else REQUIRED
        for argument in schema.arguments
    }


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What a call is given, by name, defaults too; "0", "1", … where there is no schema.

    `linear(x, w)`, `linear(x, w, None)` and `linear(x, weight=w)` are alike.
    """
    known = parameters_of(node.target)
    if known is None:
        return {**{str(place): arg for place, arg in enumerate(node.args)}, **node.kwargs}
    return {**known, **dict(zip(known, node.args, strict=False)), **node.kwargs}
