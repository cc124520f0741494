"""The list of slow tests: every line of it names one that is there."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import HERE, SLOW


@pytest.mark.parametrize("file", sorted({line.partition("::")[0] for line in SLOW}))
def test_a_line_names_a_test(file):
    """A renamed test would otherwise become quick, or be forgotten."""
    tree = ast.parse((HERE / file).read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert {
        line.partition("::")[2].partition("[")[0] for line in SLOW if line.startswith(f"{file}::")
    } <= tests
