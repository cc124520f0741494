"""Device functions that Triton's interpreter rewrites once a text (tests/interpreted.py)."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

KERNEL = """
import triton
import triton.language as tl

FACTOR = tl.constexpr({factor})


@triton.jit
def scaled(x):
    y = x * FACTOR{more}
    return y


@triton.jit
def kernel(x, SIZE: tl.constexpr):
    rows = x + tl.arange(0, SIZE)
    tl.store(rows, scaled(tl.load(rows)))
"""


@pytest.fixture
def scaled_ones(tmp_path, monkeypatch):
    """What a kernel in a file makes of ones: `scaled_ones("a", factor=2)`."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(name: str, factor: int, more: str = "") -> list[float]:
        file = tmp_path / f"{name}.py"
        file.write_text(KERNEL.format(factor=factor, more=more))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ones = torch.ones(4)
        module.kernel[1,](ones, SIZE=4)
        return ones.tolist()

    return run


def test_a_changed_source_is_read_anew(scaled_ones):
    """Of one file, whose lines an earlier launch has read."""
    assert scaled_ones("a", factor=2) == [2.0] * 4
    assert scaled_ones("a", factor=2, more=" + 1") == [3.0] * 4


def test_equal_functions_use_the_names_of_their_own_files(scaled_ones):
    """Rewritten once, a function finds another factor in another file."""
    assert scaled_ones("a", factor=2) == [2.0] * 4
    assert scaled_ones("b", factor=5) == [5.0] * 4
