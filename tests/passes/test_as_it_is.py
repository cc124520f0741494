"""What no pattern lowers runs as it is on its job's segment, equals PEFT, and is in the report."""

from __future__ import annotations

import pytest

from tests.models import assert_equals_peft, base_of, job, plain, ready, tokens
from tlora_fx.config.job import BaseSpec

ROUNDED, WIDE = 3e-6, 1e-9
LENGTHS = ([5, 7], [6])
QUERIES = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small Llama of two layers."""
    return base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A small GPT-2 of two layers, whose linears have biases."""
    return base_of(tmp_path_factory.mktemp("gpt2"), "gpt2", n_layer=2)


def checked(base, bound, **lora):
    """A plain neighbour and a job of another kind, equal to PEFT; returns the report."""
    targets = QUERIES if bound == ROUNDED else ["c_attn"]
    model = ready([job("plain", base, r=4, target_modules=targets), job("other", base, **lora)])
    assert_equals_peft(model, [tokens(n, seed=s) for s, n in enumerate(LENGTHS)], bound)
    return model, [note for _, note in model.group.notes]


def named(notes, place):
    """Whether the report says that a place of job 'other' runs as it is."""
    return any(place in n and "'other' runs as it is" in n for n in notes)


def test_an_adapter_on_the_embedding(llama):
    """Embedding LoRA runs on the job's own tokens."""
    _, notes = checked(llama, ROUNDED, r=3, target_modules=["embed_tokens", "q_proj"])

    assert named(notes, "model.embed_tokens")


def test_a_trained_copy_of_the_head(llama):
    """modules_to_save: lm_head. The neighbour keeps the base's."""
    _, notes = checked(llama, ROUNDED, r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])

    assert named(notes, "lm_head")
    assert any("does not use the base's lm_head" in note for note in notes)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["out"], "modules_to_save": ["head"]},
        {"target_modules": ["out"], "modules_to_save": ["norm"]},
        {"target_modules": ["embed", "qkv"]},
        {"target_modules": ["qkv"], "bias": "all"},
        {"target_modules": ["out"], "lora_bias": True},
    ],
    ids=str,
)
def test_other_kinds_over_padded_lines(lora):
    """In batch form a job owns lines; the head runs on single tokens there too."""
    base = BaseSpec(module=plain(layers=2), dtype="float64")
    jobs = [job("plain", base, r=4, target_modules=["qkv"]), job("other", base, r=2, **lora)]
    model = ready(jobs)

    assert any("'other' runs as it is" in note for _, note in model.group.notes)
    assert_equals_peft(model, [tokens(n, seed=s) for s, n in enumerate(LENGTHS)], WIDE)


def test_a_trained_copy_of_a_norm(llama):
    """modules_to_save: a norm inside the layers."""
    _, notes = checked(
        llama, ROUNDED, r=3, target_modules=["q_proj"], modules_to_save=["input_layernorm"]
    )

    assert named(notes, "input_layernorm")


def test_all_biases_trained(gpt2):
    """bias: all trains the base's biases, in copies of the job's own."""
    _, notes = checked(gpt2, WIDE, r=3, target_modules=["c_attn"], bias="all")

    assert named(notes, "attn.c_attn")
    assert named(notes, "ln_1")


def test_biases_of_adapted_modules_trained(gpt2):
    """bias: lora_only trains the biases of the targets alone."""
    _, notes = checked(gpt2, WIDE, r=3, target_modules=["c_attn"], bias="lora_only")

    assert named(notes, "attn.c_attn")
    assert not named(notes, "ln_1")


def test_a_bias_in_b(llama):
    """lora_bias gives B a bias."""
    _, notes = checked(llama, ROUNDED, r=3, target_modules=QUERIES, lora_bias=True)

    assert any("its B has a bias" in note for note in notes)


def test_adapters_on_some_layers(llama):
    """layers_to_transform: the other layers have nothing of this job."""
    model, _ = checked(llama, ROUNDED, r=3, target_modules=QUERIES, layers_to_transform=[1])

    assert not model.banks["model.layers.0.self_attn.q_proj"].serves(1)
    assert model.banks["model.layers.1.self_attn.q_proj"].serves(1)


def test_jobs_with_different_targets(llama):
    """A site holds an adapter for the jobs that target it and nothing for the others."""
    model, notes = checked(llama, ROUNDED, r=3, target_modules=["v_proj", "down_proj"])

    served = {path.rpartition(".")[2]: bank for path, bank in model.banks.items()}
    assert [served["q_proj"].serves(j) for j in (0, 1)] == [True, False]
    assert [served["v_proj"].serves(j) for j in (0, 1)] == [True, True]
    assert [served["down_proj"].serves(j) for j in (0, 1)] == [False, True]
    assert notes == []


@pytest.mark.parametrize("saved", ["self_attn", "mlp"])
def test_a_trained_copy_of_a_whole_submodule(llama, saved):
    """A copy of an attention or of an MLP runs on the job's sequences alone."""
    _, notes = checked(llama, ROUNDED, r=3, target_modules=["lm_head"], modules_to_save=[saved])

    assert named(notes, saved)


@pytest.mark.parametrize(("saved", "last"), [("self_attn", "o_proj"), ("mlp", "down_proj")])
@pytest.mark.parametrize("first", [True, False], ids=["copy-first", "copy-last"])
def test_a_trained_copy_beside_adapters_on_the_last_linear_of_its_module(llama, saved, last, first):
    """Both write behind one linear: the copy what the whole module gives, the adapter its share."""
    jobs = [
        job("other", llama, r=3, target_modules=["lm_head"], modules_to_save=[saved]),
        job("plain", llama, r=4, target_modules=[last]),
    ]
    model = ready(jobs if first else jobs[::-1])

    assert model.banks[f"model.layers.1.{saved}.{last}"].serves(int(first))
    told = {note for _, note in model.group.notes if "'other' runs as it is" in note}
    assert told
    assert all("aten.linear.default, not aten.add.Tensor" in note for note in told)
    assert_equals_peft(model, [tokens(n, seed=s) for s, n in enumerate(LENGTHS)], ROUNDED)


def test_a_trained_copy_of_attention_behind_three_jobs(llama):
    """It reads its own part of the tables of jobs, of which the traced row has fewer."""
    jobs = [job(name, llama, r=2, target_modules=["q_proj"]) for name in "abc"]
    copy = job("copy", llama, r=3, target_modules=["lm_head"], modules_to_save=["self_attn"])
    model = ready([*jobs, copy])

    lengths = ([5, 7], [6], [4], [3, 8])
    assert_equals_peft(model, [tokens(n, seed=s) for s, n in enumerate(lengths)], ROUNDED)
