"""Run test files in a process whose Triton interprets kernels instead of compiling them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_TESTS = 5


def files(folder: Path) -> list[Path]:
    """The test files of a folder `interpreted`."""
    return sorted((folder / "interpreted").glob("test_*.py"))


def run(file: Path) -> None:
    """Run one file; what it says when it fails becomes the failure."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
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


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None
