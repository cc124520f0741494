"""The stage joint: recomputation by a budget, passes over joint graphs, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.models import (
    assert_equals_peft,
    assert_same,
    base_of,
    job,
    randomise,
    restart,
    row_of,
    run_fused,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.compiler import DEFAULT_PIPELINE, compile, run_passes
from tlora_fx.errors import GraphInvalid, NumericsBroken, PipelineError
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.inspect.cost import cost_of
from tlora_fx.inspect.diff import difference
from tlora_fx.inspect.joint import joint_text
from tlora_fx.inspect.program import make_program
from tlora_fx.ir.graph import HEAD
from tlora_fx.ir.joint import JointGraph
from tlora_fx.pipeline import REGISTRY, JointPass, register
from tlora_fx.pipeline.joint_stage import JointStage, joint_graph
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.tools.bisect import touched

aten, ours = torch.ops.aten, torch.ops.tlora_fx
PARTS = [tokens([40, 24], seed=1), tokens([30], seed=2)]
BUDGETS = (0.6, 0.2)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two jobs of other ranks and sites on a Llama in float64; one drops."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)
    return [
        job("a", base, r=4, target_modules="all-linear"),
        job("b", base, r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1),
    ]


@pytest.fixture
def made():
    """Registers passes; they are gone afterwards."""
    before = dict(REGISTRY)
    yield register
    REGISTRY.clear()
    REGISTRY.update(before)


def pass_of(rewrites, title="mine", numerics="exact"):
    """A pass of the stage joint that a function makes."""

    @dataclass(frozen=True, slots=True)
    class Mine(JointPass):
        """A pass."""

        name: ClassVar[str] = title
        preserves_numerics: ClassVar[str] = numerics

        def rewrite(self, joint: JointGraph) -> None:
            rewrites(joint)

    return Mine


def model_of(jobs, added=""):
    """A model with weights, whose pipeline goes on with these passes."""
    model = compile(jobs, DEFAULT_PIPELINE + added)
    model.materialize(base_tensors(model.backbone), "cpu")
    restart(model)
    randomise(model, 1)
    return model


def saved_bytes(model):
    """Bytes that autograd keeps from the forward to the backward, tensors of the model left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.net.parameters(), *model.net.buffers())}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(row_of(model, PARTS))
    return sum(saved.values())


def test_the_smaller_the_budget_the_less_is_kept_and_numbers_stay(tmp_path):
    """Losses and gradients are those of PEFT; a budget of 0 keeps the layers' inputs."""
    # It computes everything in float64; Llama has norms in float32.
    base = base_of(tmp_path, "gpt2", n_layer=2)
    jobs = [
        job("a", base, r=4, target_modules=["c_attn", "c_proj", "c_fc"]),
        job("b", base, r=2, target_modules=["c_attn", "c_fc"], lora_dropout=0.1),
    ]
    plain = model_of(jobs)
    expected, kept = run_fused(plain, PARTS), [saved_bytes(plain)]
    assert_equals_peft(plain, PARTS, 1e-9, ["a"])

    for budget in (*BUDGETS, 0.0):
        model = model_of(jobs, f",recompute-layers{{budget={budget}}}")
        found = run_fused(model, PARTS)
        for name, outcome in found.items():
            assert_same(outcome, expected[name], 1e-12, f"budget {budget}")
        kept.append(saved_bytes(model))

    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


def test_a_budget_that_is_no_share_is_refused(jobs):
    """1 would keep everything."""
    for budget in ("1", "-0.5"):
        with pytest.raises(PipelineError, match="a budget is a share"):
            run_passes(jobs, f"{DEFAULT_PIPELINE},recompute-layers{{budget={budget}}}")


@pytest.mark.slow
def test_inductor_cuts_by_the_budget(jobs):
    """Compiled, losses and gradients are the same, and less is kept."""
    models = [model_of(jobs), model_of(jobs, ",recompute-layers{budget=0.3}")]
    found, kept = [], []
    for model in models:
        model.compile()
        found.append(run_fused(model, PARTS))
        kept.append(saved_bytes(model))

    for name, outcome in found[1].items():
        assert_same(outcome, found[0][name], 1e-9)
    assert kept[1] < 0.6 * kept[0]


def test_a_pass_decides_what_is_kept(jobs, made):
    """It runs where its pipeline runs, and again where the layers are compiled."""
    ran = []

    def keep_products(joint):
        ran.append(joint.block)
        for node in joint.calls(ours.multi_lora_forward.default):
            joint.keep(node)

    made(pass_of(keep_products, "keep-products"))
    little = model_of(jobs, ",recompute-layers{budget=0.2}")
    model = model_of(jobs, ",recompute-layers{budget=0.2},keep-products")
    expected = run_fused(little, PARTS)

    for name, outcome in run_fused(model, PARTS).items():
        assert_same(outcome, expected[name], 1e-12)
    assert saved_bytes(model) > 1.5 * saved_bytes(little)
    assert ran[:1] == ["layers_0_1"]
    assert len(ran) > 1


def test_graph_files_listings_and_reports_know_the_stage(jobs, made):
    """A graph file says it word for word; the text of joint graphs says what becomes of a value."""
    made(pass_of(lambda joint: None, "still"))
    group = run_passes(jobs, f"{DEFAULT_PIPELINE},recompute-layers{{budget=0.25}},still")

    again = graphs_of_text(graph_text(group))
    (block,) = (block for block in again.blocks.values() if block.is_staged)
    assert (block.budget, [text for text, _ in block.joint]) == (0.25, ["still"])
    assert ("still", "rewrites the joint graph of layers_0_1") in group.notes
    text = joint_text(again)
    assert "passes still; budget 0.25" in text
    words = [line.split()[0] for line in text.splitlines() if " tlora_fx." in line]
    assert {"forward", "again", "backward"} <= set(words)


def halved(joint):
    """Halve the gradient of attention's query."""
    (node,) = joint.calls(ours.packed_attention_backward.default)
    query = next(user for user in node.users if user.args[1] == 0)
    with joint.graph.inserting_after(query):
        half = joint.graph.call_function(aten.mul.Tensor, (query, 0.5))
    query.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def test_a_wrong_gradient_is_blamed_on_its_pass(jobs, made):
    """The numerics run joint graphs as they are rewritten."""
    made(pass_of(halved, "halve"))

    with pytest.raises(NumericsBroken, match=r"(?s)pass 'halve'.*gradient of .*q_proj"):
        compile(jobs, f"{DEFAULT_PIPELINE},halve", verify="numerics")


def test_without_that_check_the_pass_is_blamed_too(jobs, made):
    """What is tried against the base is not the base's fault, and no other form is tried."""
    made(pass_of(lambda joint: None, "still"))
    made(pass_of(halved, "halve"))

    with pytest.raises(NumericsBroken, match=r"(?s)pass 'halve' changes.*form +packed"):
        compile(jobs, f"{DEFAULT_PIPELINE},halve,still")


def test_differences_and_bisections_see_into_joint_graphs(jobs, made):
    """What a pass made, what reads it, and what is no longer kept."""
    made(pass_of(halved, "halve"))
    texts = ("", ",halve", ",halve,recompute-layers{budget=0.2}")
    plain, halves, little = (run_passes(jobs, DEFAULT_PIPELINE + text) for text in texts)
    programs = [make_program(group, "") for group in (plain, halves, little)]
    kinds = {node.kind for node in touched(plain, halves)}
    ((wrong,), (less,)) = (
        difference(*two, ("a", "b")).joint for two in (programs[:2], programs[1:])
    )

    assert [change.what for change in wrong.changes] == ["added", "changed"]
    assert wrong.changes[0].node.target == "aten.mul.Tensor"
    assert kinds == {"made", "other arguments"}
    assert less.after.kept_bytes < 0.5 * less.before.kept_bytes
    assert less.after.operators == less.before.operators
    assert {change.what for change in less.changes} >= {"kept → again"}
    assert difference(programs[1], programs[1], ("a", "b")).joint == []


@pytest.mark.parametrize("family", sampled(["gpt-oss", "llama", "gpt2", "opt"], 4))
def test_every_operator_of_a_joint_graph_has_a_cost(family, tmp_path):
    """For passes that weigh what they keep."""
    base = base_of(tmp_path, family, num_hidden_layers=2)
    group = run_passes([job("a", base, target_modules="all-linear")], DEFAULT_PIPELINE)
    block = next(block for block in group.blocks.values() if block.name != HEAD)
    costs = {node: cost_of(node) for node in joint_graph(group, block).graph.nodes}

    assert {name for cost in costs.values() for name in cost.unknown} == set()
    assert all(costs[node].flop > 0 for node in costs if "multi_lora" in str(node.target))


def leaking(joint):
    """Add a tangent to the result."""
    result, output = joint.outputs[0], joint.graph.output_node()
    tangent = next(node for node in joint.backward() if node.op == "placeholder")
    with joint.graph.inserting_before(output):
        more = joint.graph.call_function(aten.add.Tensor, (result, tangent))
    result.replace_all_uses_with(more, delete_user_cb=lambda user: user is output)


def narrowing(joint):
    """Give the result in another dtype."""
    result, output = joint.outputs[0], joint.graph.output_node()
    with joint.graph.inserting_before(output):
        other = joint.graph.call_function(aten._to_copy.default, (result,), {"dtype": torch.half})
    result.replace_all_uses_with(other, delete_user_cb=lambda user: user is output)


def failing(joint):
    """Read what is not there."""
    raise KeyError(joint.block)


@pytest.mark.parametrize(
    ("rewrites", "words"),
    [
        (leaking, "lets a result of the forward depend on the backward"),
        (narrowing, "changed what the joint graph takes or gives"),
        (failing, "failed on the joint graph"),
    ],
)
def test_a_graph_that_cannot_be_cut_is_refused_where_the_pass_runs(jobs, made, rewrites, words):
    """The error names the pass and the block."""
    made(pass_of(rewrites, "wrong"))

    with pytest.raises(GraphInvalid, match=rf"(?s)pass 'wrong' {words}.*layers_0_1"):
        run_passes(jobs, f"{DEFAULT_PIPELINE},wrong")


def test_caches_tell_stages_apart():
    """A pass whose code stands in no file has no key: nothing of it is cached."""
    still = pass_of(lambda joint: None, "still")()
    keys = {JointStage("b", budget, ()).uuid() for budget in (1.0, 0.5)}
    keys.add(JointStage("b", 0.5, [still]).uuid())

    assert len(keys) == 3
    assert None not in keys
