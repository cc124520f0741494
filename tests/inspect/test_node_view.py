"""The page of one node."""

from __future__ import annotations

import pytest

from tests.inspect.programs import fused, lowered
from tlora_fx.inspect.program_text import find, match_lines


def page(program, name: str, width: int = 120) -> str:
    """The page as plain text."""
    lines = [line for match in find(program, name) for line in match_lines(program, match, width)]
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


@pytest.mark.parametrize(
    ("file", "make", "name"),
    [("lowered", lowered, "layers.1.mlp.up_proj"), ("branches", fused, "layers.1.mlp.up_proj"),
     ("norm", fused, "norm")],
    ids=["lowered", "branches", "norm"],
)  # fmt: skip
def test_the_page_reads_as_accepted(file, make, name, golden):
    """The whole text, as somebody looked at it."""
    golden(f"inspect/node-{file}.txt", page(make(), name))


@pytest.mark.parametrize("width", [72, 80, 100])
@pytest.mark.parametrize("name", ["mlp.up_proj", "norm", "model.layers.0"])
def test_a_page_fits_the_terminal(name, width):
    """No line is wider, but code."""
    program = fused()
    code = {line for g in program.graphs for node in g.nodes for line in node.code.splitlines()}
    lines = [line for line in page(program, name, width).splitlines() if line not in code]

    assert max(map(len, lines)) <= width


def test_users_and_arguments_are_named():
    """Both ways along the graph."""
    text = page(lowered(), "layers_0_1:up_proj")

    assert "reads        norm" in text
    assert "read by      down" in text


def test_provenance_goes_back_to_the_trace():
    """Which pass made the node, and of what."""
    text = page(lowered(), "layers_0_1:up_proj")

    assert "made by      lower-adapters, of" in text
    assert "trace: base/up_proj:linear" in text
