"""Jobs stay apart behind every pass; a pass that joins them is named."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.models import error_of
from tests.numerics.conftest import a_pass
from tests.passes.token_parallel.mixing import EDITS, MIXERS, SAFE, behind_shared, shared_values
from tlora_fx.errors import GraphInvalid, NotIsolated
from tlora_fx.ir.graph import placeholders
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.state import copy_state
from tlora_fx.pipeline import Event, Pipeline, Runner, parse_pass
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
ops = torch.ops.tlora_fx
READY = "drop-export-noise,tag-roles,fold-layers,check-token-parallel"
FUSED = f"{READY},fuse-backbone"
LATER = {
    "lowered": "lower-adapters",
    "shared": "share-input",
    "keyed": "key-dropouts",
    "whole": "lower-loss",
}
STAGES = ("fused", *LATER)
KINDS = ("plain", "few", "dora", "head")
RUNS, SAMPLE = 200, 12


@pytest.fixture(scope="module")
def stages(group_after):
    """A group behind each of its passes."""
    group = copy_state(group_after(FUSED, *KINDS))
    kept = {"fused": copy_state(group)}
    runner = Runner(Pipeline(()))
    for place, (stage, name) in enumerate(LATER.items(), 1):
        runner.run_one(Event(place, parse_pass(name), "group", group))
        kept[stage] = copy_state(group)
    return kept


@pytest.fixture
def run_behind(stages):
    """Run an edit as a pass behind a stage: `run_behind("fused", edit)`."""

    def run(stage, edit, *instruments, verify="structure"):
        group = copy_state(stages[stage])
        item = a_pass(edit, numerics="no")
        Runner(Pipeline(()), instruments, verify).run_one(Event(1, item, "group", group))
        return group

    return run


def behind_norm(group):
    """A value of a norm that all jobs share."""
    return next(n for n, _ in shared_values(group) if "post_attention" in n.meta["path"])


def edit_of(seed: int):
    """An edit and a stage, drawn by a seed, as (name, stage, edit)."""
    choice = Random(seed)
    name, stage = choice.choice(sorted(EDITS)), choice.choice(sorted(STAGES))
    return name, stage, lambda group: EDITS[name](group, choice) or EDITS["cumsum"](group, choice)


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_an_edit_that_joins_jobs_is_refused(run_behind, seed):
    """A small sample of the run below."""
    _, stage, edit = edit_of(seed)

    with pytest.raises(GraphInvalid, match="spoils"):
        run_behind(stage, edit)


@pytest.mark.slow
def test_random_edits_that_join_jobs_are_refused(run_behind, record_property):
    """Each of 200, behind any group pass; nearly all by the check of isolation itself."""
    passed, kinds = [], {}
    for seed in range(RUNS):
        name, stage, edit = edit_of(seed)
        try:
            run_behind(stage, edit)
        except GraphInvalid as error:
            kinds.setdefault(type(error).__name__, []).append(f"{name} behind {stage}")
        else:
            passed.append(f"{seed}: {name} behind {stage}")
    record_property("refused by", {kind: len(names) for kind, names in kinds.items()})

    assert passed == []
    assert len(kinds["NotIsolated"]) > RUNS * 3 // 4


@pytest.mark.parametrize("name", sorted(SAFE))
def test_an_edit_that_leaves_jobs_apart_passes(run_behind, name):
    """What works on each token by itself may stand behind any pass."""
    for stage in STAGES:
        run_behind(stage, lambda group: behind_shared(SAFE[name])(group, Random(name)))


def test_the_error_names_pass_node_and_line(run_behind):
    """Blame falls on the pass that did it."""

    def cumulate(group):
        node = behind_norm(group)
        Rewriter(node.graph).insert_after(node, lambda make: make(aten.cumsum.default, node, 1))

    text = error_of(lambda: run_behind("fused", cumulate), NotIsolated)

    assert "pass 'spoils' lets jobs see each other" in text
    assert "aten.cumsum" in text
    assert "modeling_llama.py" in text
    assert "made by  spoils" in text
    assert "it reduces over the row" in text


def test_the_head_must_not_know_how_many_targets_there_are(run_behind):
    """Its row is the targets of all jobs."""

    def divide(group):
        graph = group.blocks["head"].graph
        node = next(n for n, _ in shared_values(group) if n.graph is graph)
        Rewriter(graph).insert_after(node, lambda make: MIXERS["size"](make, node, 1))

    with pytest.raises(NotIsolated, match="size of the row"):
        run_behind("whole", divide)


def convolving(table):
    """An edit that convolves a value along its tokens, by a table of the row."""

    def edit(group):
        node = behind_norm(group)
        dtype, width = node.meta["val"].dtype, node.meta["val"].shape[2]

        def build(make):
            x = make(aten.transpose.int, node, 1, 2)
            weight = make(aten.ones.default, [width, 1, 3], dtype=dtype, device="meta")
            starts = placeholders(node.graph)[table]
            out = make(ops.sequence_conv1d.default, x, weight, None, starts, 1, width)
            return make(aten.transpose.int, out, 1, 2)

        Rewriter(node.graph).insert_after(node, build)

    return edit


def test_a_convolution_within_sequences_passes(run_behind):
    """It goes by the table of the row's sequences, as attention does."""
    run_behind("fused", convolving("cu_seqlens"))


def test_a_convolution_by_another_table_is_refused(run_behind):
    """Jobs begin where sequences do, but not each sequence is a job."""
    with pytest.raises(NotIsolated, match="not the row's own table"):
        run_behind("fused", convolving("segments"))


def test_a_pass_before_fusing_is_blamed(group_after):
    """The base's graph is checked again while it stands alone."""
    group = copy_state(group_after(READY, "plain", "few"))

    def cumulate(group):
        graph = next(iter(group.base.blocks.values())).graph
        node = next(n for n in graph.nodes if n.target is aten.mul.Tensor and n.meta["axis"] == 1)
        Rewriter(graph).insert_after(node, lambda make: make(aten.cumsum.default, node, 1))

    runner = Runner(Pipeline(()))
    with pytest.raises(NotIsolated, match="pass 'spoils'"):
        runner.run_one(Event(1, a_pass(cumulate), "group", group))


def test_numerics_see_a_leak_that_no_rule_knows(run_behind):
    """Other tokens of one job change another job's bits: the node is named."""

    def cumulate(group):
        node = behind_norm(group)
        Rewriter(node.graph).insert_after(node, lambda make: make(aten.cumsum.default, node, 1))

    watch = Numerics()
    text = error_of(lambda: run_behind("fused", cumulate, watch, verify="none"), NotIsolated)

    assert "the same bits for job" in text
    assert "aten.cumsum" in text


def test_numerics_see_a_leak_backwards(run_behind):
    """From a later job into an earlier one."""

    def turn(group):
        node = behind_norm(group)
        Rewriter(node.graph).insert_after(node, lambda make: make(aten.flip.default, node, [1]))

    with pytest.raises(NotIsolated):
        run_behind("whole", turn, Numerics(), verify="none")
