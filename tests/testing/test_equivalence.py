"""`tlora_fx.testing`: two states of graphs, compared by what jobs get from them."""

from __future__ import annotations

import pytest
import torch

from tests.models import error_of
from tests.pipeline.graphs import Does
from tlora_fx.compiler import run_passes
from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import is_call
from tlora_fx.pipeline import REGISTRY
from tlora_fx.testing import around, assert_equivalent, small_base, small_job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two jobs on a small Llama, one with dropout."""
    base = small_base(tmp_path_factory.mktemp("base"))
    return [small_job("a", base, lora_dropout=0.1), small_job("b", base, r=2)]


@pytest.mark.parametrize("place", ["tag-roles@before:fold-layers", "key-dropouts@after:lower-loss"])
def test_a_pass_that_keeps_numbers_is_equivalent(jobs, place):
    """Before fusing each job alone, after it all together; dropouts draw each job's own masks."""
    before, after = around(jobs, place)

    assert_equivalent(before, after, exact=True)


def test_fused_jobs_are_equivalent_to_jobs_alone(jobs):
    """Up to the rounding of sums in another order."""
    alone = run_passes(jobs, stop_after="check-token-parallel")
    fused = run_passes(jobs)

    assert not alone.fused
    assert_equivalent(alone, fused)


def test_a_pass_that_changes_numbers_is_told(jobs):
    """Which job, which number, by how much."""
    before, after = around(jobs, "tag-roles@before:fold-layers")
    scale = next(
        node
        for graph in after.jobs[1].graphs()
        for node in graph.nodes
        if is_call(node, torch.ops.aten.mul.Tensor) and node.meta.get("part") == "scale"
    )
    scale.target = torch.ops.aten.div.Tensor
    scale.update_arg(1, 7.0)

    with pytest.raises(AssertionError, match="of job 'b' differs by"):
        assert_equivalent(before, after)


def test_there_is_nothing_before_the_first_pass(jobs, monkeypatch):
    """It has no graphs to compare with."""
    monkeypatch.setitem(REGISTRY, "does", Does)

    text = error_of(lambda: around(jobs, "does@before:drop-export-noise"), PipelineError)

    assert "no graphs before the first pass" in text
