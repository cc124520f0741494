"""A node has one name, and a change renames nothing far from it."""

from __future__ import annotations

import re

import torch

from tests.passes.token_parallel.mixing import shared_values
from tlora_fx.graph_file import graph_text
from tlora_fx.inspect.program import make_program
from tlora_fx.ir.graph import JobGraph
from tlora_fx.ir.names import TAKEN, name_nodes
from tlora_fx.model.source import graphs_source
from tlora_fx.numerics.state import copy_state
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
FUSED = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"


def names_of(group):
    """Of operators, by graph."""
    return {
        name: [node.name for node in graph.nodes if node.op == "call_function"]
        for name, graph in (("", group.root), *((b.name, b.graph) for b in group.blocks.values()))
    }


def test_code_data_and_graph_files_call_a_node_alike(group_after):
    """By the name that errors print."""
    group = group_after(FUSED, "plain", "few")
    code, text = graphs_source(group), graph_text(group)
    ids = {node.id for _, node in make_program(group, "fused").nodes()}

    for names in names_of(group).values():
        assert ids.issuperset(names)
        assert all(f"        {name} = " in code and f"  {name}: " in text for name in names)


def test_names_say_module_operator_and_job(group_after):
    """A linear is called as its module; a job's branch begins with the job's number."""
    group = group_after(FUSED, "plain", "few")
    (block,) = group.blocks.values()
    names = {node.name: node for node in block.graph.nodes}

    assert names["q_proj"].meta["path"] == "self_attn.q_proj"
    assert names["j1_q_proj_lora_A"].meta["jobs"] == ("few",)
    assert names["hidden"].op == "placeholder"
    assert [n.name for n in group.root.nodes if n.op == "call_module"] == [
        f"hidden_{number}" for number in range(len(block.instances))
    ]


def test_a_change_renames_nothing_far_from_it(group_after):
    """What is put behind a norm, before all else, is numbered in its own module."""
    group = copy_state(group_after(FUSED, "plain", "few"))
    before = names_of(group)
    node = next(n for n, _ in shared_values(group) if "input_layernorm" in n.meta["path"])
    Rewriter(node.graph).insert_after(node, lambda make: make(aten.mul.Tensor, node, 1.0))

    name_nodes(group)
    kept = names_of(group)
    name_nodes(group, anew=True)
    anew = names_of(group)

    for where, names in before.items():
        far = [name for name in names if not name.startswith("input_layernorm_mul")]
        assert [name for name in kept[where] if name in far] == far
        assert [name for name in anew[where] if name in far] == far
    assert sum(map(len, kept.values())) == sum(map(len, before.values())) + 1


def test_every_name_may_stand_in_code():
    """Operators called as Python's own words, modules of numbers, and two of one name."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for path, target in (
        ("", aten.pow.Tensor_Scalar), ("a.3", aten.sin.default), ("3", aten.linear.default),
        ("device", aten.linear.default), ("device", aten.linear.default), ("é", aten.sin.default),
    ):  # fmt: skip
        graph.call_function(target, (x,)).meta["path"] = path
    graph.output(x)

    name_nodes(JobGraph("one", graph, "packed"), anew=True)

    names = [node.name for node in graph.nodes]
    assert names == [
        "x",
        "pow_",
        "a_3_sin",
        "v_3_linear",
        "device_",
        "device__2",
        "__sin",
        "output",
    ]
    assert not TAKEN.intersection(names)
    assert all(re.fullmatch(r"[A-Za-z_]\w*", name, flags=re.ASCII) for name in names)
