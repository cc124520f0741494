"""The frozen base: on meta, with the values that no checkpoint holds."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2AudioConfig

from tests.models import base_of, error_of, plain, save_config
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseRefused
from tlora_fx.model.backbone import has_sdpa, load_backbone, matrices_on_meta
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.testing.equivalence import SIZES
from tlora_fx.tracing.surroundings import undisturbed


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A Gemma 2 on meta."""
    return load_backbone(base_of(tmp_path_factory.mktemp("gemma2"), "gemma2", "float32"))


def test_modules_of_other_threads_stay_real():
    """A base is built in one thread; others build what they like, and wait to build a base."""
    register = nn.Module.register_parameter
    entered, made, left = threading.Event(), [], threading.Event()

    def build() -> None:
        made.append(nn.Linear(2, 2))
        entered.set()
        with matrices_on_meta():
            made.append(nn.Linear(2, 2))
        left.set()

    with matrices_on_meta():
        other = threading.Thread(target=build)
        other.start()
        entered.wait()
        made.append(nn.Linear(2, 2))
    left.wait()
    other.join()

    assert [linear.weight.is_meta for linear in made] == [False, True, True]
    assert nn.Module.register_parameter is register


def test_a_fork_beside_a_thread_that_builds_can_build():
    """The thread that holds the lock is not in it."""
    held, go_on = threading.Event(), threading.Event()

    def build() -> None:
        with undisturbed(), matrices_on_meta():
            held.set()
            go_on.wait()

    other = threading.Thread(target=build)
    other.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        with undisturbed(), matrices_on_meta():
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    other.join()

    assert code == 0


def test_every_tensor_of_the_module_lies_on_meta(backbone):
    """Parameters and buffers; none needs a gradient."""
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]

    assert all(tensor.is_meta and not tensor.requires_grad for tensor in tensors)


def test_what_no_checkpoint_holds_is_known(backbone):
    """Rotary frequencies and embedding scales have values, matrices have none."""
    saved = {backbone.names[id(t)] for t in backbone.model.state_dict(keep_vars=True).values()}
    missing = set(dict(backbone.model.named_buffers())) - saved

    assert missing
    assert missing <= set(backbone.values)
    assert not any(value.dim() > 1 for value in backbone.values.values())


def test_tied_weights_have_one_name(backbone):
    """Gemma's head is its embedding."""
    head = backbone.model.lm_head.weight

    assert backbone.names[id(head)] == "model.embed_tokens.weight"


def test_a_copy_shares_every_tensor(backbone):
    """What is traced is a copy of modules, not of weights."""
    copied = backbone.copy_model()

    assert copied is not backbone.model
    assert {id(t) for t in copied.parameters()} == {id(t) for t in backbone.model.parameters()}


@pytest.mark.parametrize("kind", ["gptj", "deepseek_v3"])
def test_a_base_in_bfloat16_is_the_one_that_transformers_loads(tmp_path, kind):
    """GPT-J's angles are not rounded, and the biases of DeepSeek's routers stay in float32."""
    sizes = {**SIZES, "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 64}
    few = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = AutoConfig.for_model(kind, **{**sizes, **few, **experts})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in made.named_buffers():
        if name.endswith("bias"):
            buffer.data = torch.linspace(0.1, 0.2, buffer.numel())
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)

    backbone = load_backbone(BaseSpec(model=tmp_path, dtype="bfloat16"))

    held = dict(backbone.model.named_parameters()) | dict(backbone.model.named_buffers())
    theirs = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert len(held) == len(theirs) > 0
    assert {n: t.dtype for n, t in held.items()} == {n: t.dtype for n, t in theirs.items()}
    values = base_tensors(backbone)
    for name, buffer in loaded.named_buffers():
        torch.testing.assert_close(values[backbone.names[id(held[name])]], buffer, rtol=0, atol=0)


def test_a_model_has_pytorchs_attention_if_every_model_within_it_has():
    """Gemma 4's tower for sound has none, and transformers refuses to set it."""
    outer, inner = nn.Sequential(), nn.Linear(2, 2)
    outer._supports_sdpa = inner._supports_sdpa = True
    assert has_sdpa(outer.append(inner))

    inner._supports_sdpa = False

    assert not has_sdpa(outer)


def test_a_given_module_is_not_changed():
    """Its tensors keep their values, on their device, with their gradients."""
    module = plain(layers=2)
    before = {name: p.clone() for name, p in module.named_parameters()}

    backbone = load_backbone(BaseSpec(module=module, dtype="float64"))

    for name, parameter in module.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name])
        assert torch.equal(backbone.values[name], parameter)
    assert backbone.config is None


def test_random_weights_are_a_function_of_seed_and_name(tmp_path):
    """The same config and seed give the same base, another seed another."""
    config = save_config(tmp_path, "llama", num_hidden_layers=2)

    def drawn(seed):
        return base_tensors(load_backbone(BaseSpec(config=config, seed=seed, dtype="float32")))

    one, two, other = drawn(0), drawn(0), drawn(1)
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one["model.layers.0.mlp.up_proj.weight"])


def test_a_fingerprint_changes_with_what_the_base_is(tmp_path):
    """Config, dtype and seed; not with where it is called from."""
    config = save_config(tmp_path, "llama", num_hidden_layers=2)
    specs = [
        BaseSpec(config=config, dtype="float32"),
        BaseSpec(config=config, dtype="float64"),
        BaseSpec(config=config, dtype="float32", seed=1),
    ]

    prints = {load_backbone(spec).fingerprint() for spec in specs}

    assert len(prints) == 3
    assert load_backbone(specs[0]).fingerprint() in prints


def test_a_base_that_hears_is_refused_by_what_it_is(tmp_path):
    """Its text part has no class of its own, so nothing is built."""
    Qwen2AudioConfig().save_pretrained(tmp_path)

    text = error_of(lambda: load_backbone(BaseSpec(config=tmp_path)), BaseRefused)

    assert "reads more than text" in text.splitlines()[0]
    assert "'qwen2_audio' with audio" in text
