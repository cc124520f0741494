"""From jobs' graphs to one: roles, folding, alignment, fusing, lowering, dropout, loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.models import VOCABULARY, Plain, base_of, error_of, job
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import (
    BaseRefused,
    CompileError,
    FusionError,
    JobsDiffer,
    NotFoldable,
    PipelineError,
)
from tlora_fx.ir.graph import ancestry, is_call, origin_of, output_of, placeholders
from tlora_fx.ir.names import block_name
from tlora_fx.passes.fold_layers import canonical
from tlora_fx.passes.fuse_backbone import Side, align
from tlora_fx.passes.lower_adapters import DROPPED, LowerAdapters

CLEAN = "drop-export-noise,tag-roles"
FOLD = f"{CLEAN},fold-layers"
FUSE = f"{FOLD},check-token-parallel,fuse-backbone"
LOWER = f"{FUSE},lower-adapters"
ALL = f"{LOWER},key-dropouts,lower-loss"
ops = torch.ops.tlora_fx


def test_tag_roles_tells_adapters_from_backbone(group_after, nodes_of):
    """PEFT's wrapper around a site is adapter, the wrapped linear and all else backbone."""
    graph = group_after(CLEAN, "plain").jobs[0]

    adapters = nodes_of(graph, role="adapter")
    assert {node.meta["site"].rpartition(".")[2] for node in adapters} == {"q_proj", "down_proj"}
    assert all(node.meta["jobs"] == ("plain",) for node in adapters)
    parts = {node.meta["part"] for node in adapters if node.op == "call_function"}
    assert {"a", "b", "dropout", "scale", "sum"} <= parts
    for node in nodes_of(graph, "layer_norm"):
        assert node.meta["role"] == "backbone"


def test_fold_layers_makes_one_block_of_four_layers(group_after):
    """Two layers were traced, four are called; a block's tensors are relative to the layer."""
    base = group_after(FOLD).base

    (block,) = base.blocks.values()
    assert block.name == "layers_0_3"
    assert block.instances == tuple(f"model.layers.{n}" for n in range(4))
    calls = [node.target for node in base.root.nodes if node.op == "call_module"]
    assert calls == list(block.instances)
    loads = [str(node.target) for node in block.graph.nodes if node.op == "get_attr"]
    assert "self_attn.q_proj.weight" in loads


def test_folded_layers_hand_one_value_on(group_after):
    """Each layer reads the layer before it and what all layers read."""
    base = group_after(FOLD).base

    calls = [node for node in base.root.nodes if node.op == "call_module"]
    for before, after in itertools.pairwise(calls):
        assert before in after.args
        assert set(before.args) - {before.args[0]} <= set(after.args)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        (range(32), "layers_0_31"),
        ((3,), "layers_3"),
        (range(0, 32, 2), "layers_0_2_to_30"),
        ((0, 5), "layers_0_5"),
    ],
)
def test_a_block_is_named_by_its_layers(numbers, name):
    """Runs, single layers, and interleaved structures."""
    assert block_name(tuple(f"model.layers.{n}" for n in numbers)) == name


def test_equal_layers_have_equal_canonical_text(group_after):
    """Names of values do not count; operators, arguments and shapes do."""
    one, two = group_after(FOLD).base, group_after(FOLD, fresh=True).base
    (first,), (second,) = one.blocks.values(), two.blocks.values()

    assert canonical(first.graph) == canonical(second.graph)
    node = next(n for n in second.graph.nodes if "rsqrt" in str(n.target) or "pow" in str(n.target))
    node.target = torch.ops.aten.exp.default
    assert canonical(first.graph) != canonical(second.graph)


def test_every_backbone_node_stands_once_in_the_fused_graph(group_after, nodes_of):
    """Three jobs on one base keep one q_proj between them, and a branch each."""
    group = group_after(FUSE, "plain", "few", "dora", "head")

    shared = nodes_of(group, "linear", role="shared", path="self_attn.q_proj")
    assert len(shared) == 1
    assert shared[0].meta["jobs"] == ("plain", "few", "dora", "head")
    writers = nodes_of(group, "segment_write", site="self_attn.q_proj")
    assert [node.meta["jobs"] for node in writers] == [("plain",), ("few",), ("dora",)]


def test_a_branch_reads_and_writes_its_jobs_segment_only(group_after, nodes_of):
    """Every segment operator names the one job that it serves."""
    group = group_after(FUSE, "plain", "few", "dora", "head")

    names = group.job_names
    for node in [*nodes_of(group, "segment_write"), *nodes_of(group, "segment_read")]:
        place = 3 if "write" in str(node.target) else 2
        assert node.meta["jobs"] == (names[node.args[place]],)


def test_what_a_job_does_not_use_is_in_the_report(group_after):
    """A trained copy of the head replaces the base's for its job."""
    group = group_after(FUSE, "plain", "few", "dora", "head")

    assert any("'head' does not use the base's lm_head" in note for _, note in group.notes)
    assert not any("'plain' does not use" in note for _, note in group.notes)


def test_more_jobs_than_the_limit_are_refused(group_after):
    """fuse-backbone{max-jobs=...} bounds a group."""
    passes = FUSE.replace("fuse-backbone", "fuse-backbone{max-jobs=1}")

    text = error_of(lambda: group_after(passes, "plain", "few"), JobsDiffer)

    assert "at most 1" in text


def test_jobs_are_fused_once(group_after):
    """A second time would lose what passes on the fused graph did."""
    passes = f"{FUSE},lower-adapters,fuse-backbone"

    text = error_of(lambda: group_after(passes, "plain", "few"), PipelineError)

    assert "runs on jobs that are fused" in text
    assert "name fuse-backbone once" in text


def test_alignment_is_by_operators_not_by_count(group_after):
    """A job whose backbone differs in one operator does not line up, and says where."""
    group = group_after(CLEAN, "few", fresh=True)
    base, own = group.base, group.jobs[0]
    changed = next(n for n in own.root.nodes if is_call(n, torch.ops.aten.silu.default))
    changed.target = torch.ops.aten.relu.default
    theirs = placeholders(base.root)
    inputs = {node: theirs[name] for name, node in placeholders(own.root).items()}

    text = error_of(
        lambda: align(
            Side(base.root, base.constants), Side(own.root, own.constants), inputs,
            list(own.sites), "job 'few'",
        ),
        FusionError,
    )  # fmt: skip

    assert "relu" in text
    assert "mlp.act_fn" in text


def test_plain_branches_become_one_operator_a_site(group_after, nodes_of):
    """Two plain jobs at one site: one multi_lora_linear, no linear of the base's is left."""
    group = group_after(LOWER, "plain", "few", "dora")

    lowered = nodes_of(group, "multi_lora_linear")
    assert [node.meta["site"] for node in lowered] == ["self_attn.q_proj", "mlp.down_proj"]
    assert lowered[0].meta["jobs"] == ("plain", "few")
    assert lowered[1].meta["jobs"] == ("plain",)
    assert nodes_of(group, "segment_", site="mlp.down_proj") == []
    assert nodes_of(group, "linear", path="self_attn.q_proj", role="shared") == []


def test_what_is_captured_of_a_branch(group_after, nodes_of):
    """Scaling and rate are the job's."""
    group = group_after(LOWER, "plain", "few", "dora")

    branches = nodes_of(group, "multi_lora_linear")[0].meta["branches"]
    assert branches["plain"].scaling == 2.0
    assert branches["plain"].dropout == 0.1
    assert branches["few"].scaling == 4.0
    assert branches["few"].dropout == 0.0


def test_dora_with_dropout_keeps_its_own_operators(group_after, nodes_of):
    """DoRA's product of an identity and A is not taken for a LoRA branch."""
    group = group_after(LOWER, "plain", "few", "dora")

    lowered = nodes_of(group, "multi_lora_linear", site="self_attn.q_proj")
    assert "dora" not in lowered[0].meta["jobs"]
    assert nodes_of(group, "eye")
    (write,) = nodes_of(group, "segment_write")
    assert write.meta["jobs"] == ("dora",)
    assert write.meta["as_it_is"] == DROPPED


def test_a_plain_branch_that_cannot_be_lowered_asks_for_exact_numbers(group_after, nodes_of):
    """Where numbers are placeholders, a branch may not run as it is."""
    group = group_after(FUSE, "few", fresh=True)
    group.exact = False
    (add,) = nodes_of(group, "add", site="self_attn.q_proj")
    add.target = torch.ops.aten.sub.Tensor

    text = error_of(lambda: LowerAdapters().run(group), NotFoldable)

    assert "a plain LoRA branch cannot be lowered" in text


def test_dropout_that_is_left_draws_keyed_masks(group_after, nodes_of):
    """After key-dropouts no operator draws from torch's generator."""
    group = group_after(ALL, "plain", "dora", "head")

    random = [
        node
        for node in nodes_of(group)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    assert random == []


def test_the_loss_runs_from_the_last_hidden_state(group_after, nodes_of):
    """The root ends in one call that gives a sum a job; the head is a block of its own."""
    group = group_after(ALL, "plain", "dora", "head")

    loss = output_of(group.root).args[0]
    assert loss.op == "call_module"
    assert tuple(loss.meta["val"].shape) == (3,)
    head = group.blocks["head"].graph
    assert next(iter(placeholders(head))) == "hidden_states"
    assert not [n for n in group.root.nodes if n.meta.get("path") == "lm_head"]


def test_each_node_says_who_made_it(group_after, nodes_of):
    """What passes add carries the name of the pass."""
    group = group_after(ALL, "plain", "dora", "head")
    origins = {node.name: origin_of(node) for node in nodes_of(group)}
    made = {origin.made_by for origin in origins.values()}
    assert made >= {"trace", "fuse-backbone", "lower-adapters", "lower-loss"}

    (lowered,) = (n for n in nodes_of(group, "multi_lora_linear", site="mlp.down_proj"))
    before = {item.target for item in ancestry(origin_of(lowered))}
    assert {"aten.linear.default", "aten.dropout.default", "aten.mul.Tensor"} <= before
    assert {item.made_by for item in ancestry(origin_of(lowered))} == {"trace", "fuse-backbone"}


def test_dropout_of_attention_weights_over_padded_lines_is_refused_by_name(tmp_path):
    """In batch form a weight belongs to two tokens; the packed operator has masks for it."""
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "n_layer": 2, "attention": "batch"}
    jobs = [job("a", base_of(tmp_path, "gpt2", **rates), target_modules=["c_attn"])]

    text = error_of(lambda: compile(jobs), BaseRefused)

    assert "attn" in text
    assert "set this dropout of the base's config to 0" in text


class NoisyHead(nn.Module):
    """A head with a random activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return nn.functional.rrelu(self.linear(hidden), training=self.training)


def test_random_numbers_of_a_base_are_refused_by_name():
    """Only dropout has keyed masks."""
    module = Plain(layers=2)
    module.head = NoisyHead()
    jobs = [job("a", BaseSpec(module=module, dtype="float32"), target_modules=["out"])]

    text = error_of(lambda: compile(jobs), CompileError)

    assert "rrelu" in text
    assert "test_fuse_backbone.py" in text
