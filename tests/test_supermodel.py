"""The Shared Super-Model as a module: what it owns, its misuse, and what torch.compile sees."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from tests.models import (
    FAMILIES,
    assert_same,
    base_of,
    error_of,
    job,
    mixed_jobs,
    ready,
    row_of,
    run_fused,
    tokens,
)
from tlora_fx.driver import compile
from tlora_fx.errors import SuperModelMisuse
from tlora_fx.runtime.weights import base_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of four layers."""
    return base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(base):
    """Three plain jobs, ready to train."""
    return ready(mixed_jobs(base, FAMILIES["llama"].targets))


@pytest.fixture(scope="module")
def empty(base):
    """One job without weights."""
    return compile([job("one", base, r=2, target_modules=["q_proj"])])


def test_compiling_needs_no_weights(empty):
    """Every matrix stays on meta until somebody trains."""
    assert all(p.is_meta for p in empty.parameters() if p.dim() > 1)


def test_a_model_without_weights_does_not_run(empty):
    """The error says what to call."""
    row = row_of(empty, [tokens([4])])

    assert "materialize()" in error_of(lambda: empty(row), SuperModelMisuse)


def test_missing_weights_are_named(empty):
    """A tensor that neither the checkpoint nor the model's code has."""
    held = base_tensors(empty.backbone)
    lacking = {name: value for name, value in held.items() if "down_proj" not in name}

    text = error_of(lambda: empty.materialize(lacking, "cpu"), SuperModelMisuse)

    assert "down_proj" in text


def test_weights_of_another_shape_are_named(empty):
    """A checkpoint of another size."""
    held = base_tensors(empty.backbone)
    held["model.embed_tokens.weight"] = torch.zeros(5, 5)

    text = error_of(lambda: empty.materialize(held, "cpu"), SuperModelMisuse)

    assert "(5, 5)" in text


def test_the_base_is_frozen_and_adapters_are_trained(model):
    """Exactly the banks need gradients, and each job sees them as PEFT's parameters."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}

    assert all(name.endswith(("lora.a", "lora.b")) for name in trained)
    own = model.job_parameters("few")
    assert set(own) == {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.default.weight"
        for layer in range(4) for name in ("q_proj", "v_proj") for part in "AB"
    }  # fmt: skip


def test_job_parameters_are_views_of_the_bank(model):
    """An optimizer's step on a job's parameter is a step in the bank, gradients too."""
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.default.weight"
    bank = model.banks["model.layers.2.self_attn.q_proj"]
    start, stop = bank.ranks[1:3].tolist()
    parameter = model.job_parameters("few")[name]

    assert parameter.shape == (32, 4)
    assert parameter.data_ptr() == bank.b.data[start:stop].data_ptr()
    assert parameter.grad.data_ptr() == bank.b.grad[start:stop].data_ptr()


def test_base_tensors_keep_their_names(model):
    """Inside `net` a base tensor has the base's own name."""
    names = {name for name, p in model.net.named_parameters() if not p.requires_grad}

    assert {"model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"} <= names


def test_a_gradient_step_of_one_row_adds_to_the_next(model):
    """Two rows without zeroing between them give the sum of their gradients."""
    parts = [tokens([5], seed=s) for s in range(3)]
    once = run_fused(model, parts)
    model(row_of(model, parts)).sum().backward()

    for own in model.jobs:
        for name, parameter in model.job_parameters(own.name).items():
            expected = 2 * once[own.name].gradients[name]
            torch.testing.assert_close(parameter.grad, expected)


class Counting:
    """A backend for torch.compile that counts what it is given."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module, inputs):
        """Compile ahead of time, run eagerly."""
        self.compiled += 1
        return lookup_backend("aot_eager")(module, inputs)


@pytest.fixture(scope="module")
def mixed(base):
    """A plain job, one with DoRA that runs as it is, and one with dropout."""
    kinds = [{}, {"use_dora": True}, {"lora_dropout": 0.5}]
    targets = ["q_proj", "up_proj"]
    return ready(
        [job(f"j{n}", base, r=4, target_modules=targets, **kind) for n, kind in enumerate(kinds)]
    )


@pytest.mark.parametrize("kind", ["model", "mixed"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_torch_compile_sees_one_layer_and_never_another_length(kind, request):
    """All folded layers compile once (the first, whose input needs no gradient, may once more)."""
    model = request.getfixturevalue(kind)
    torch._dynamo.reset()
    backend = Counting()
    compiled = copy.copy(model)
    layers = next(b for b in model.group.blocks.values() if b.name != "head").instances
    rows = [
        ([5, 4], [6], [3, 9]),
        ([2], [11, 7], [8]),
        ([1], [1], [30]),
        ([], [12], [4, 4, 4]),
        ([7], [], []),
    ]
    mixes = [[tokens(n, seed=s) for s, n in enumerate(row)] for row in rows]
    expected = [run_fused(model, parts) for parts in mixes]
    try:
        for layer in layers:
            compiled.net.get_submodule(layer).compile(backend=backend, dynamic=True, fullgraph=True)
        found = [run_fused(compiled, mixes[0])]
        after_first = backend.compiled
        found += [run_fused(compiled, parts) for parts in mixes[1:]]
    finally:
        for layer in layers:
            compiled.net.get_submodule(layer)._compiled_call_impl = None
        torch._dynamo.reset()

    assert after_first <= 2
    assert backend.compiled == after_first
    for one, two in zip(found, expected, strict=True):
        for own in model.jobs:
            assert_same(one[own.name], two[own.name], 1e-9, own.name)
