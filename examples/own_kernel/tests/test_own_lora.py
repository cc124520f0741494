"""The pass: numbers, isolation, graph files, and training."""

import pytest
import torch
from jobs import ADDED, job_of, train
from tlora_fx_own_kernel.fused_lora import FusedLora

from tlora_fx import run_passes
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.inspect.cost import cost_of
from tlora_fx.ir.graph import is_call
from tlora_fx.testing import around, assert_equivalent, small_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of three layers."""
    return small_base(tmp_path_factory.mktemp("base"), dtype="float64")


@pytest.fixture(scope="module")
def jobs(base):
    """Two jobs whose ranks and scales differ."""
    return [job_of(base, "wide", 4), job_of(base, "narrow", 2)]


@pytest.fixture(scope="module")
def states(jobs):
    """The graphs before and after the pass."""
    return around(jobs, ADDED)


def calls(group):
    """The operator's calls."""
    return [n for graph in group.graphs() for n in graph.nodes if is_call(n, FusedLora.target)]


def test_numbers_stay(states):
    """Losses and gradients are the same, up to rounding."""
    before, after = states

    assert len(calls(after)) == 2
    assert_equivalent(before, after)


def test_matrices_at_its_sites_stay_whole_under_tensor_plans(jobs):
    """The report says why."""
    pipeline = resolve_pipeline().adding(ADDED).adding("shard-tensor{size=2}@after:lower-loss")

    group = run_passes(jobs, pipeline)

    assert len(calls(group)) == 2
    notes = [note for name, note in group.notes if name == "shard-tensor"]
    assert any("stays whole" in note and "own_kernel.fused_lora" in note for note in notes)


def test_its_cost_is_known(states):
    """Two operations a multiply-add of the frozen linear and of a rank's A and B."""
    _, after = states

    assert "?" not in str(cost_of(calls(after)[0], after).flop)


def test_a_graph_file_holds_it(states):
    """What is read is what was written."""
    text = graph_text(states[1])

    assert graph_text(graphs_of_text(text)) == text


def test_each_job_learns_what_it_learns_by_our_operators(jobs, tmp_path):
    """Adapters after three steps, and those of each job by itself."""
    ours = train(jobs, tmp_path / "ours", added=())
    own = train(jobs, tmp_path / "own")

    for job in jobs:
        alone = train([job], tmp_path / job.name)
        for name, wanted in ours[job.name].items():
            for found in (own[job.name][name], alone[job.name][name]):
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_job_that_explodes_leaves_the_bits_of_its_neighbour(jobs, base, tmp_path):
    """Its rate makes its adapter too large for any use."""
    calm = train(jobs, tmp_path / "calm")
    wild = train([jobs[0], job_of(base, "narrow", 2, learning_rate=1e30)], tmp_path / "wild")

    assert any(not value.abs().amax() < 1e20 for value in wild["narrow"].values())
    for name, wanted in calm["wide"].items():
        assert torch.equal(wild["wide"][name], wanted)
