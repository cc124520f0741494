"""The list of slow tests: every line of it names one that is there."""

from __future__ import annotations

import ast

from tests.conftest import HERE, SLOW


def test_a_line_names_a_test():
    """A renamed test would otherwise become quick, or be forgotten."""
    tests = {
        f"{file}::{node.name}"
        for file in {line.partition("::")[0] for line in SLOW}
        for node in ast.parse((HERE / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }

    assert {line.partition("[")[0] for line in SLOW} <= tests
