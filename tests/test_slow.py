"""The lists of slow tests and of large suites name what is there, and both halves are all."""

from __future__ import annotations

import ast
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import HERE, SLOW
from tests.sampled import LARGE, half_of, is_tried


def test_a_line_names_a_test():
    """A renamed test would otherwise become quick, or be forgotten."""
    tests = {
        f"{file}::{node.name}"
        for file in {line.partition("::")[0] for line in SLOW}
        for node in ast.parse((HERE / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }

    assert {line.partition("[")[0] for line in SLOW} <= tests


def test_a_line_names_a_suite():
    """A renamed file would otherwise run whole, unnoticed."""
    assert not [name for name in LARGE if not (HERE / name).exists()]


@given(name=st.text(), suite=st.sampled_from(sorted(LARGE)))
def test_both_halves_are_all_and_share_nothing(name, suite):
    """Of a suite that is not large each half has every case."""
    case = f"{suite}::{name}"

    assert sum(is_tried(case, half) for half in ("0", "1")) == 1
    assert is_tried(case, "all")
    assert all(is_tried(f"test_readme.py::{name}", half) for half in ("0", "1"))


def test_the_commit_chooses_where_nobody_does(monkeypatch):
    """By the last digit of its name; a folder without git has the first half."""
    asked = subprocess.CompletedProcess([], 0, stdout="a1f3\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: asked)
    assert half_of({}) == "1"
    asked.stdout = "a1f2\n"
    assert half_of({}) == "0"
    assert half_of({"TLORA_FX_SAMPLE": "all"}) == "all"
    asked.returncode = 128
    assert half_of({}) == "0"
    with pytest.raises(pytest.UsageError, match="0, 1 or all, not '2'"):
        half_of({"TLORA_FX_SAMPLE": "2"})
