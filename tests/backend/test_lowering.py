"""Which LoRA branches of a graph that Dynamo recorded become one operator."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from tests.backend.models import (
    Lowering,
    Net,
    assert_equal_steps,
    ids,
    language_model,
    net,
    start,
    train,
)
from tests.models import OLD_TORCH
from tests.sampled import sampled
from tlora_fx.backend import branches_of
from tlora_fx.ir.lora_sites import lowered_arguments

MULTI = torch.ops.tlora_fx.multi_lora_linear.default


def compare(model, x, bound=2e-6, **options):
    """Train one step eager and compiled; returns the backend after it."""
    expected = train(model, model, x)
    backend = Lowering(options)
    assert_equal_steps(train(model, backend.compile(model), x), expected, bound)
    return backend


def calls(graph_module):
    return [n for n in graph_module.graph.nodes if n.op == "call_function" and n.target is MULTI]


def arguments(backend):
    return [lowered_arguments(call) for call in calls(backend.graphs[0])]


@pytest.mark.parametrize("family", sampled(["llama", "gpt2", "qwen3"]))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_branch_of_a_small_model_is_lowered(family, dtype):
    """Forward and gradients of transformers models with all branches lowered equal eager."""
    model = language_model(family, getattr(torch, dtype))

    backend = compare(model, ids(2, 7))

    targets = len(model.peft_config["default"].target_modules)
    assert (backend.lowered, backend.left) == (targets, 0)


def test_adapters_of_a_bfloat16_base_keep_their_float32():
    """The operator multiplies in the dtype that PEFT gives the adapters, unless told otherwise."""
    backend = compare(net(torch.bfloat16), torch.randn(2, 5, 12).bfloat16(), bound=5e-2)

    assert {given["compute_dtype"] for given in arguments(backend)} == {torch.float32}


def test_adapters_multiply_in_the_bases_dtype_when_asked():
    """`compute: base` multiplies in bfloat16 on a bfloat16 base."""
    backend = compare(net(torch.bfloat16), torch.randn(2, 5, 12).bfloat16(), 5e-2, compute="base")

    assert {given["compute_dtype"] for given in arguments(backend)} == {torch.bfloat16}


def test_an_operator_knows_its_rank_and_whether_it_drops():
    """So that shapes are known without a look at its tables."""
    for rate, drops in ((0.0, False), (0.5, True)):
        backend = Lowering()
        backend.compile(net(r=4, lora_dropout=rate))(torch.randn(2, 5, 12))

        assert [(g["max_rank"], g["drops"]) for g in arguments(backend)] == [(4, drops)] * 2


def test_another_length_gives_the_same_as_eager():
    """A second and a third shape, compiled with dynamic sizes, equal eager."""
    model = net()
    backend = Lowering()
    compiled = backend.compile(model)

    for shape in ((2, 7, 12), (3, 11, 12), (1, 5, 12)):
        x = torch.randn(shape)
        assert_equal_steps(train(model, compiled, x), train(model, model, x), 2e-6)


def test_another_scaling_in_one_process_is_lowered_too():
    """Models that differ in lora_alpha, and a scaling that is changed, equal eager mode."""
    backend = Lowering({"strict": True})
    x = torch.randn(4, 12)
    for alpha in (8, 16, 32):
        model = net(lora_alpha=alpha)
        compiled = backend.compile(model)
        assert_equal_steps(train(model, compiled, x), train(model, model, x), 2e-6)

    for layer in (model.base_model.model.up, model.base_model.model.down):
        layer.scaling["default"] = 0.7
    assert_equal_steps(train(model, compiled, x), train(model, model, x), 2e-6)

    assert len(backend.counts) >= 2
    assert set(backend.counts) == {(2, 0)}


def test_inference_is_lowered():
    """In eval mode under no_grad, dropout is nothing and branches are lowered."""
    model = net(lora_dropout=0.5).eval()
    x = torch.randn(2, 5, 12)
    backend = Lowering()

    with torch.no_grad():
        assert torch.allclose(backend.compile(model)(x), model(x), atol=1e-6)
    assert (backend.lowered, backend.left) == (2, 0)


def test_generation_with_a_cache_gives_the_same_tokens():
    """`generate` over compiled forwards with a growing cache picks the tokens of eager mode."""
    model = language_model("llama").eval()
    prompt = ids(2, 5)
    expected = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    backend = Lowering()
    inner = model.get_base_model()
    inner.forward = torch.compile(inner.forward, backend=backend)

    found = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)

    assert torch.equal(found, expected)
    assert backend.left == 0 < backend.lowered


def test_checkpointed_layers_are_lowered_inside_their_region():
    """Gradient checkpointing puts layers into regions; branches there are lowered too."""
    model = language_model("llama", layers=2)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    backend = compare(model, ids(2, 7))

    assert (backend.lowered, backend.left) == (2 * 3, 0)


def test_only_the_active_one_of_two_adapters_is_lowered():
    """After set_adapter the branches of the other adapter are those in the graph."""
    model = net()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up"]))
    start(model)
    model.set_adapter("other")

    assert compare(model, torch.randn(4, 12)).counts == [(1, 0)]


def test_a_trained_copy_beside_the_branches_stays_trained():
    """modules_to_save are trained by Inductor's code while branches are lowered."""
    model = net(target_modules=["up"], modules_to_save=["down"])

    assert compare(model, torch.randn(2, 5, 12)).counts == [(1, 0)]


def two_active():
    model = net()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up", "down"]))
    model.base_model.set_adapter(["default", "other"])
    start(model)
    return model


def all_trained():
    model = net()
    model.requires_grad_(True)
    return model


LEFT = {
    "dora": (lambda: net(use_dora=True), "it is DoRA, which scales the whole weight (1: up)"),
    "two-active": (two_active, "2 adapters are active"),
    "bias-of-b": (lambda: net(lora_bias=True), "its B has a bias"),
    "base-trained": (all_trained, "its frozen linear is trained"),
    "bias-trained": (lambda: net(bias="lora_only"), "its frozen linear is trained"),
}


@pytest.mark.parametrize("kind", sampled(sorted(LEFT)))
def test_what_is_left_runs_right_and_is_told(kind):
    """A branch that no pattern fits equals eager, and one warning says why it is left.

    Of graphs between DoRA's layers, which hold no branch, nothing is told.
    """
    make, reason = LEFT[kind]

    backend = compare(make(), torch.randn(4, 12))

    assert backend.lowered == 0 < backend.left
    # Older torch does not say in which layer a graph that it cut out lies.
    wanted = "" if OLD_TORCH and kind == "dora" else reason
    assert any(wanted in text for text in backend.warnings)
    assert not any("no active LoRA branch" in text for text in backend.warnings)


def test_embeddings_are_left_and_linears_lowered():
    """Of a graph with both kinds, what can be lowered is."""
    backend = compare(language_model("llama", target_modules=["embed_tokens", "q_proj"]), ids(2, 7))

    assert backend.counts == [(1, 1)]
    assert "its module is no linear (embedding) (1: model.embed_tokens)" in backend.warnings[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_is_lowered_in_its_dtype(dtype, inside):
    """Whether it stands around what is compiled or inside: the products of eager mode's dtype."""
    model, x = net(getattr(torch, dtype), lora_alpha=4), torch.randn(4, 12)
    backend = Lowering({"strict": True})
    if inside:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        expected = train(model, model, x)
        found = train(model, backend.compile(model), x)

    assert_equal_steps(found, expected, 2e-2)
    assert {n: g.dtype for n, g in found.gradients.items()} == {
        n: g.dtype for n, g in expected.gradients.items()
    }
    assert backend.counts == [(2, 0)]
    assert {given["compute_dtype"] for given in arguments(backend)} == {torch.bfloat16}


def test_a_model_under_autocast_with_embeddings_and_norms_is_lowered():
    """Hidden values in float32 between products in bfloat16, as accelerate trains a Llama."""
    model, backend = language_model("llama"), Lowering({"strict": True})
    with torch.autocast("cpu", torch.bfloat16):
        expected = train(model, model, ids(2, 7))
        found = train(model, backend.compile(model), ids(2, 7))

    assert_equal_steps(found, expected, 5e-2)
    assert backend.left == 0 < backend.lowered


def test_a_branch_counts_once():
    """Graphs that Dynamo hands over again, for another shape or anew, add nothing to a counter."""
    counters = torch._dynamo.utils.counters
    backend = Lowering()
    model = language_model("llama")
    counters.clear()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for shape in ((2, 7), (3, 11)):
        train(model, compiled, ids(*shape))

    assert len(backend.counts) > 1
    assert counters["tlora_fx"] == {"branches_lowered": 3, "branches_left": 0}
    assert branches_of(model) == (3, 0)


def test_a_function_around_a_model_has_branches_too():
    """No module calls what is compiled, and nobody is told that there was nothing to lower."""
    model, backend = net(), Lowering()
    compiled = torch.compile(lambda x: model(x) * 2, backend=backend)
    x = torch.randn(4, 12)

    assert torch.allclose(compiled(x), model(x) * 2, atol=1e-5)
    assert (backend.lowered, backend.warnings) == (2, [])


@pytest.mark.parametrize("state", ["merged", "disabled", "without"])
def test_nothing_to_lower_is_said_once(state):
    """A model without active adapters runs, and one warning says that nothing was lowered."""
    model = net().eval()
    if state == "merged":
        model.merge_adapter()
    if state == "disabled":
        model.base_model.disable_adapter_layers()
    model = Net() if state == "without" else model
    backend = Lowering()
    compiled = backend.compile(model)

    for shape in ((2, 12), (3, 4, 12)):
        x = torch.randn(shape)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert backend.lowered == backend.left == 0
    assert len(backend.warnings) == 1


def test_the_same_reason_is_told_once():
    """A second graph with the same branches left is silent."""
    model = all_trained()
    backend = Lowering()
    compiled = backend.compile(model)

    for shape in ((2, 12), (3, 4, 12)):
        compiled(torch.randn(shape))

    assert backend.counts == [(0, 2), (0, 2)]
    assert len(backend.warnings) == 1
