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
    """Spare Triton's interpreter work to no effect: half of all its time.

    It prepares its language for every call of a device function, computes for every sum of
    integers whether it overflows (to throw that away, for it asserts only with `debug`), and makes
    the table of number types each time that it looks one up.
    """
    from triton.runtime import interpreter

    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_lang", _prepared_once(interpreter._patch_lang))
    with suppress(AttributeError):
        types = _known_types(interpreter._get_np_dtype)
        monkeypatch.setattr(interpreter, "_get_np_dtype", types)
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


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None
