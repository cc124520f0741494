"""Which matrices are cut, where sums stand, and why what is whole stays whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests import models
from tests.parallel.tensor_cases import base_of, dropping_jobs
from tests.sampled import sampled
from tlora_fx.compiler import prepare, run_passes
from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import is_call, output_of
from tlora_fx.ir.storage import LocalShard, Shard
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.state import copy_state
from tlora_fx.passes.tensor_parallel.shard import ShardTensor
from tlora_fx.pipeline import Pipeline, Runner, parse_pass
from tlora_fx.pipeline.instrument import Event

ops = torch.ops.tlora_fx
HALF_A, HALF_B = ".lora.a", ".lora.b"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The fused graphs of jobs on a family; each structure is traced once."""

    @cache
    def make(family, dora="", rate=0.0, **changes):
        base = base_of(tmp_path_factory.mktemp(family), family, **dict(changes))
        own = {"r": 4, "use_dora": True, "target_modules": [dora], "lora_dropout": rate}
        more = [models.job("dora", base, 5, **own)] if dora else []
        return run_passes(dropping_jobs(base, *more))

    return lambda family, **changes: copy_state(make(family, **changes))


def cut(group, **options):
    """The group after the pass, checked as a pipeline checks it."""
    Runner(Pipeline(())).run_one(Event(1, ShardTensor(**options), "group", group))
    return group


def layer(group):
    """The graph of the first layers; of a model of one layer that is the root."""
    return next((b.graph for name, b in group.blocks.items() if name != "head"), group.root)


def calls(graph, *targets):
    return [node for node in graph.nodes if is_call(node, *targets)]


def sharded(graph):
    """Stored tensors that are cut, with their dimensions."""
    refs = [node.meta["tensor"] for node in graph.nodes if node.op == "get_attr"]
    return {ref.name: ref.shard[0] for ref in refs if ref.shard is not None}


def shards(graph):
    """Stored tensors that are cut, with how they are."""
    refs = [node.meta["tensor"] for node in graph.nodes if node.op == "get_attr"]
    return {ref.name: ref.shard for ref in refs if ref.shard is not None}


def reasons(group, site):
    """What notes say of a site."""
    told = [text for name, text in group.notes if name == ShardTensor.name]
    return [text for text in told if site in text.partition(" stays whole")[0]]


SUMS = {"llama": 2, "qwen3": 2, "gemma2": 2, "gpt2": 2, "gpt-neox": 2, "phi3": 2}


@pytest.mark.parametrize(("family", "sums"), sampled(SUMS.items(), 2))
def test_each_cut_region_begins_with_one_copy_and_ends_with_one_sum(fused, family, sums):
    """Attention and MLP are a region each, also where q, k and v lie in one matrix."""
    one = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    graph = layer(cut(fused(family, **({} if family == "llama" else one)), size=2, head=False))

    assert len(calls(graph, ops.tp_copy.default)) == sums
    assert len(calls(graph, ops.tp_reduce.default)) == sums
    assert sharded(graph)


def test_columns_cut_b_and_rows_cut_a(fused):
    """The half of an adapter that meets whole values is whole, and biases go with columns."""
    found = sharded(layer(cut(fused("llama"), size=2)))

    for site in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"):
        assert (found[f"{site}.weight"], found[f"{site}.bias"], found[site + HALF_B]) == (0, 0, 1)
        assert site + HALF_A not in found
    for site in ("self_attn.o_proj", "mlp.down_proj"):
        assert (found[f"{site}.weight"], found[site + HALF_A]) == (1, 1)
        assert site + HALF_B not in found
        assert f"{site}.bias" not in found


def test_a_conv1d_is_cut_along_its_other_dimension(fused):
    """GPT-2 stores [in, out]."""
    found = sharded(layer(cut(fused("gpt2"), size=2)))

    assert (found["mlp.c_fc.weight"], found["mlp.c_proj.weight"]) == (1, 0)
    assert (found["mlp.c_fc.lora.b"], found["mlp.c_proj.lora.a"]) == (1, 1)


def test_a_matrix_of_several_is_cut_run_by_run(fused):
    """Weight, bias and B alike, along their own dimensions; what names sizes names a piece's."""
    gpt2 = layer(cut(fused("gpt2"), size=2))
    found = shards(gpt2)
    thirds = (32, 32, 32)

    assert found["attn.c_attn.weight"] == (1, 2, thirds)
    assert found["attn.c_attn.bias"] == (0, 2, thirds)
    assert found["attn.c_attn.lora.b"] == (1, 2, thirds)
    assert found["attn.c_proj.weight"] == (0, 2, ())
    phi3 = shards(layer(cut(fused("phi3"), size=2)))
    assert phi3["self_attn.qkv_proj.weight"] == (0, 2, (32, 16, 16))
    assert phi3["self_attn.qkv_proj.lora.b"] == (1, 2, (32, 16, 16))
    assert phi3["mlp.gate_up_proj.weight"] == (0, 2, (48, 48))
    assert phi3["mlp.down_proj.lora.a"] == (1, 2, ())
    assert not any(name.endswith(("qkv_proj.lora.a", "down_proj.lora.b")) for name in phi3)


@pytest.mark.parametrize(("changes", "site", "reason"), [
    ({"num_attention_heads": 8, "hidden_size": 48, "intermediate_size": 64}, "qkv_proj",
     "its 2 do not divide by 4"),
    ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 50},
     "gate_up_proj", "its 50, 50 outputs do not divide by 4"),
])  # fmt: skip
def test_parts_that_do_not_divide_stay_whole_together(fused, changes, site, reason):
    """Two key heads, or halves of 50 columns, over four processes; the other region is cut."""
    group = cut(fused("phi3", num_hidden_layers=1, **changes), size=4)

    assert any(reason in told for told in reasons(group, site))
    assert shards(layer(group))
    assert not any(site in name for name in shards(layer(group)))


def test_attention_dropout_keeps_a_joined_matrix_whole(fused):
    """Its masks are drawn by the head's number in the whole."""
    group = cut(fused("gpt2", n_layer=1, attn_pdrop=0.1), size=2)

    assert any("number of the head" in told for told in reasons(group, "attn.c_attn"))
    assert all("mlp" in name for name in sharded(layer(group)))
    assert sharded(layer(group))


def test_a_bias_is_added_once_behind_the_sum(fused):
    """Before it, each process would add it."""
    graph = layer(cut(fused("llama"), size=2))

    for node in calls(graph, ops.tp_reduce.default):
        assert node.args[0].args[2] is None
        (add,) = node.users
        assert is_call(add, torch.ops.aten.add.Tensor)
        assert str(add.args[1].target).endswith(("o_proj.bias", "down_proj.bias"))


def test_norms_of_single_heads_stay_whole(fused):
    """Qwen3's q_norm has a weight for the columns of a head, which no process cuts."""
    found = sharded(layer(cut(fused("qwen3", num_hidden_layers=1), size=2)))

    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert not any("q_norm" in name for name in found)


def test_the_vocabulary_is_cut_with_the_loss(fused):
    """The head's logits are a piece's; the gradient of its input is summed once."""
    group = cut(fused("llama"), size=2)
    logits = output_of(group.blocks["head"].graph).args[0]

    assert logits.meta["val"].shape[-1] == 32
    assert len(calls(group.root, ops.tp_copy.default)) == 1
    assert not sharded(group.root)


def test_a_vocabulary_that_does_not_divide_stays_whole(fused):
    """As does one that is asked to."""
    group = cut(fused("llama"), size=3)
    assert reasons(group, "lm_head") == [
        "head.lm_head stays whole: its 64 outputs do not divide by 3"
    ]

    asked = cut(fused("llama"), size=2, head=False)
    assert not sharded(asked.blocks["head"].graph)
    assert not calls(asked.root, ops.tp_copy.default)


def test_what_does_not_divide_stays_whole_with_its_region(fused):
    """Two key heads over four processes; 48 / 4 columns, where a mask is drawn for 8 at once."""
    group = cut(fused("llama"), size=4)

    assert any("its 2 do not divide by 4" in told for told in reasons(group, "self_attn.q_proj"))
    assert any("draws 8 columns" in told for told in reasons(group, "mlp.up_proj"))
    assert not sharded(layer(group))


@pytest.mark.parametrize(
    ("rate", "reader"), [(0.0, "the norm of a DoRA job's rows"), (0.1, "a branch of job 'dora'")]
)
def test_what_reads_a_whole_matrix_keeps_its_region_whole(fused, rate, reader):
    """DoRA on q_proj, lowered or as it is; the MLP is cut."""
    group = cut(fused("llama", dora="q_proj", rate=rate), size=2)
    found = sharded(layer(group))

    assert any(reader in told for told in reasons(group, "self_attn.q_proj"))
    assert {name.partition(".")[0] for name in found} == {"mlp"}


def test_one_piece_changes_nothing(fused):
    """The same code, byte for byte."""
    group = fused("llama")
    before = fingerprint(group)

    assert fingerprint(cut(group, size=1)) == before


def test_a_size_below_one_is_refused(fused):
    """By its text too."""
    with pytest.raises(PipelineError, match="one piece at least"):
        cut(fused("llama"), size=0)

    assert parse_pass("shard-tensor{size=4}") == ShardTensor(4)


def test_the_pass_writes_its_name_on_what_it_makes(fused):
    """New nodes serve all jobs, and stand where the linear stood."""
    group = cut(fused("llama"), size=2)

    for node in calls(layer(group), ops.tp_copy.default, ops.tp_reduce.default):
        assert node.meta["role"] == "shared"
        assert node.meta["jobs"] == tuple(group.job_names)
        assert node.meta["origin"].made_by == ShardTensor.name


def test_a_model_of_pieces_says_which_ones_jobs_hold(fused, tmp_path):
    """Of a site one half is a piece and the other whole."""
    base = base_of(tmp_path, "llama")
    jobs = dropping_jobs(base)
    model = SuperModel(cut(fused("llama"), size=2), prepare(jobs).backbone, jobs)
    model.part = LocalShard(None, 1)
    stem = "base_model.model.model.layers.0.self_attn"

    found = {name.removeprefix(stem): shard for name, shard in model.shards("keeps").items()}
    assert found[".q_proj.lora_A.default.weight"] is None
    assert found[".q_proj.lora_B.default.weight"] == Shard(0, 1, 2)
    assert found[".o_proj.lora_A.default.weight"] == Shard(1, 1, 2)
    assert found[".o_proj.lora_B.default.weight"] is None


def test_a_model_of_runs_says_so_of_jobs_pieces(fused, tmp_path):
    """B is the bank's b turned."""
    base = base_of(tmp_path, "gpt2", n_layer=1)
    jobs = dropping_jobs(base)
    model = SuperModel(cut(fused("gpt2", n_layer=1), size=2), prepare(jobs).backbone, jobs)
    model.part = LocalShard(None, 1)

    name = "base_model.model.transformer.h.0.attn.c_attn.lora_B.default.weight"
    assert model.shards("keeps")[name] == Shard(0, 1, 2, (32, 32, 32))
