"""Operators as text: looked up by name, and nothing else is."""

from __future__ import annotations

import math
import operator

import pytest
import torch

from tests.models import error_of
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.operators import target_of, target_text

KNOWN = {
    "torch.ops.aten.linear.default": torch.ops.aten.linear.default,
    "torch.ops.tlora_fx.segment_write.default": torch.ops.tlora_fx.segment_write.default,
    "operator.getitem": operator.getitem,
    "operator.mul": operator.mul,
    "math.trunc": math.trunc,
    "builtins.max": max,
    "torch.sym_max": torch.sym_max,
}


@pytest.mark.parametrize("text", KNOWN)
def test_an_operator_has_a_text_and_is_found_by_it(text):
    """There and back."""
    assert target_text(KNOWN[text], "node") == text
    assert target_of(text) is KNOWN[text]


@pytest.mark.parametrize(
    "text",
    [
        "builtins.eval",
        "builtins.exec",
        "builtins.open",
        "builtins.__import__",
        "operator.attrgetter",
        "operator.methodcaller",
        "operator.call",
        "os.system",
        "torch.load",
        "torch.sym_",
        "torch.ops.aten.linear",
        "torch.ops.aten.no_such_operator.default",
        "torch.ops.no_such_library.f.default",
        "torch.ops.aten.linear.__class__",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.from_file.out",
        "torch.ops.aten.save.default",
        "torch.ops.prim.Print.default",
        "torch.ops.debugprims.load_tensor.default",
        "",
    ],
)
def test_what_is_no_operator_is_refused_by_name(text):
    """A file cannot make the reader call anything else."""
    assert text in error_of(lambda: target_of(text), GraphFileNotReadable)


def test_a_function_without_a_name_cannot_be_written():
    """The error names the node."""
    assert "add_7" in error_of(lambda: target_text(lambda x: x, "add_7"), GraphNotStorable)


def test_an_operator_that_opens_a_file_cannot_be_written():
    """What could not be read is refused at once."""
    target = torch.ops.aten.from_file.default

    assert "from_file" in error_of(lambda: target_text(target, "node"), GraphNotStorable)
