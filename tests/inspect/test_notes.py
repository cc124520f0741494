"""What passes note of nodes is shown everywhere, and what a node costs is told in symbols."""

from __future__ import annotations

import json

import pytest
import sympy
import torch

from tests.inspect.test_html import nodes_of, unpack
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.inspect.cost import cost_of
from tlora_fx.inspect.html import page_data
from tlora_fx.inspect.networks import render_graphml, to_networkx
from tlora_fx.inspect.program import make_program
from tlora_fx.inspect.program_text import find, match_lines
from tlora_fx.inspect.schema import PassStage, Program
from tlora_fx.ir.graph import is_call, note
from tlora_fx.numerics.state import copy_state

aten = torch.ops.aten
READY = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"
T, T1 = sympy.symbols("T T1", positive=True, integer=True)


@pytest.fixture
def group(group_after):
    """Two jobs, fused."""
    return copy_state(group_after(READY, "plain", "few"))


@pytest.fixture
def linear(group):
    """A linear that all jobs share: 64 in, 64 out, or whatever the small base has."""
    return next(
        node
        for graph in group.graphs()
        for node in graph.nodes
        if is_call(node, aten.linear.default) and node.meta["role"] == "shared"
    )


@pytest.fixture
def program(group, linear):
    """The data of the graphs, with a note at the linear."""
    note(linear, "estimated ms", 1.5)
    return make_program(group, "fuse-backbone")


def noted(program):
    """The nodes with notes."""
    return [node for _, node in program.nodes() if node.notes]


def test_a_note_is_data(program, tmp_path):
    """In JSON, which reads back."""
    (tmp_path / "program.json").write_text(program.to_json())

    (node,) = noted(Program.load(tmp_path / "program.json"))
    assert node.notes == {"estimated ms": 1.5}


def test_a_note_is_shown_in_text(program):
    """Under its own name."""
    (node,) = noted(program)
    lines = match_lines(program, find(program, node.id)[0])

    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert "estimated ms" in text
    assert "1.5" in text


def test_a_note_is_in_networks(program):
    """As a field, which GraphML has under the note's name."""
    (node,) = noted(program)
    fields = [data for _, data in to_networkx(program).nodes(data=True) if data["notes"]]

    assert [data["id"] for data in fields] == [node.id]
    assert "notes.estimated ms" in render_graphml(program)


def test_a_note_is_on_the_page(program):
    """Beside the node, and beside no other."""
    (node,) = noted(program)
    data = unpack(page_data([PassStage(0, "x", True, 0.0, program)]))

    shown = [n for graph in data["graphs"] for n in nodes_of(data, graph) if n["note"]]
    assert [(n["id"], n["note"]) for n in shown] == [(node.id, "estimated ms: 1.5")]


def test_a_note_stays_in_a_graph_file(group, linear):
    """With its type."""
    note(linear, "estimated ms", 1.5)
    again = graphs_of_text(graph_text(group))

    notes = [n.meta["notes"] for g in again.graphs() for n in g.nodes if "notes" in n.meta]
    assert notes == [{"estimated ms": 1.5}]


def test_a_linear_costs_two_a_multiply_add(group, linear):
    """In tokens of the row; bytes are those of its tensors."""
    outer, inner = linear.args[1].meta["val"].shape
    cost = cost_of(linear, group)

    assert cost.flop == 2 * outer * inner * T
    assert cost.bytes == 4 * (T * inner + outer * inner + T * outer)
    assert cost.unknown == ()
    assert cost_of(linear).flop == cost.flop


def test_a_branch_costs_by_its_jobs_tokens(group):
    """No stand-in of a segment's size is seen."""
    branch = next(
        node
        for graph in group.graphs()
        for node in graph.nodes
        if is_call(node, aten.linear.default) and node.meta["jobs"] == ("few",)
    )
    outer, inner = branch.args[1].meta["val"].shape

    assert cost_of(branch, group).flop == 2 * outer * inner * T1
    assert cost_of(branch).flop == 2 * outer * inner * T1


def test_stand_ins_of_segments_are_not_shown(program):
    """Sizes of segments have names."""
    assert "100000" not in json.dumps(program.to_json())
