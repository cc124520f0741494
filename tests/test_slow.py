"""The lists of slow tests and of large suites name what is there, and the thirds are all."""

from __future__ import annotations

import ast
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import HERE, SLOW
from tests.sampled import LARGE, is_tried, third_of


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
def test_all_thirds_are_all_and_share_nothing(name, suite):
    """Of a suite that is not large each third has every case."""
    case = f"{suite}::{name}"

    assert sum(is_tried(case, third) for third in ("0", "1", "2")) == 1
    assert is_tried(case, "all")
    assert all(is_tried(f"test_readme.py::{name}", third) for third in ("0", "1", "2"))


def test_the_commit_chooses_where_nobody_does(monkeypatch):
    """By its name as a number; a folder without git has the first third."""
    asked = subprocess.CompletedProcess([], 0, stdout="a1f2\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: asked)
    assert third_of({}) == "1"
    asked.stdout = "a1f3\n"
    assert third_of({}) == "2"
    assert third_of({"TLORA_FX_SAMPLE": "all"}) == "all"
    asked.returncode = 128
    assert third_of({}) == "0"
    with pytest.raises(pytest.UsageError, match="0, 1, 2 or all, not '3'"):
        third_of({"TLORA_FX_SAMPLE": "3"})
