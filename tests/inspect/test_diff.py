"""Two programs, lined up by provenance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.inspect.programs import fused, lowered
from tlora_fx.inspect.diff import difference, difference_lines

PASSES = ("fuse-backbone", "lower-adapters")


def lowering():
    """What lower-adapters does to the small program."""
    return difference(fused(), lowered(), PASSES)


def page(found, width: int = 120) -> str:
    """The page as plain text."""
    lines = difference_lines(found, width)
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def test_the_page_reads_as_accepted(golden):
    """The whole text, as somebody looked at it."""
    golden("inspect/diff-lowering.txt", page(lowering()))


def test_the_way_back_reads_as_accepted(golden):
    """What one direction replaces, the other removes and adds."""
    golden("inspect/diff-back.txt", page(difference(lowered(), fused(), PASSES[::-1])))


def test_a_program_does_not_differ_from_itself():
    """Every node is kept."""
    found = difference(fused(), fused(), PASSES)

    assert found.changes == []
    assert found.before == found.after


def test_no_difference_is_nought_in_every_row():
    """Not "+0" where it is counted."""
    rows = page(difference(fused(), fused(), PASSES)).splitlines()[3:7]

    assert [row.split()[0] for row in rows] == ["FLOP/token", "bytes", "launches", "operators"]
    assert {row.split()[-1] for row in rows} == {"0"}


def test_what_a_node_was_made_from_counts_as_replaced():
    """The base's linear and both branches become one operator and its bank."""
    (change,) = lowering().changes

    assert change.what == "replaced"
    assert {node.target for node in change.before} >= {"aten.linear.default"}
    assert sum(node.kind == "call" for node in change.after) == 1


def test_sums_count_every_layer():
    """Two layers run the code, each launches it."""
    found = lowering()

    assert found.before.launches == 1 + 2 * 9
    assert found.after.launches == 1 + 2 * 3
    assert found.before.flop_per_token == 2 * (32 + 192 + 192 + 6 * 20)


def test_a_node_that_survives_with_another_shape_is_changed():
    """What it is now stands beside what it was."""
    program = fused()
    graph = program.graphs[1]
    nodes = [replace(n, shape=[1, "T", 16]) if n.id == "down" else n for n in graph.nodes]
    other = replace(program, graphs=[program.graphs[0], replace(graph, nodes=nodes)])
    found = difference(program, other, ("a", "b"))

    assert [change.what for change in found.changes] == ["changed"]
    assert "~ down: shape [1, T, 8] → [1, T, 16]" in page(found)


def test_what_has_no_common_ancestor_is_removed_and_added():
    """Nothing is lined up by its looks."""
    program = fused()
    graph = program.graphs[1]
    nodes = [replace(n, key="group/new") if n.id == "down" else n for n in graph.nodes]
    other = replace(program, graphs=[program.graphs[0], replace(graph, nodes=nodes)])

    whats = [change.what for change in difference(program, other, ("a", "b")).changes]
    assert sorted(whats) == ["added", "removed"]


def test_an_unknown_cost_leaves_the_sum_unknown():
    """A question mark, never a number that lacks something."""
    program = fused()
    graph = program.graphs[1]
    nodes = [replace(n, flop_per_token=None) if n.id == "down" else n for n in graph.nodes]
    other = replace(program, graphs=[program.graphs[0], replace(graph, nodes=nodes)])
    row = page(difference(program, other, ("a", "b"))).splitlines()[3]

    assert row.split()[0] == "FLOP/token"
    assert row.split()[-2:] == ["?", "?"]


@pytest.mark.parametrize("width", [72, 80, 100])
def test_the_page_fits_the_terminal(width):
    """No line is wider."""
    assert max(map(len, page(lowering(), width).splitlines())) <= width


def test_a_real_pass_is_lined_up(quickstart_stages):
    """lower-adapters replaces seven sites of the quickstart, and nothing else."""
    states = {stage.program.state: stage.program for stage in quickstart_stages}
    found = difference(states["fuse-backbone"], states["lower-adapters"], PASSES)

    assert {change.what for change in found.changes} == {"replaced"}
    assert len({change.module for change in found.changes}) == 7
    assert found.after.launches < found.before.launches
