"""What nodes call, as text, and back: operators only, looked up by name and never evaluated."""

from __future__ import annotations

import builtins
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

import tlora_fx.ops  # noqa: F401  (registers the operators that fused graphs call)
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable

OPS = "torch.ops."
# Operators that reach beyond their tensors: interpreters, profilers, other processes, files.
REFUSED_SPACES = ("prim", "debugprims", "profiler", "c10d", "symm_mem")
# Text arguments of these names tell an operator which file to read or write.
FILE_ARGUMENTS = ("file", "filename", "file_name", "path", "filepath", "file_path")
# What graphs call on sizes besides operators: nothing here reads a file or runs code.
BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
# These make callables, call them, or change what they are given.
REFUSED = ("attrgetter", "itemgetter", "methodcaller", "call", "setitem", "delitem")


def target_text(target: Any, node: str) -> str:
    """An operator as text: "torch.ops.aten.linear.default", "operator.getitem".

    node      which node calls it, for the error
    raises    GraphNotStorable for what is no operator
    """
    if isinstance(target, torch._ops.OpOverload) and _is_pure(target):
        return OPS + str(target)
    name = getattr(target, "__name__", "")
    for text in (f"{place}.{name}" for place in ("operator", "math", "builtins", "torch")):
        if _known(text) is target:
            return text
    raise GraphNotStorable(
        "a graph calls something that a graph file cannot name",
        node=node,
        found=target,
        expected="an operator of torch.ops that opens no files, or one of operator or math",
        help="register it with torch.library.custom_op and call the operator",
    )


def target_of(text: str) -> Callable[..., Any]:
    """The operator of a text.

    raises    GraphFileNotReadable for what is no operator, or is not there
    """
    found = _overload(text) if text.startswith(OPS) else _known(text)
    if found is None:
        raise GraphFileNotReadable(
            "the graph calls an operator that is not there",
            found=text,
            help="install and import the package that registers it; operators that open files, "
            f"and those of {', '.join(REFUSED_SPACES)}, are never called"
            if text.startswith(OPS)
            else "graph files name operators of torch.ops, operator and math only",
        )
    return found


def _overload(text: str) -> Callable[..., Any] | None:
    names = text.removeprefix(OPS).split(".")
    if len(names) != 3:
        return None
    space, name, overload = names
    try:
        found = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, torch._ops.OpOverload) and _is_pure(found) else None


def _is_pure(found: torch._ops.OpOverload) -> bool:
    """Whether an operator keeps to the tensors that it is given, as far as its schema tells."""
    named = {item.name for item in found._schema.arguments if "str" in str(item.type)}
    return found.namespace not in REFUSED_SPACES and not named.intersection(FILE_ARGUMENTS)


def _known(text: str) -> Callable[..., Any] | None:
    """A function of operator, math or builtins that works on numbers, or torch's on sizes."""
    place, _, name = text.partition(".")
    homes: dict[str, types.ModuleType] = {"operator": operator, "math": math}
    found: Any = None
    if place in homes and not name.startswith("_") and name not in REFUSED:
        found = getattr(homes[place], name, None)
    elif place == "builtins" and name in BUILTINS:
        found = getattr(builtins, name)
    elif place == "torch" and name.startswith("sym_"):
        found = getattr(torch, name, None)
    return found if callable(found) else None
