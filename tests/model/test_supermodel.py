"""The Shared Super-Model as a module: what it owns, and its misuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.models import (
    FAMILIES,
    base_of,
    error_of,
    job,
    mixed_jobs,
    ready,
    row_of,
    run_fused,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.errors import SuperModelMisuse
from tlora_fx.runtime.adapters.files import base_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of two layers."""
    return base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


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
    held = dict(base_tensors(empty.backbone))
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
        for layer in range(2) for name in ("q_proj", "v_proj") for part in "AB"
    }  # fmt: skip


def test_job_parameters_are_views_of_the_bank(model):
    """An optimizer's step on a job's parameter is a step in the bank, gradients too."""
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"
    bank = model.banks["model.layers.1.self_attn.q_proj"]
    start, stop = bank.ranks[1:3].tolist()
    parameter = model.job_parameters("few")[name]

    assert parameter.shape == (32, 4)
    assert parameter.data_ptr() == bank.b.data[start:stop].data_ptr()
    assert parameter.grad.data_ptr() == bank.b.grad[start:stop].data_ptr()


def test_base_tensors_keep_their_names(model):
    """Inside `net` a base tensor has the base's own name."""
    names = {name for name, p in model.net.named_parameters() if not p.requires_grad}

    assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= names


def test_a_gradient_step_of_one_row_adds_to_the_next(model):
    """Two rows without zeroing between them give the sum of their gradients."""
    parts = [tokens([5], seed=s) for s in range(3)]
    once = run_fused(model, parts)
    model(row_of(model, parts)).sum().backward()

    for own in model.jobs:
        for name, parameter in model.job_parameters(own.name).items():
            expected = 2 * once[own.name].gradients[name]
            torch.testing.assert_close(parameter.grad, expected)


def test_parameters_of_a_model_without_weights_are_refused(empty):
    """They are views of memory that is not there yet."""
    assert "materialize()" in error_of(lambda: empty.job_parameters("one"), SuperModelMisuse)


def test_a_model_is_not_pickled(model):
    """Another process has not the classes that its code made; it is told what to do."""
    assert "tlora_fx.load" in error_of(lambda: pickle.dumps(model), SuperModelMisuse)


def test_a_printed_model_tells_its_jobs_and_ranks(model):
    """A tree of modules that says who has which rank at which sizes."""
    text = repr(model)

    assert "jobs: all, few, pattern; packed rows" in text
    assert "ranks=[8, 4, " in text
    assert text.count("AdapterBank(in_features=") == len(model.banks)


def test_printed_graphs_are_one_line(model):
    """fx.Graph prints the code; these hold many."""
    assert repr(model.group).startswith(
        "GroupGraph(['all', 'few', 'pattern'], packed rows, fused, "
    )
    assert "\n" not in repr(model.group)
    assert repr(model.group.jobs[1]).startswith("JobGraph('few', packed rows, ")


def test_a_copy_of_a_model_trains_by_itself(model):
    """Equal losses, and gradients of its own."""
    row = row_of(model, [tokens([4])] * 3)
    copied = copy.deepcopy(model)

    losses = copied(row)
    losses.sum().backward()

    assert torch.equal(losses, model(row))
    banks = zip(model.banks.values(), copied.banks.values(), strict=True)
    assert all(mine.a.data_ptr() != theirs.a.data_ptr() for mine, theirs in banks)
    for name, parameter in copied.job_parameters("few").items():
        assert parameter.data_ptr() != model.job_parameters("few")[name].data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.any()  # a view of the copied bank, which has the gradient


def test_gradients_are_zeroed_where_they_are(model):
    """By torch's default they would be let go, and jobs would train on without any."""
    run_fused(model, [tokens([4])] * 3)
    held = {name: p.grad for name, p in model.job_parameters("few").items()}

    model.zero_grad()

    assert not any(gradient.any() for gradient in held.values())
    assert run_fused(model, [tokens([4])] * 3)["few"].loss > 0
    assert any(gradient.any() for gradient in held.values())


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda model: model.half(), "found     torch.float16 on cpu"),
        (lambda model: model.to("meta"), " on meta"),
        (lambda model: model.to_empty(device="cpu"), "tensors of other memory"),
        (lambda model: model.load_state_dict(model.state_dict(), assign=True), "leave assign out"),
    ],
)
def test_what_would_part_jobs_from_the_model_is_refused(model, act, said):
    """Their parameters are views: they would train on beside a model that stays as it is."""
    assert said in error_of(lambda: act(model), SuperModelMisuse)
    assert model.to("cpu") is model


def test_a_model_without_weights_is_not_moved(empty):
    """Trainer and GroupStep bring it to their device."""
    assert "has no weights yet" in error_of(lambda: empty.to("cpu"), SuperModelMisuse)


def test_a_job_that_is_not_there_is_named(model):
    """With the jobs that there are."""
    text = error_of(lambda: model.job_parameters("fex"), SuperModelMisuse)

    assert "nearest   few" in text


def test_a_model_is_called_with_other_parameters(model):
    """By torch.func.functional_call."""
    row = row_of(model, [tokens([4])] * 3)
    other = {name: p * 1.5 for name, p in model.named_parameters() if p.requires_grad}

    found = torch.func.functional_call(model, other, (row,))

    assert not torch.equal(found, model(row))
    assert torch.equal(found, torch.func.functional_call(model, other, (row,)))
