"""Several tensors of the base stored as one: q, k and v as one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.models import base_of, error_of, job, ready, restart, row_of, tokens
from tlora_fx.compiler import resolve_pipeline, run_passes
from tlora_fx.errors import StoredFormWrong
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.graph import is_call
from tlora_fx.ir.storage import concatenated, stored_as
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.pipeline import GroupPass, Numerics, Pipeline
from tlora_fx.rewriting import Rewriter
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.testing import assert_equivalent, check_text

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class JoinLinears(GroupPass):
    """One product for q, k and v of a layer, whose matrices are stored one above the other."""

    name: ClassVar[str] = "join-linears"
    preserves_numerics: ClassVar[Numerics] = "bound"

    def run(self, group):
        for graph in group.graphs():
            linears = [
                node for node in graph.nodes
                if is_call(node, aten.linear.default)
                and str(node.meta["path"]).rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")
            ]  # fmt: skip
            if linears:
                Rewriter(graph).replace_several(
                    linears, lambda make, own=linears: joined(make, own)
                )


def joined(make, linears):
    refs = [node.args[1].meta["tensor"] for node in linears]
    path = refs[0].name.replace("q_proj", "qkv_proj")
    weight = make.tensor(stored_as(refs, concatenated, path))
    whole = make(aten.linear.default, linears[0].args[0], weight)
    sizes = [ref.shape[0] for ref in refs]
    starts = [sum(sizes[:place]) for place in range(3)]
    return [make(aten.slice.Tensor, whole, 2, s, s + n) for s, n in zip(starts, sizes, strict=True)]


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """A model as it is, and its group with the pass behind fuse-backbone."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)
    jobs = [job("one", base, r=2, target_modules=["o_proj"]),
            job("two", base, r=3, target_modules=["up_proj", "o_proj"])]  # fmt: skip
    model = ready(jobs)
    passes = resolve_pipeline().passes
    place = [item.name for item in passes].index("fuse-backbone") + 1
    before = run_passes(jobs, Pipeline(passes[:place]))
    pipeline = Pipeline((*passes[:place], JoinLinears(), *passes[place:]))
    after = run_passes(jobs, pipeline.until("join-linears"))
    return model, run_passes(jobs, pipeline), before, after


def test_losses_and_gradients_stay(joint):
    """Up to the rounding of products of other shapes."""
    assert_equivalent(*joint[2:])


def test_each_layer_holds_the_three_as_one(joint):
    """By the base's names, once; the losses are those of the model as it was."""
    model, group, *_ = joint
    other = SuperModel(group, model.backbone, model.jobs)
    other.materialize(base_tensors(model.backbone), "cpu")
    restart(other)
    restart(model)
    attention = other.net.model.layers[1].self_attn
    base = base_tensors(model.backbone)
    three = [base[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    row = row_of(model, [tokens([4, 3]), tokens([5], seed=1)])

    assert torch.equal(attention.qkv_proj.weight, torch.cat(three))
    assert not hasattr(attention, "q_proj")
    assert not any("q_proj" in name for name in other._unused)
    torch.testing.assert_close(other(row), model(row), rtol=1e-12, atol=1e-12)


def test_the_reference_survives_the_text(joint):
    """With its originals."""
    text = graph_text(joint[1])

    assert graph_text(graphs_of_text(text)) == text
    check_text(text, "# CHECK: qkv_proj{{.*}}concatenated{{.*}}q_proj{{.*}}k_proj{{.*}}v_proj")


def test_what_is_no_tensor_of_the_base_is_refused(joint):
    """As any other form: one that is stored otherwise already, or none at all."""
    graph = next(iter(joint[1].blocks.values())).graph
    refs = [node.meta["tensor"] for node in graph.nodes if node.op == "get_attr"]
    stored = next(ref for ref in refs if ref.originals)

    text = error_of(lambda: stored_as([refs[0], stored], concatenated), StoredFormWrong)

    assert "qkv_proj" in text
    assert "none" in error_of(lambda: stored_as([], concatenated), StoredFormWrong)
