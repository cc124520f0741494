"""Wrong passes of authors, on a finished group: each is refused by its name, with what it broke."""

from __future__ import annotations

import pytest
import torch

from tests.models import error_of
from tests.numerics.conftest import a_pass, nodes, put_behind
from tlora_fx.errors import GraphInvalid, NotIsolated, NumericsBroken, TagsBroken
from tlora_fx.ir.graph import LOSS
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.state import copy_state
from tlora_fx.pipeline import Event, Pipeline, Runner
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
STAGE = (
    "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone,"
    "lower-adapters,share-input,key-dropouts,lower-loss"
)
CU_SEQLENS, SEGMENTS, SCALE = 3, 5, 9  # arguments of packed_attention


def _calls(group):
    return [n for n in group.root.nodes if n.op == "call_module" and n.target != LOSS]


def _node(group, name, path=""):
    return nodes(group, name, path)[0]


def _behind(node, target, *args):
    """Put an operator behind a value, as an author does."""
    Rewriter(node.graph).insert_after(node, lambda make: make(target, node, *args))


def _behind_tables(group, name, target, *args):
    """The same, of a table of each lowered site."""
    for graph in group.graphs():
        for node in [n for n in graph.nodes if str(n.target).endswith(f".lora.{name}")]:
            _behind(node, target, *args)


def _give(node, place, value):
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


def _mean(group):
    node = _node(group, "silu")
    Rewriter(node.graph).insert_after(
        node, lambda make: make(aten.sub.Tensor, node, make(aten.mean.dim, node, [1], True))
    )


def _one_sequence(group):
    node = _node(group, "packed_attention")
    _give(node, CU_SEQLENS, node.args[SEGMENTS])


def _in_place(name, target):
    def run(group):
        _node(group, name).target = target

    return run


def _one_norm_for_two(group):
    one, two = (n for n in nodes(group, "layernorm.weight") if n.op == "get_attr")
    two.replace_all_uses_with(one)


def _gate_stored_for_up(group):
    gate, up = (nodes(group, f"{name}_proj.weight")[0] for name in ("gate", "up"))
    up.target = gate.target


def _gate_for_up(group):
    gate, up = (_node(group, "linear", path) for path in ("gate_proj", "up_proj"))
    up.replace_all_uses_with(gate)


def _without_residual(group):
    node = nodes(group, "aten.add.Tensor", "")[-1]
    node.replace_all_uses_with(node.args[1])


def _without_adapter(group):
    node = _node(group, "multi_lora_linear", "down_proj")
    tags = {"role": "shared", "jobs": tuple(group.job_names), "site": ""}
    Rewriter(node.graph).replace(
        node, lambda make: make(aten.linear.default, *node.args[:2]), tags=tags
    )


def _without_layer(group):
    one, two = _calls(group)[:2]
    two.replace_all_uses_with(one)


def _without_norm(group):
    node = nodes(group, "aten.mul.Tensor", "input_layernorm")[-1]
    node.replace_all_uses_with(node.args[1])


def _rounded(group):
    half = put_behind(_node(group, "silu"), aten.to.dtype, torch.bfloat16)
    put_behind(half, aten.to.dtype, torch.float32)


def _scaled_attention(group):
    node = _node(group, "packed_attention")
    _give(node, SCALE, node.args[SCALE] * 1.01)


def _large_epsilon(group):
    _give(_node(group, "aten.add.Tensor", "input_layernorm"), 1, 1e-2)


def _layers_swapped(group):
    one, two = _calls(group)[:2]
    one.target, two.target = two.target, one.target


def _halves_swapped(group):
    node = _node(group, "aten.cat", "self_attn")
    node.args = (list(node.args[0])[::-1], *node.args[1:])


def _rotation_swapped(group):
    for node in _calls(group):
        node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


def _keys_for_values(group):
    node = _node(group, "packed_attention")
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


def _too_early(group):
    node = _node(group, "silu")
    node.args[0].prepend(node)


def _silu(then):
    return lambda group: then(_node(group, "silu"))


#: What is wrong: the pass, its error, and a part of what it says.
WRONG = {
    "mixes: a sum over the row": (
        _silu(lambda node: _behind(node, aten.cumsum.default, 1)), NotIsolated, "aten.cumsum"),
    "mixes: a mean over the row": (_mean, NotIsolated, "aten.mean"),
    "mixes: the row turned round": (
        _silu(lambda node: _behind(node, aten.flip.default, [1])), NotIsolated, "aten.flip"),
    "mixes: sequences of a job": (_one_sequence, NotIsolated, "cu_seqlens"),
    "mixes: ranks of other jobs": (
        lambda group: _behind_tables(group, "ranks", aten.flip.default, [0]),
        NumericsBroken, "rank offsets"),
    "aliases: an activation in place": (
        _in_place("silu", aten.silu_.default), NotIsolated, "writes into what it reads"),
    "aliases: a sum in place": (
        _in_place("aten.add.Tensor", aten.add_.Tensor), NotIsolated, "writes into what it reads"),
    "aliases: one weight for two": (_one_norm_for_two, NumericsBroken, "aten.mul"),
    "aliases: one path for two weights": (
        _gate_stored_for_up, GraphInvalid, "two tensors at one path"),
    "mixes: a Python function": (
        _in_place("silu", torch.nn.functional.silu), NotIsolated, "call an operator"),
    "aliases: one value for two": (_gate_for_up, NumericsBroken, "aten.mul"),
    "drops: a residual": (_without_residual, NumericsBroken, "model.layers.0"),
    "drops: an adapter": (_without_adapter, GraphInvalid, "drops adapters"),
    "drops: a layer": (_without_layer, GraphInvalid, "drops adapters"),
    "drops: a norm's weight": (_without_norm, NumericsBroken, "q_proj"),
    "drops: dropouts": (
        lambda group: _behind_tables(group, "rates", aten.mul.Tensor, 0.0),
        NumericsBroken, "lora_rates"),
    "drops: a gradient": (
        _silu(lambda node: put_behind(node, aten.detach.default)),
        NumericsBroken, "in the backward"),
    "casts: there and back": (_rounded, NumericsBroken, "aten.to.dtype"),
    "casts: what stays": (
        lambda group: put_behind(_node(group, "rsqrt"), aten.to.dtype, torch.float64),
        GraphInvalid, "changed the type"),
    "scales: attention": (_scaled_attention, NumericsBroken, "packed_attention"),
    "scales: adapters": (
        lambda group: _behind_tables(group, "scales", aten.mul.Tensor, 1.01),
        NumericsBroken, "lora_scales"),
    "scales: an epsilon": (_large_epsilon, NumericsBroken, "aten.add"),
    "reorders: layers": (_layers_swapped, NumericsBroken, "model.layers."),
    "reorders: halves of a rotation": (_halves_swapped, NumericsBroken, "aten.cat"),
    "reorders: cosines and sines": (_rotation_swapped, NumericsBroken, "rotary_emb"),
    "reorders: keys and values": (_keys_for_values, NumericsBroken, "packed_attention"),
    "reorders: a reader before what it reads": (_too_early, GraphInvalid, "before it has been"),
    "tags: an adapter's for a shared value": (
        lambda group: Rewriter((node := _node(group, "multi_lora_linear")).graph).replace(
            node, lambda make: make(aten.linear.default, *node.args[:2])),
        TagsBroken, "exactly one job"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pass_is_refused_by_its_name(name, backbone, group_after):
    """By what it broke, and never by an error of ours."""
    wrong, error, told = WRONG[name]
    group = copy_state(group_after(STAGE, "plain", "few"))
    watch = Numerics()
    watch.know(backbone)
    runner = Runner(Pipeline(()), [watch], "numerics")
    event = Event(1, a_pass(wrong, numerics="bound"), "group", group)

    text = error_of(lambda: runner.run_one(event), error)

    assert "in pass spoils on group" in text
    assert told in text
    assert "AssertionError" not in text
    assert len(text.splitlines()) < 20


def test_layers_in_another_order_all_run(verdict):
    """Of a group one layer of each structure runs, where their order is the same."""
    text = error_of(
        lambda: verdict(STAGE, [a_pass(_layers_swapped)], "plain", checked=False), NumericsBroken
    )

    assert "model.layers.0" in text or "model.layers.1" in text
