"""The data of every node, against the model that it is of."""

from __future__ import annotations

import pytest

from tlora_fx.inspect.diff import sums
from tlora_fx.inspect.program import make_program
from tlora_fx.inspect.schema import Program


@pytest.fixture(scope="module")
def program(quickstart) -> Program:
    """The quickstart."""
    return make_program(quickstart.group, "compiled", "base")


@pytest.mark.parametrize("name", ["quickstart", "odd"])
def test_nodes_cost_what_the_listing_says(name, request):
    """The same totals, though one adds up modules and the other nodes."""
    model = request.getfixturevalue(name)
    totals = request.getfixturevalue(f"{name}_listing").totals
    found = sums(make_program(model.group, "compiled"))

    assert found.flop_per_token == pytest.approx(totals.flop_per_token, rel=1e-12)
    assert found.flop_per_length == totals.flop_per_length


def test_every_node_of_every_graph_is_there(program, quickstart):
    """Root, layers and head."""
    graphs = {"root": quickstart.group.root}
    graphs |= {name: block.graph for name, block in quickstart.group.blocks.items()}

    assert {g.name: len(g.nodes) for g in program.graphs} == {
        name: len(graph.nodes) for name, graph in graphs.items()
    }


def test_names_and_keys_are_unique(program):
    """Names in their graph, keys in the program."""
    for graph in program.graphs:
        assert len({node.id for node in graph.nodes}) == len(graph.nodes)
    keys = [node.key for graph in program.graphs for node in graph.nodes]

    assert "" not in keys
    assert len(set(keys)) == len(keys)


def test_inputs_stand_before_their_users(program):
    """Every name that is read was made above."""
    for graph in program.graphs:
        seen: set[str] = set()
        for node in graph.nodes:
            assert set(node.inputs) <= seen
            seen.add(node.id)


def test_statements_are_those_of_the_code(program, quickstart):
    """Letter by letter, in their order."""
    shown = {line.strip() for line in quickstart.source.splitlines()}
    lines = [line.strip() for g in program.graphs for n in g.nodes for line in n.code.splitlines()]

    assert set(lines) <= shown


def test_ancestors_that_are_gone_are_kept(program):
    """Everything that a node was made from is alive or in the history."""
    alive = {node.key for graph in program.graphs for node in graph.nodes}
    sources = {key for g in program.graphs for node in g.nodes for key in node.made_from}
    sources |= {key for past in program.history.values() for key in past.made_from}

    assert sources <= alive | set(program.history)
    assert not alive & set(program.history)


def test_tables_have_sizes_that_people_know(program):
    """J jobs, N sequences, T tokens, R rows with a target."""
    shapes = {node.target: node.shape for node in program.graphs[0].nodes if node.kind == "input"}

    assert shapes["segments"] == ["J+1"]
    assert shapes["cu_seqlens"] == ["N+1"]
    assert shapes["token_index"] == [1, "T"]
    assert shapes["targets"] == ["R"]


def test_views_launch_nothing(program):
    """Operators that compute do."""
    launches = {n.target: n.launches for g in program.graphs for n in g.nodes if n.kind == "call"}

    assert launches["aten.view.default"] == 0
    assert launches["aten.silu.default"] == 1
    assert launches["tlora_fx.multi_lora_linear.default"] == 1


def test_sites_that_share_an_operator_launch_once_and_cost_apart(program):
    """The operator is one launch and costs nothing itself; each site's result has its cost."""
    (layer,) = (graph for graph in program.graphs if graph.layers and graph.name != "head")
    shared = [n for n in layer.nodes if n.target == "tlora_fx.multi_lora_linears.default"]
    results = [n for n in layer.nodes if n.site and n.kind == "call" and n.launches == 0]

    assert [(node.launches, node.flop_per_token) for node in shared] == [(1, 0), (1, 0)]
    assert [node.id for node in results] == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    assert all(node.flop_per_token > 0 for node in results)
    assert [node.inputs for node in results[:3]] == [[shared[0].id]] * 3


def test_a_branch_says_why_it_was_not_lowered(odd):
    """With the reason that lower-adapters gave."""
    found = make_program(odd.group, "compiled")
    notes = [node.note for graph in found.graphs for node in graph.nodes if node.note]

    assert notes
