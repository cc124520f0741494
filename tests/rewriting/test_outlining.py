"""Pieces of a graph become blocks, and blocks become nodes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.models import base_of, error_of, job
from tlora_fx.compiler import run_passes
from tlora_fx.errors import NotOutlinable
from tlora_fx.ir.graph import JobGraph, output_of, placeholders
from tlora_fx.ir.shapes import propagate
from tlora_fx.pipeline import JobPass, Pipeline, Runner
from tlora_fx.rewriting import inline_block, outline, outline_block

PIECE = ("mlp_up", "mlp_a", "frozen", "cast", "down", "scaled", "total")


def pieces(small):
    return [node for node in small.graph.nodes if node.name in PIECE]


def test_outline_finds_inputs_and_results(small):
    """The graph itself stays; names become relative to the path."""
    before = small.targets()

    piece = outline(pieces(small), "mlp")

    assert piece.inputs == [small["x"]]
    assert piece.result is small["total"]
    assert list(placeholders(piece.graph)) == ["x"]
    loads = [node for node in piece.graph.nodes if node.op == "get_attr"]
    assert [(n.target, n.meta["tensor"].name) for n in loads] == [
        ("up.weight", "up.weight"), ("a.weight", "a.weight"),
    ]  # fmt: skip
    assert [n.meta["path"] for n in piece.graph.nodes if n.op == "call_function"][:2] == ["up", ""]
    assert small.targets() == before


def test_outline_without_a_path_keeps_names_and_reads_tensors_itself(small):
    """What a head of its own needs: inputs called by whom it takes them from."""
    members = [node for node in pieces(small) if node.op != "get_attr"]

    piece = outline(members, first={small["x"]: "hidden_states"})

    assert list(placeholders(piece.graph)) == ["hidden_states"]
    loads = [str(node.target) for node in piece.graph.nodes if node.op == "get_attr"]
    assert loads == ["mlp.up.weight", "mlp.a.weight"]


def test_a_block_is_called_in_the_pieces_place(small):
    """Its tensors are its own; what lies outside its path is passed in."""
    graphs = JobGraph("one", small.graph, "packed")

    block = outline_block(graphs, pieces(small), "mlp_0", "mlp")

    small.graph.lint()
    assert small.targets() == ["mlp", "relu"]
    assert graphs.blocks["mlp_0"] is block
    propagate(small.graph, graphs.blocks)
    assert tuple(small["result"].meta["val"].shape) == (5, 8)


def test_tensors_outside_the_path_are_passed_in(small):
    """A block owns nothing that is another module's."""
    graphs = JobGraph("one", small.graph, "packed")

    block = outline_block(graphs, pieces(small), "up", "mlp.up")

    assert list(placeholders(block.graph)) == ["x", "mlp_a_weight"]


def test_a_piece_with_two_results_is_refused(small):
    """A block hands one value on."""
    members = [node for node in pieces(small) if node.name != "total"]
    graphs = JobGraph("one", small.graph, "packed")

    text = error_of(lambda: outline_block(graphs, members, "mlp_0", "mlp"), NotOutlinable)

    assert "results frozen, scaled" in text


def test_inlining_undoes_outlining(small):
    """The same operators on the same tensors, by their whole names."""
    graphs = JobGraph("one", small.graph, "packed")
    before = [(n.op, str(n.target), n.meta.get("path")) for n in small.graph.nodes]
    outline_block(graphs, pieces(small), "mlp_0", "mlp")
    (call,) = (node for node in small.graph.nodes if node.op == "call_module")

    inline_block(graphs, call)

    small.graph.lint()
    after = [(n.op, str(n.target), n.meta.get("path")) for n in small.graph.nodes]
    assert after == before
    assert graphs.blocks == {}


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Two jobs on a small Llama, after all passes; its first layer inlined by the test."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", dtype="float32")
    jobs = [
        job("one", base, r=2, target_modules=["q_proj"], lora_dropout=0.1),
        job("two", base, r=2, target_modules=["q_proj"], use_dora=True, lora_dropout=0.1),
    ]
    return run_passes(jobs)  # fmt: skip


def test_a_folded_layer_can_be_inlined(fused):
    """The others go on sharing the block; the model is whole."""
    call = next(node for node in fused.root.nodes if node.op == "call_module")
    (block,) = (b for b in fused.blocks.values() if str(call.target) in b.instances)

    inline_block(fused, call)

    fused.root.lint()
    propagate(fused.root, fused.blocks)
    assert fused.blocks[block.name].instances == ("model.layers.1", "model.layers.2")
    loads = {str(node.target) for node in fused.root.nodes if node.op == "get_attr"}
    assert "model.layers.0.self_attn.q_proj.weight" in loads
    sites = {n.meta["site_path"] for n in fused.root.nodes if "site_path" in n.meta}
    assert sites == {"model.layers.0.self_attn.q_proj.lora_dropout"}
    assert output_of(fused.root).args[0].meta["role"] == "loss"


@dataclass(frozen=True, slots=True)
class Outlines(JobPass):
    """Outlines the piece; never registered."""

    name: ClassVar[str] = "outlines"

    def run(self, graph):
        outline_block(graph, [n for n in graph.root.nodes if "piece" in n.meta], "mlp_0", "mlp")
        return True


def test_the_runner_accepts_what_the_helpers_leave(small):
    """Shapes, tags and provenance hold after a pass that outlines."""
    graphs = JobGraph("one", small.graph, "packed")
    for node in small.graph.nodes:
        node.meta["role"] = "backbone"
    for node in pieces(small):
        node.meta["piece"] = True

    Runner(Pipeline((Outlines(),))).run_job(graphs)

    assert small.targets() == ["mlp", "relu"]
