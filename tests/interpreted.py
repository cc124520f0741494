"""Run test files in a process whose Triton interprets kernels instead of compiling them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: Triton's interpreter multiplies by numpy. With AVX-512 what OpenBLAS gives of one row depends on
#: how many columns are asked for; no kernel does that.
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"}


def run(*files: Path, marked: str = "not slow") -> None:
    """Run some files in one process; what it says when they fail becomes the failure.

    marked   which of their tests, as `pytest -m` has it
    """
    pytest.importorskip("triton")
    words = ["-q", "-p", "no:cacheprovider", "-m", marked]
    command = [sys.executable, "-m", "pytest", *words, *map(str, files)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        [*command, "-n", "0"] if _has_xdist() else command,
        cwd=ROOT,
        env=environment | INTERPRETED,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}", pytrace=False)


def patch_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare Triton's interpreter work to no effect: more than half of all its time.

    It prepares its language for every call of a device function, computes for every sum of
    integers whether it overflows (to throw that away, for it asserts only with `debug`), makes
    the table of number types each time that it looks one up, names and counts the shape of every
    block anew, and compares types and shapes of operands that are the same objects.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_lang", _prepared_once(interpreter._patch_lang))
    with suppress(AttributeError):
        types = _known_types(interpreter._get_np_dtype)
        monkeypatch.setattr(interpreter, "_get_np_dtype", types)
    with suppress(AttributeError):
        monkeypatch.setattr(core.block_type, "__init__", _blocks_once(core.block_type.__init__))
    with suppress(AttributeError):
        monkeypatch.setattr(core.tensor, "__init__", _tensors_once(core.tensor.__init__))
    with suppress(AttributeError):
        unwrap = _unwrapped(core._unwrap_if_constexpr, core.constexpr, core.tensor)
        monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrap)
    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_attr", _bound(interpreter))
    kinds = semantic.TritonSemantic
    with suppress(AttributeError):
        broadcast = _broadcast_others(kinds.broadcast_impl_value)
        monkeypatch.setattr(kinds, "broadcast_impl_value", broadcast)
    with suppress(AttributeError):
        promote = _promote_others(kinds.binary_op_type_checking_impl, core.tensor)
        monkeypatch.setattr(kinds, "binary_op_type_checking_impl", promote)
    with suppress(AttributeError):
        constants = _constants_once(kinds.scalar_constant)
        monkeypatch.setattr(kinds, "scalar_constant", constants)
    builder = interpreter.interpreter_builder
    with suppress(AttributeError, TypeError):
        options = replace(builder.options, sanitize_overflow=builder.options.debug)
        monkeypatch.setattr(builder, "options", options)


def _prepared_once(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Prepare the language for a module once a launch."""
    prepared: set[int] = set()

    class Scope:
        """What the executor of a grid puts back when it has ended."""

        def __init__(self, scope: Any = None) -> None:
            self.scope = scope

        def restore(self) -> None:
            if self.scope is not None:
                prepared.clear()
                self.scope.restore()

    def once(function: Any) -> Scope:
        module = id(function.__globals__)
        if module in prepared:
            return Scope()
        prepared.add(module)
        return Scope(plain(function))

    return once


def _known_types(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's type of a type of Triton, by the name of its scalar."""
    known: dict[str, Any] = {}

    def np_dtype(its: Any) -> Any:
        scalar = its.scalar
        if scalar.name not in known:
            known[scalar.name] = plain(scalar)
        return known[scalar.name]

    return np_dtype


def _blocks_once(plain: Callable[..., None]) -> Callable[..., None]:
    """Name and count a block once; blocks of one shape share the object that says it."""
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    by_id: dict[int, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        shared = by_id.get(id(shape)) is shape
        key = element_ty.name, id(shape) if shared else tuple(shape)
        if key not in known:
            plain(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            by_id[id(self.shape)] = self.shape
            known[key] = vars(self).copy()
        else:
            vars(self).update(known[key])

    return init


def _tensors_once(plain: Callable[..., None]) -> Callable[..., None]:
    """Compute once what a tensor says of its type."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - named as Triton's
        name = type.name
        if name not in known:
            plain(self, handle, type)
            known[name] = {k: v for k, v in vars(self).items() if k not in ("handle", "type")}
        else:
            attributes = vars(self)
            attributes.update(known[name])
            attributes["handle"] = handle
            attributes["type"] = type

    return init


def _unwrapped(plain: Callable[[Any], Any], wrapper: Any, tensor: Any) -> Callable[[Any], Any]:
    """Look at the class first of what is no list."""
    bare = frozenset({tensor, int, float, bool, str, type(None)})

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in bare:
            return value
        return value.value if kind is wrapper else plain(value)

    return unwrap


def _broadcast_others(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Let operands of one shape be, and fill a block with a scalar without asking for its type."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block():
            if not right.is_block():
                its = left.with_element_ty(right.scalar)
                return lhs, self.tensor(self.builder.create_splat(its, rhs.handle), its)
            if left.shape is right.shape:
                return lhs, rhs
        elif not right.is_block():
            return lhs, rhs
        return plain(self, lhs, rhs)

    return broadcast


INTEGERS = frozenset({"int32", "uint32", "int64", "uint64"})
#: Types whose operations of equal operands, a division too, compute in this type.
CLOSED = INTEGERS | {"int1", "fp32"}


def _promote_others(plain: Callable[..., Any], tensor: Any) -> Callable[..., Any]:
    """Ask for no common type of operands that have it, nor of a pointer and its offset."""

    def promote(self: Any, lhs: Any, rhs: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(lhs, tensor):
            return plain(self, lhs, rhs, *arguments, **named)
        left = lhs.dtype.name
        if isinstance(rhs, tensor):
            right = rhs.dtype.name
            if (left == right and left in CLOSED) or (
                arguments[:1] == (True,) and right in INTEGERS and lhs.dtype.is_ptr()
            ):
                return self.broadcast_impl_value(lhs, rhs)
        elif left in INTEGERS and type(rhs) is int and 0 <= rhs < 2**31:
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        return plain(self, lhs, rhs, *arguments, **named)

    return promote


def _bound(
    interpreter: Any,
) -> Callable[[Any, str, Callable[..., Any], Any, Any], None]:
    """What puts the interpreter's functions in the place of the language's: with less around."""
    semantic = interpreter.interpreter_semantic

    def patch(target: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(target, name, call)

    return patch


def _constants_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make the tensor of a constant once; nothing writes into a tensor's own numbers."""
    known: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or type(value) not in (int, float, bool):
            return plain(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = plain(self, value, dtype)
        return known[key]

    return constant


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None
