"""Operators that graph files may call, by name: none of them opens files or runs code."""

from __future__ import annotations

import builtins
import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.ops.job_operator import load_operator

# Methods would be looked up by name on whatever comes; traced graphs have none.
OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")
# Paths of tensors and layers: they become attributes of the generated code.
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
OPERATORS = "torch.ops."
# Operators that reach beyond their tensors: interpreters, profilers, other processes, files.
REFUSED_SPACES = ("prim", "debugprims", "profiler", "c10d", "symm_mem")
# Text arguments of these names tell an operator which file to read or write.
FILE_ARGUMENTS = ("file", "filename", "file_name", "path", "filepath", "file_path")
# What graphs call on sizes besides operators: nothing here reads a file or runs code.
BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
# These make callables, call them, or change what they are given.
REFUSED = ("attrgetter", "itemgetter", "methodcaller", "call", "setitem", "delitem")


def fits(op: Any, target: Any) -> bool:
    """Whether a node is of a kind that graph files keep; operators are judged by their names."""
    if op not in OPS or not isinstance(target, str):
        return False
    if op == "placeholder":
        return target.isidentifier()
    return op not in ("get_attr", "call_module") or _PATH.fullmatch(target) is not None


def target_text(target: Any, node: str) -> str:
    """An operator as text: "torch.ops.aten.linear.default", "operator.getitem".

    raises    GraphNotStorable for what is no operator
    """
    if isinstance(target, torch._ops.OpOverload) and _is_pure(target):
        return OPERATORS + str(target)
    name = getattr(target, "__name__", "")
    for text in (f"{home}.{name}" for home in ("operator", "math", "builtins", "torch")):
        if _plain_function(text) is target:
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
    target = _overload(text) if text.startswith(OPERATORS) else _plain_function(text)
    if target is None:
        raise GraphFileNotReadable(
            "the graph calls an operator that is not there",
            found=text,
            help="install the package that registers it, and import it unless one of its entry "
            "points names the operator; operators that open files, "
            f"and those of {', '.join(REFUSED_SPACES)}, are never called"
            if text.startswith(OPERATORS)
            else "graph files name operators of torch.ops, operator and math only",
        )
    return target


def _overload(text: str) -> Callable[..., Any] | None:
    names = text.removeprefix(OPERATORS).split(".")
    if len(names) != 3:
        return None
    space, name, overload = names
    if not hasattr(getattr(torch.ops, space), name):
        load_operator(f"{space}.{name}")
    try:
        overloaded = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return (
        overloaded
        if isinstance(overloaded, torch._ops.OpOverload) and _is_pure(overloaded)
        else None
    )


def _is_pure(operation: torch._ops.OpOverload) -> bool:
    """Whether an operator keeps to the tensors that it is given, as far as its schema tells."""
    named = {item.name for item in operation._schema.arguments if "str" in str(item.type)}
    return operation.namespace not in REFUSED_SPACES and not named.intersection(FILE_ARGUMENTS)


def _plain_function(text: str) -> Callable[..., Any] | None:
    """A function of operator, math or builtins that works on numbers, or torch's on sizes."""
    home, _, name = text.partition(".")
    homes: dict[str, types.ModuleType] = {"operator": operator, "math": math}
    function: Any = None
    if home in homes and not name.startswith("_") and name not in REFUSED:
        function = getattr(homes[home], name, None)
    elif home == "builtins" and name in BUILTINS:
        function = getattr(builtins, name)
    elif home == "torch" and name.startswith("sym_"):
        function = getattr(torch, name, None)
    return function if callable(function) else None
