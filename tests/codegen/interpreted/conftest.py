"""Tests of kernels under Triton's interpreter, which is chosen when Triton is imported.

Workers of pytest run many files in one process and have often imported Triton already, so these
files are collected only where TRITON_INTERPRET=1 is set from outside. tests/test_interpreted.py
runs them in such a process; to run one by hand:

    TRITON_INTERPRET=1 pytest -n 0 tests/codegen/interpreted/test_pack.py
"""

from __future__ import annotations

import os

import pytest

from tests.codegen.problems import Problem

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def problem():
    """Make a random site: `problem(lengths=(5, 0, 40), ranks=(4, 0, 16))`; see Problem."""
    return Problem.make


@pytest.fixture(autouse=True)
def interpreter():
    """Kernels are interpreted here; their files lie in this test run's own cache folder."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("run this file with TRITON_INTERPRET=1 in the environment", pytrace=False)
