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
    the table of number types each time that it looks one up, and names and counts the shape of
    every block anew.
    """
    from triton.language import core
    from triton.runtime import interpreter

    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_lang", _prepared_once(interpreter._patch_lang))
    with suppress(AttributeError):
        types = _known_types(interpreter._get_np_dtype)
        monkeypatch.setattr(interpreter, "_get_np_dtype", types)
    with suppress(AttributeError):
        blocks = _made_once(core.block_type.__init__, _block_key)
        monkeypatch.setattr(core.block_type, "__init__", blocks)
    with suppress(AttributeError):
        tensors = _made_once(core.tensor.__init__, _tensor_key, "handle", "type")
        monkeypatch.setattr(core.tensor, "__init__", tensors)
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


def _made_once(
    plain: Callable[..., None], key_of: Callable[..., Any], *own: str
) -> Callable[..., None]:
    """A constructor that computes the attributes of equal objects once.

    key_of   of its arguments, what decides these attributes
    own      attributes that are two arguments as they are
    """
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, first: Any, second: Any) -> None:
        key = key_of(first, second)
        if key in known:
            vars(self).update(known[key])
            for name, value in zip(own, (first, second), strict=False):
                setattr(self, name, value)
        else:
            plain(self, first, second)
            known[key] = {name: value for name, value in vars(self).items() if name not in own}

    return init


def _block_key(element: Any, shape: Any) -> Any:
    return element.name, tuple(shape)


def _tensor_key(handle: Any, its: Any) -> Any:
    return its.name


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None
