"""Programs for networkx and Graphviz."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from io import BytesIO

import networkx as nx
import pytest

from tests.inspect.programs import fused, lowered
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.networks import render_dot, render_graphml, to_networkx
from tlora_fx.inspect.program import make_program
from tlora_fx.inspect.schema import NodeEntry, write_file


def test_every_node_is_there_with_all_its_attributes():
    """Those of program.json, and the graph that it lies in."""
    program = fused()
    found = to_networkx(program)
    names = {field.name for field in fields(NodeEntry)} | {"graph", "owner", "layers"}

    assert found.number_of_nodes() == sum(len(graph.nodes) for graph in program.graphs)
    assert all(names <= set(data) for _, data in found.nodes(data=True))


def test_edges_lead_from_what_is_read():
    """With the place of the input."""
    found = to_networkx(fused())

    assert found["layers_0_1:norm"]["layers_0_1:up_proj"][0]["place"] == 0
    assert nx.is_directed_acyclic_graph(found)


def test_a_layer_call_names_the_block_that_runs():
    """Layers that share code share a block."""
    found = to_networkx(fused())

    assert {found.nodes[f"root:{name}"]["block"] for name in ("hidden", "hidden_2")} == {
        "layers_0_1"
    }


def test_graphml_is_read_back():
    """By networkx; an unknown cost is left out."""
    program = lowered()
    graph = program.graphs[1]
    nodes = [replace(n, flop_per_token=None) if n.id == "down" else n for n in graph.nodes]
    program = replace(program, graphs=[program.graphs[0], replace(graph, nodes=nodes)])
    found = nx.read_graphml(BytesIO(render_graphml(program).encode()))

    assert "flop_per_token" not in found.nodes["layers_0_1:down"]
    assert found.nodes["layers_0_1:up_proj"]["jobs"] == "math, chat"


def test_dot_reads_as_accepted(golden):
    """A cluster a graph, a colour a job."""
    golden("inspect/lowered.dot", render_dot(lowered()))
    golden("inspect/fused.dot", render_dot(fused()))


def test_quotes_in_names_stay_inside_their_strings():
    """A job may be called anything."""
    odd = 'a"]; evil ['
    program = replace(fused(), base=odd, jobs=[odd])
    graph = replace(program.graphs[1], owner=f"job {odd}")
    text = render_dot(replace(program, graphs=[graph]))

    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert "evil" in text
    assert "evil" not in bare


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    """Its folder is a file."""
    (tmp_path / "taken").write_text("")

    with pytest.raises(DumpNotWritable, match="the graph cannot be written"):
        write_file(tmp_path / "taken" / "graph.dot", render_dot(fused()), "the graph")


def test_a_model_is_a_graph_of_root_layers_and_head(quickstart):
    """Those of the group alone."""
    found = to_networkx(make_program(quickstart.group, "compiled"))

    assert {data["graph"] for _, data in found.nodes(data=True)} == {"root", "layers_0_3", "head"}
    assert "job records" not in {data["owner"] for _, data in found.nodes(data=True)}
