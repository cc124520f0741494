"""PEFT adapter folders, written and read."""

from __future__ import annotations

import errno
import json
import os

import peft
import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import base_of, job, peft_model, ready
from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.errors import AdapterFolderError
from tlora_fx.runtime.adapters import files as adapters
from tlora_fx.runtime.adapters.files import (
    base_tensors,
    read_adapter,
    start_adapters,
    write_adapter,
)

VARIANTS = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "ranks": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
    # The first that fits counts, and it is the last by name.
    "patterns": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3},
        "alpha_pattern": {"q_proj": 5, r"layers\.1\..*": 20},
    },
}


def tiny_llama() -> LlamaForCausalLM:
    """A Llama of two layers whose weights are the same on each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def adapted(variant: str) -> peft.PeftModel:
    """The tiny Llama with an adapter none of whose tensors is zero."""
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **VARIANTS[variant])
    model = peft.get_peft_model(tiny_llama(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_loads_what_we_write(tmp_path, variant):
    """PeftModel.from_pretrained gives the logits of the model that was trained."""
    model = adapted(variant)
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)

    write_adapter(tmp_path / "job", tensors, model.peft_config["default"])
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "job"))

    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_our_folder_says_what_pefts_folder_says(tmp_path):
    """The two files hold the tensors and the config that PEFT's own save gives."""
    model = adapted("plain")
    model.save_pretrained(tmp_path / "theirs")
    tensors = peft.get_peft_model_state_dict(model)

    write_adapter(tmp_path / "ours", tensors, model.peft_config["default"])

    ours, theirs = (
        json.loads((tmp_path / side / "adapter_config.json").read_text())
        for side in ("ours", "theirs")
    )
    assert sorted(ours.pop("target_modules")) == sorted(theirs.pop("target_modules"))
    assert ours == theirs
    weights = [(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_views_of_one_storage_are_written_whole(tmp_path):
    """Two jobs' parts of a bank share storage and may be transposed."""
    bank = torch.arange(24.0).reshape(6, 4)
    tensors = {"a": bank[:2], "b": bank[2:].t(), "c": bank[:2]}

    write_adapter(tmp_path, tensors, peft.LoraConfig(target_modules=["q"]))

    found = read_adapter(tmp_path).tensors
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_what_is_written_is_read_back(tmp_path):
    """Config and tensors survive the way through the folder."""
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["b", "a"])
    write_adapter(tmp_path, {"x": torch.ones(2)}, config, base_name="some/base")

    found = read_adapter(tmp_path)

    assert (found.fields["r"], found.fields["lora_alpha"]) == (3, 5)
    assert found.fields["target_modules"] == ["a", "b"]
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"
    assert written["inference_mode"] is True
    assert (config.base_model_name_or_path, config.inference_mode) == (None, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_pickle_is_never_loaded(tmp_path):
    """A folder whose weights are adapter_model.bin is refused by name."""
    write_adapter(tmp_path, {"x": torch.ones(2)}, peft.LoraConfig(target_modules=["q"]))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")

    with pytest.raises(AdapterFolderError, match="pickle"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    """The error says which file the folder lacks."""
    write_adapter(tmp_path, {"x": torch.ones(2)}, peft.LoraConfig(target_modules=["q"]))
    (tmp_path / name).unlink()

    with pytest.raises(AdapterFolderError, match=f"has no {name}"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_file_is_our_error(tmp_path, name):
    """A cut file is a clear error, not a traceback of a library."""
    write_adapter(tmp_path, {"x": torch.ones(2)}, peft.LoraConfig(target_modules=["q"]))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:20])

    with pytest.raises(AdapterFolderError, match="cannot be read"):
        read_adapter(tmp_path)


def test_another_kind_of_adapter_is_refused(tmp_path):
    """Prefix tuning and its like are no LoRA."""
    write_adapter(tmp_path, {"x": torch.ones(2)}, peft.LoraConfig(target_modules=["q"]))
    peft.BOFTConfig(target_modules=["a"]).save_pretrained(tmp_path)

    with pytest.raises(AdapterFolderError, match="peft_type is not LORA"):
        read_adapter(tmp_path)


def test_a_full_disk_leaves_the_adapter_before(tmp_path, monkeypatch):
    """ENOSPC while the weights are written keeps the old folder whole and leaves no rest."""
    write_adapter(tmp_path, {"x": torch.ones(2)}, peft.LoraConfig(r=1, target_modules=["q"]))

    def full(path: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(adapters, "write_synced", full)
    with pytest.raises(AdapterFolderError, match="No space left"):
        write_adapter(tmp_path, {"x": torch.zeros(2)}, peft.LoraConfig(r=2))

    found = read_adapter(tmp_path)
    assert torch.equal(found.tensors["x"], torch.ones(2))
    assert found.fields["r"] == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """A model whose job adapts embedding and head, and the folder that PEFT saves of it."""
    folder = tmp_path_factory.mktemp("continued")
    base = base_of(folder, "llama", "float32", num_hidden_layers=1)
    targets = ["embed_tokens", "lm_head", "q_proj"]
    model = ready([job("first", base, r=4, target_modules=targets)])
    peft_model(model, "first").save_pretrained(folder / "first")
    again = Job(name="again", base=base, adapter=folder / "first", data={"path": "unused.jsonl"})
    return model, compile(again), folder / "first"


def test_an_adapter_on_embedding_and_head_goes_on_from_pefts_folder(continued):
    """PEFT writes the frozen matrices beside it; where they are the base's, they are left out."""
    first, again, folder = continued
    assert any("base_layer" in name for name in read_adapter(folder).tensors)

    again.materialize(base_tensors(again.backbone), "cpu")
    start_adapters(again)

    expected = first.job_parameters("first")
    for name, parameter in again.job_parameters("again").items():
        assert torch.equal(parameter, expected[name]), name


def test_an_adapter_on_the_embedding_of_another_base_is_refused(continued):
    """The frozen matrix beside it has other values."""
    _, again, folder = continued
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    (name,) = [name for name in tensors if "embed_tokens.base_layer" in name]
    safetensors.torch.save_file(
        tensors | {name: tensors[name] + 1}, folder / "adapter_model.safetensors"
    )

    again.materialize(base_tensors(again.backbone), "cpu")
    with pytest.raises(AdapterFolderError, match="another embedding or head than the base"):
        start_adapters(again)
