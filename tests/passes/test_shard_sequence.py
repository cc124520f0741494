"""Which values are cut along tokens, and where pieces are made whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests import models
from tests.planners.tensor_cases import base_of, dropping_jobs
from tlora_fx.driver import run_passes
from tlora_fx.errors import PipelineError
from tlora_fx.fingerprint import fingerprint
from tlora_fx.graph import is_call, output_of
from tlora_fx.numerics.state import copy_state
from tlora_fx.passes.shard_sequence import ShardSequence
from tlora_fx.passes.shard_tensor import ShardTensor
from tlora_fx.pipeline import Pipeline, Runner, parse_pass
from tlora_fx.pipeline.instrument import Event

ops = torch.ops.tlora_fx
GATHER, SCATTER = ops.tp_gather.default, ops.tp_scatter.default
SPLIT, COPY, SUM = ops.tp_split.default, ops.tp_copy.default, ops.tp_reduce.default


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The fused graphs of jobs on a family; each structure is traced once."""

    @cache
    def make(family, more, **changes):
        base = base_of(tmp_path_factory.mktemp(family), family, **dict(changes))
        own = {
            "": {},
            "dora": {"use_dora": True, "target_modules": ["q_proj"]},
            "copy": {"target_modules": ["up_proj"], "modules_to_save": ["input_layernorm"]},
        }
        others = [models.job(more, base, 5, r=4, **own[more])] if more else []
        return run_passes(dropping_jobs(base, *others))

    return lambda family, more="", **changes: copy_state(make(family, more, **changes))


def cut(group, size=2):
    """The group after both passes, checked as a pipeline checks it."""
    for place, item in enumerate((ShardTensor(size), ShardSequence(size)), 1):
        Runner(Pipeline(())).run_one(Event(place, item, "group", group))
    return group


def layer(group):
    return next(block.graph for name, block in group.blocks.items() if name != "head")


def calls(graph, *targets):
    return [node for node in graph.nodes if is_call(node, *targets)]


def width(node):
    """How a shape names the tokens that a value holds."""
    return str(node.meta["val"].shape[1])


def told(group):
    return [text for name, text in group.notes if name == ShardSequence.name]


def test_a_layer_takes_and_hands_on_pieces(fused):
    """Two sums of pieces, two gathers; between them all runs on a half of the tokens."""
    graph = layer(cut(fused("llama")))
    (first, *_), result = graph.nodes, output_of(graph).args[0]

    assert [len(calls(graph, one)) for one in (SCATTER, GATHER, SPLIT, COPY, SUM)] == [
        2,
        2,
        0,
        0,
        0,
    ]
    assert width(first) == width(result) == width(calls(graph, SCATTER)[0])
    norms = [n for n in graph.nodes if "layernorm" in str(n.meta.get("path")) and n.op[0] == "c"]
    assert {width(node) for node in norms} == {width(first)}
    assert all(node.args[4] for node in calls(graph, GATHER))


def test_the_root_splits_embeddings_and_gathers_for_the_loss(fused):
    """The last norm runs on pieces too."""
    root = cut(fused("llama")).root
    (split,), (gather,) = calls(root, SPLIT), calls(root, GATHER)

    assert "embed_tokens" in split.args[0].meta["path"]
    assert gather.args[0].meta["path"] == "model.norm"
    assert not calls(root, COPY)


def test_sizes_asked_of_a_piece_are_those_of_the_row(fused):
    """Attention views whole rows."""
    graph = layer(cut(fused("llama")))

    (size,) = calls(graph, torch.ops.aten.sym_size.int)
    assert size.args[0].op == "placeholder"
    assert size.args[0] is not next(iter(graph.nodes))


def test_a_trained_norm_has_its_gradient_summed(fused):
    """Each process has its tokens' part of it; the job reads its own tokens of the piece."""
    graph = layer(cut(fused("llama", "copy")))
    (copy,) = calls(graph, COPY)

    assert str(copy.args[0].target).endswith("input_layernorm.modules_to_save.default.weight")
    (read,) = calls(graph, ops.segment_read.default)
    assert is_call(read.args[1], ops.tp_segments.default)


def test_what_needs_whole_rows_gathers_first_and_is_told(fused):
    """DoRA keeps attention whole: one gather, whose gradient all processes compute alike."""
    group = cut(fused("llama", "dora"))
    one, two = calls(layer(group), GATHER)

    assert [one.args[4], two.args[4]] == [False, True]
    assert len(calls(layer(group), SPLIT)) == 1
    assert any(text.startswith("self_attn takes whole rows") for text in told(group))


@pytest.mark.parametrize(("family", "pairs"), [("gemma2", 2), ("gpt2", 2), ("phi3", 2)])
def test_other_bases_have_as_many_gathers_as_sums(fused, family, pairs):
    """Norms behind sums, tokens alone in a dimension, q, k and v in one matrix."""
    graph = layer(cut(fused(family)))

    assert len(calls(graph, SCATTER)) == pairs
    assert len([one for one in calls(graph, GATHER) if one.args[4]]) == pairs
    assert not calls(graph, SUM)


def test_one_piece_changes_nothing(fused):
    """The same code, byte for byte."""
    group = fused("llama")
    before = fingerprint(group)

    Runner(Pipeline(())).run_one(Event(1, ShardSequence(1), "group", group))
    assert fingerprint(group) == before


def test_a_size_below_one_is_refused(fused):
    """By its text too; so are padded rows."""
    assert parse_pass("shard-sequence{size=4}") == ShardSequence(4)
    for group, size in ((fused("llama"), 0), (fused("llama", attention="batch"), 2)):
        with pytest.raises(PipelineError, match="only packed rows"):
            Runner(Pipeline(())).run_one(Event(1, ShardSequence(size), "group", group))
