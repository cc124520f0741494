"""Run test files in a process whose Triton interprets kernels instead of compiling them."""

from __future__ import annotations

import inspect
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType
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


@pytest.fixture(autouse=True, scope="session")
def patched_interpreter() -> Iterator[None]:
    """Launches take less time."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            patch_interpreter(patch)
        yield


def patch_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare Triton's interpreter work to no effect: two thirds of all its time.

    It prepares its language for every call of a device function, rewrites a device function for
    each file that it stands in, computes for every sum of integers whether it overflows (to throw
    that away, for it asserts only with `debug`), makes the table of number types each time that it
    looks one up, names and counts the shape of every block anew, and compares types and shapes of
    operands that are the same objects.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    with suppress(AttributeError):
        members = _members_once(interpreter._patch_builtin)
        monkeypatch.setattr(interpreter, "_patch_builtin", members)
    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_lang", _prepared_once(interpreter._patch_lang))
    rewriter = interpreter.FunctionRewriter
    with suppress(AttributeError):
        rewritten = _rewritten_once(rewriter.rewrite_ast, vars(interpreter))
        monkeypatch.setattr(rewriter, "rewrite_ast", rewritten)
    with suppress(AttributeError):
        types = _known_types(interpreter._get_np_dtype)
        monkeypatch.setattr(interpreter, "_get_np_dtype", types)
    handle = interpreter.TensorHandle
    with suppress(AttributeError):
        monkeypatch.setattr(handle, "__init__", _measured(handle.__init__, core.pointer_type))
    with suppress(AttributeError):
        monkeypatch.setattr(core.dtype, "__eq__", _same(core.dtype.__eq__))
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
        monkeypatch.setattr(kinds, "cast", _cast_others(kinds.cast))
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
    """Prepare the language once a launch, however many modules call it by the same names."""
    from triton import language

    known: dict[int, tuple[bool, ...]] = {}
    prepared: set[tuple[bool, ...]] = set()

    class Scope:
        """What the executor of a grid puts back when it has ended."""

        def __init__(self, scope: Any = None) -> None:
            self.scope = scope

        def restore(self) -> None:
            if self.scope is not None:
                prepared.clear()
                known.clear()
                self.scope.restore()

    def once(function: Any) -> Scope:
        names = function.__globals__
        module = id(names)
        if module not in known:
            values = [value for value in names.values() if inspect.ismodule(value)]
            known[module] = tuple(
                any(value is own for value in values) for own in (language, language.core)
            )
        languages = known[module]
        if languages in prepared:
            return Scope()
        prepared.add(languages)
        return Scope(plain(function))

    return once


def _members_once(plain: Callable[..., None]) -> Callable[..., None]:
    """Look once for what a part of the language has to patch."""
    known: dict[int, list[tuple[str, Any]]] = {}

    class Noted:
        """A scope that writes down what is replaced in it."""

        def __init__(self, scope: Any) -> None:
            self.scope = scope
            self.members: list[tuple[str, Any]] = []

        def set_attr(self, part: Any, name: str, value: Any) -> None:
            self.members.append((name, getattr(part, name)))
            self.scope.set_attr(part, name, value)

    def patch(part: Any, builder: Any, scope: Any) -> None:
        from triton.runtime import interpreter

        if id(part) not in known:
            noted = Noted(scope)
            plain(part, builder, noted)
            known[id(part)] = noted.members
            return
        for name, member in known[id(part)]:
            if getattr(part, name) is member:
                interpreter._patch_attr(part, name, member, builder, scope)

    return patch


def _rewritten_once(plain: Callable[[Any], Any], names: dict[str, Any]) -> Callable[[Any], Any]:
    """Rewrite a text once: kernels' files hold the same device functions."""
    known: dict[tuple[str, str], CodeType] = {}

    def rewrite(self: Any) -> Any:
        function = self.fn
        text = _text(function.__code__)
        if not text:
            return plain(self)
        key = function.__name__, text
        if key not in known:
            known[key] = plain(self).__code__
        for name, value in names.items():
            function.__globals__.setdefault(name, value)
        copy = FunctionType(
            known[key], function.__globals__, function.__name__, function.__defaults__
        )
        copy.__annotations__ = dict(function.__annotations__)
        return copy

    return rewrite


def _text(code: CodeType) -> str:
    """What stands in a function's file, as it is now, from its first to its last line."""
    linecache.checkcache(code.co_filename)
    last = max((end for _, end, _, _ in code.co_positions() if end), default=0)
    return "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last])


def _measured(plain: Callable[..., None], pointer: Any) -> Callable[..., None]:
    """Ask for no size of what surely fits."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if type(dtype) is pointer or data.itemsize * 8 <= dtype.primitive_bitwidth:
            self.data = data
            self.dtype = dtype
            self.attr = {} if attr is None else attr
        else:
            plain(self, data, dtype, {} if attr is None else attr)

    return init


def _same(plain: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Compare no type with itself."""

    def equal(self: Any, other: Any) -> bool:
        return self is other or plain(self, other)

    return equal


def _cast_others(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Hand back at once what has the type already."""

    def cast(self: Any, value: Any, dtype: Any, *arguments: Any, **named: Any) -> Any:
        if value.type.scalar is dtype.scalar:
            return value
        return plain(self, value, dtype, *arguments, **named)

    return cast


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
        # What `builtin` wraps around it only asks whether there is a `_semantic`.
        member = getattr(member, "__wrapped__", member)

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
