"""The data of every node, against the model that it is of, and what every pass left."""

from __future__ import annotations

import pytest

from tests.models import base_of, hand_written, job, plain
from tlora_fx.compiler import DEFAULT_PIPELINE, compile
from tlora_fx.inspect.diff import sums
from tlora_fx.inspect.program import Recorder, make_program
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


def test_there_is_a_stage_for_the_trace_and_each_pass(quickstart_stages):
    """In their order."""
    names = [stage.program.state for stage in quickstart_stages]

    assert names == ["trace", *DEFAULT_PIPELINE.split(",")]
    assert [stage.place for stage in quickstart_stages] == list(range(len(names)))


def test_jobs_have_graphs_of_their_own_until_they_are_fused(quickstart_stages):
    """The base, and a graph for each structure."""
    states = {stage.program.state: stage.program for stage in quickstart_stages}
    owners = {graph.owner for graph in states["check-token-parallel"].graphs}

    assert owners == {"base", "job word-problems", "job small-talk", "job records"}
    assert {graph.owner for graph in states["fuse-backbone"].graphs} == {"group"}


def test_the_last_stage_is_the_model(quickstart, quickstart_stages):
    """Node by node."""
    made = make_program(quickstart.group, "lower-loss")

    assert quickstart_stages[-1].program.graphs == made.graphs


def test_a_stage_is_as_the_pass_left_it(quickstart_stages):
    """Later passes rewrite the graphs, not what was recorded."""
    states = {stage.program.state: stage.program for stage in quickstart_stages}
    before = {n.target for g in states["fuse-backbone"].graphs for n in g.nodes}
    after = {n.target for g in states["lower-adapters"].graphs for n in g.nodes}

    assert "tlora_fx.segment_write.default" in before - after
    assert "tlora_fx.multi_lora_linear.default" in after - before


def test_an_attempt_that_was_given_up_is_dropped():
    """A base that mixes tokens in packed form is compiled again, padded."""
    recorder = Recorder()
    model = compile(hand_written(plain(), targets=("qkv", "out")), instruments=[recorder])

    assert model.group.form == "batch"
    assert {stage.program.form for stage in recorder.stages} == {"batch"}
    assert len(recorder.stages) == len(DEFAULT_PIPELINE.split(",")) + 1


@pytest.mark.parametrize("jobs", [1, 3])
def test_jobs_of_one_structure_are_recorded_once(jobs, tmp_path):
    """Another rank is no other structure."""
    base = base_of(tmp_path, "llama", dtype="float32", num_hidden_layers=2)
    recorder = Recorder()
    compile(
        [job(f"job-{n}", base, r=2 + n, target_modules=["q_proj"]) for n in range(jobs)],
        instruments=[recorder],
    )
    program = recorder.stages[1].program

    assert {graph.owner for graph in program.graphs} == {"base", "job job-0"}
    assert program.jobs == [f"job-{n}" for n in range(jobs)]
