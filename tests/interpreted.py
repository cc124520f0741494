"""Run test files in a process whose Triton interprets kernels instead of compiling them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def files(folder: Path) -> list[Path]:
    """The test files of a folder `interpreted`."""
    return sorted((folder / "interpreted").glob("test_*.py"))


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
        env=environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}", pytrace=False)


def patch_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter prepare its language once a launch.

    It does so again for every call of a device function, to no effect: a third of all its time.
    """
    from triton.runtime import interpreter

    plain: Callable[[Any], Any] = getattr(interpreter, "_patch_lang", None)
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

    with suppress(AttributeError):
        monkeypatch.setattr(interpreter, "_patch_lang", once)


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None
