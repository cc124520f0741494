"""A fault that is put into a pass is found after that pass, at the node where values first part."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.models import error_of
from tests.numerics.conftest import a_pass, nodes, put_behind
from tlora_fx.errors import NumericsBroken
from tlora_fx.passes.drop_export_noise import DropExportNoise
from tlora_fx.passes.fold_layers import FoldLayers
from tlora_fx.passes.fuse_backbone import FuseBackbone
from tlora_fx.passes.key_dropouts import KeyDropouts
from tlora_fx.passes.lower_adapters import LowerAdapters
from tlora_fx.passes.lower_loss import LowerLoss
from tlora_fx.passes.tag_roles import TagRoles
from tlora_fx.pipeline import JobPass

aten = torch.ops.aten
CLEAN = "drop-export-noise,tag-roles"
READY = f"{CLEAN},fold-layers,check-token-parallel"
FUSED = f"{READY},fuse-backbone"
LOWERED = f"{FUSED},lower-adapters"
KEYED = f"{LOWERED},key-dropouts"
KINDS = ("plain", "few", "dora")


@pytest.fixture
def told(verdict):
    """The error that a fault raises, as (job, what differs, node, whole text)."""

    def find(stage, right, spoil, *kinds, numerics=None, checked=True):
        kind = JobPass if isinstance(right, JobPass) else type(right).__mro__[1]
        item = a_pass(spoil, kind, numerics or right.preserves_numerics, right)
        text = error_of(lambda: verdict(stage, [item], *kinds, checked=checked), NumericsBroken)
        assert f"pass '{right.name}'" in text
        return text

    return find


def node_in(text: str) -> str:
    """The line of an error that names the node."""
    return re.search(r"^  node +(.*)$", text, re.MULTILINE)[1]


def test_a_wrong_order_of_operands_in_a_job_pass(told):
    """A rewrite swaps the halves of a rotation."""

    def swap(graph):
        node = nodes(graph, "aten.cat", "layers.0.self_attn")[0]
        node.args = (list(node.args[0])[::-1], *node.args[1:])

    text = told("", DropExportNoise(), swap, "plain")

    assert "aten.cat" in node_in(text)
    assert "modeling_llama.py" in text


def test_a_dropped_residual_while_layers_are_folded(told):
    """What follows the sum is the first node that survives and gives another value."""

    def drop(graph):
        (node, *_) = [n for n in nodes(graph, "aten.add.Tensor") if n.meta["path"] == ""]
        node.replace_all_uses_with(node.args[1])

    text = told(CLEAN, FoldLayers(), drop, "plain")

    assert "model.layers.0" in text
    assert "aten.pow" in node_in(text)


def test_a_detach_is_found_in_the_backward(told):
    """Losses are the same bits; a gradient is lost."""

    def cut(graph):
        put_behind(
            nodes(graph, "aten.linear", "layers.0.mlp.down_proj.base_layer")[0], aten.detach.default
        )

    text = told("drop-export-noise", TagRoles(), cut, "plain")

    assert "gradient of model.layers.0" in text
    assert "aten.detach" in node_in(text)
    assert "in the backward" in text


def test_a_dropped_cast(told):
    """A value that is rounded once less is not the same bits."""

    def drop(graph):
        for node in nodes(graph, "aten.rsqrt", "layers.0.input_layernorm"):
            put_behind(node, aten.to.dtype, torch.bfloat16)
            put_behind(next(iter(node.users)), aten.to.dtype, torch.float32)

    text = told("drop-export-noise", TagRoles(), drop, "plain")

    assert "aten.to.dtype" in node_in(text)


def test_a_branch_on_another_jobs_segment(told):
    """Its reads and writes are one off; the shapes fit each other."""

    def shift(group):
        for node in nodes(group, "segment_", jobs=("few",)):
            place = 3 if "write" in str(node.target) else 2
            node.args = (*node.args[:place], 0, *node.args[place + 1 :])

    text = told(READY, FuseBackbone(), shift, "plain", "few", checked=False)

    assert "segment_" in node_in(text)


def test_a_branch_that_takes_another_jobs_a(told):
    """Ranks are equal, so that shapes fit."""

    def swap(group):
        few, other = (nodes(group, "q_proj.lora_A", jobs=(job,))[0] for job in ("few", "other"))
        other.replace_all_uses_with(few)

    text = told(READY, FuseBackbone(), swap, "few", "other", checked=False)

    assert "job       other" in text
    assert "aten.linear" in node_in(text)
    assert "j0_self_attn_q_proj_lora_A" in node_in(text)


def test_a_wrong_scale_in_the_lowered_operator(told):
    """The bank's scale is one hundredth off: the operator is named."""

    def scale(group):
        for job in group.jobs:
            job.sites.update(
                (path, dataclasses.replace(site, scaling=site.scaling * 1.01))
                for path, site in list(job.sites.items())
            )

    text = told(FUSED, LowerAdapters(), scale, *KINDS)

    assert "multi_lora_linear" in node_in(text)
    assert "made by   lower-adapters" in text


def test_a_branch_that_a_lowered_operator_forgets(told):
    """The job trains nothing there any more."""

    def forget(group):
        for node in nodes(group, "multi_lora_linear"):
            node.meta["branches"] = {k: v for k, v in node.meta["branches"].items() if k != "few"}

    text = told(FUSED, LowerAdapters(), forget, *KINDS)

    assert "job       few" in text
    assert "multi_lora_linear" in node_in(text)


def test_a_dropout_with_another_rate(told):
    """Masks are part of what is compared."""

    def change(group):
        for node in nodes(group, "keyed.dropout"):
            if "rate" in node.meta:
                node.meta["rate"] = 0.3

    text = told(LOWERED, KeyDropouts(), change, "dropping", "few")

    assert "keyed_dropout" in node_in(text)


def test_a_dropout_at_another_site(told):
    """Another site draws other masks."""

    def change(group):
        for node in nodes(group, "keyed.dropout"):
            if "site_path" in node.meta:
                node.meta["site_number"] = 1

    text = told(LOWERED, KeyDropouts(), change, "dropping", "few")

    assert "keyed_dropout" in node_in(text)


def test_a_fault_behind_the_last_hidden_state(told):
    """The head is compared on the rows that have a target."""

    def scale(group):
        put_behind(nodes(group, "aten.linear", "lm_head")[0], aten.mul.Tensor, 1.01)

    text = told(KEYED, LowerLoss(), scale, *KINDS)

    assert "aten.mul" in node_in(text)


def test_a_fault_in_the_base_layer_of_a_fused_graph(told):
    """Shared nodes are compared with each job's own rows."""

    def scale(group):
        node = nodes(group, "aten.silu")[0]
        node.target = aten.relu.default

    text = told(READY, FuseBackbone(), scale, *KINDS)

    assert "aten.relu" in node_in(text)
