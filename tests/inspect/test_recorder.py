"""What every pass left."""

from __future__ import annotations

import pytest

from tests.models import base_of, hand_written, job, plain
from tlora_fx.compiler import DEFAULT_PIPELINE, compile
from tlora_fx.inspect.program import Recorder, make_program


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
