"""Bases that are no causal language models are refused by their config.json."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from tests.models import error_of
from tlora_fx.config.base_task import ENCODERS, read_base_config, require_task, sees_images
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseRefused, JobError

OTHERS = {
    "an encoder-decoder": {"model_type": "t5", "is_encoder_decoder": True},
    "an encoder": {"model_type": "bert"},
    "an encoder by its class": {"model_type": "new", "architectures": ["NewForMaskedLM"]},
    "a classifier of sequences": {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
    },
    "a model of speech": {"architectures": ["Wav2Vec2ForCTC"]},
}
CAUSAL = {
    "by its class": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "a decoder cut out of two": {
        "model_type": "bart",
        "is_encoder_decoder": True,
        "architectures": ["BartForCausalLM"],
    },
    "an encoder that is made to predict": {"model_type": "bert", "is_decoder": True},
    "one that names no class": {"model_type": "llama"},
    "one that says nothing": {},
    "code of others": {
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
        "architectures": ["NewForSequenceClassification"],
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_model_is_refused(name):
    """The first line says what it is."""
    text = error_of(lambda: require_task(OTHERS[name], BaseSpec(model="x")), BaseRefused)
    first, *rest = text.splitlines()

    assert name.removesuffix(" by its class") in first
    assert any("PEFT" in line or "SEQ_CLS" in line for line in rest)


@pytest.mark.parametrize("task", ["TOKEN_CLS", "SEQ_2_SEQ_LM"])
def test_a_task_that_no_job_has_is_refused(task):
    """In one sentence, and no other task is proposed instead."""
    first, *rest = error_of(lambda: BaseSpec(model="x/y", task=task), JobError).splitlines()

    assert task in first
    assert "PEFT" in rest[-1]
    assert not any("did you mean" in line for line in rest)


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper", "pegasus", "mbart", "marian"])
@pytest.mark.parametrize("task", [{}, {"task": "SEQ_CLS", "labels": 2}])
def test_an_encoder_decoder_is_refused_by_the_file_that_transformers_writes(tmp_path, kind, task):
    """Before anything but that file is read."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    base = BaseSpec(config=tmp_path, **task)

    text = error_of(lambda: require_task(read_base_config(base), base), BaseRefused)

    assert "this base is an encoder-decoder" in text.splitlines()[0]


@pytest.mark.parametrize("name", OTHERS)
def test_what_can_classify_passes_where_the_task_says_so(name):
    """All but what has an encoder and a decoder."""
    base = BaseSpec(model="x", task="SEQ_CLS", labels=2)
    if "decoder" not in name:
        require_task(OTHERS[name], base)
    else:
        first = error_of(lambda: require_task(OTHERS[name], base), BaseRefused).splitlines()[0]
        assert "encoder-decoder" in first


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_passes(name):
    """Whatever else its config says."""
    require_task(CAUSAL[name], BaseSpec(model="x"))


@pytest.mark.parametrize(("kind", "sees"), [("llava", True), ("gemma3", True), ("llama", False)])
def test_a_base_that_sees_is_known_by_its_file(tmp_path, kind, sees):
    """It trains on text alone; its model card names the class that has its images' part too."""
    config = AutoConfig.for_model(kind)
    name = {"llava": "Llava", "gemma3": "Gemma3", "llama": "Llama"}[kind]
    config.architectures = [f"{name}For{'ConditionalGeneration' if sees else 'CausalLM'}"]
    config.save_pretrained(tmp_path)
    base = BaseSpec(config=tmp_path)

    require_task(read_base_config(base), base)
    assert sees_images(read_base_config(base)) is sees


def test_the_encoders_are_those_of_transformers():
    """Each is a type of model that predicts masked tokens."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    known = ENCODERS & set(CONFIG_MAPPING_NAMES)

    assert "bert" in known
    assert known <= set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


@pytest.mark.parametrize("where", ["file", "folder", "model", "cache"])
def test_a_config_is_found_where_the_base_is(tmp_path, monkeypatch, where):
    """A config.json, a folder with one, or what the hub's library has stored."""
    folder = tmp_path / "models--some--base" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--some--base" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    spec = {
        "file": BaseSpec(config=folder / "config.json"),
        "folder": BaseSpec(config=folder),
        "model": BaseSpec(model=folder),
        "cache": BaseSpec(model="some/base"),
    }[where]

    assert read_base_config(spec) == {"model_type": "t5"}


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_broken_config_is_left_to_who_reads_it(tmp_path, text):
    """It is refused there, with the reason."""
    (tmp_path / "config.json").write_text(text)

    assert read_base_config(BaseSpec(config=tmp_path)) is None
    assert read_base_config(BaseSpec(model="some/base-that-is-not-there")) is None
