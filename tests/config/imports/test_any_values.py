"""Any key of another tool, with any value, ends in a right job file or in an error of ours."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlora_fx.config.imports import TOOLS, axolotl, import_config, llama_factory, trainer, trl
from tlora_fx.config.job_file import load_job_file, read_yaml
from tlora_fx.config.trl_arguments import INSTEAD, READ, REFUSED, SAME, SILENT
from tlora_fx.errors import ImportRefused, JobFileError

ARGUMENTS = [
    *SAME, *READ, *REFUSED, *SILENT, *INSTEAD, *trainer.IDLE, *trainer.FORMER, *trainer.DIRECT,
    "warmup_ratio", "logging_steps",
]  # fmt: skip
#: Keys that only the code names.
OTHERS = {
    "axolotl": [
        *axolotl.TYPICAL, *axolotl._CHANGES, *axolotl._IDLE, *axolotl._TRAINER_NAMES,
        "rl", "rl_beta", "orpo_alpha", "batch_size", "test_datasets", "pretraining_dataset",
        "lora_model_dir", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
        "lora_modules_to_save", "lora_fan_in_fan_out", "peft_use_dora", "peft_init_lora_weights",
        "load_in_4bit", "load_in_8bit", "chat_template", "wandb_project", "use_mlflow",
        "tokenizer_config", "saves_per_epoch", "lora_target_parameters", "wandb_name",
    ],
    "llama-factory": [
        *llama_factory.TYPICAL, *llama_factory._CHANGES, *llama_factory._IDLE, "pref_loss",
        "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "pissa_init", "pissa_iter",
        "additional_target", "adapter_folder", "train_on_prompt", "streaming", "packing",
        "neat_packing", "interleave_probs", "eval_dataset", "disable_shuffling", "pure_bf16",
    ],
    "trl": [
        *trl.TYPICAL, *trl._DPO, "beta", "datasets", "streaming", "test_split_size", "dtype",
        "torch_dtype", "lora_alpha", "lora_dropout", "lora_target_parameters", "use_rslora",
        "use_dora", "load_in_4bit", "bnb_4bit_quant_type", "env", "dataset_streaming",
    ],
}  # fmt: skip
WHOLE = {
    "axolotl": {
        "base_model": "org/base", "adapter": "lora", "datasets": [{"path": "a.jsonl"}],
        "learning_rate": 1e-4,
    },
    "llama-factory": {
        "model_name_or_path": "org/base", "dataset": "one",
        "dataset_dir": {"one": {"hf_hub_url": "org/data"}},
    },
    "trl": {"model_name_or_path": "org/base", "dataset_name": "org/data", "use_peft": True},
}  # fmt: skip
ALIKE = [
    0, 1, -1, 3, 0.1, 1.5, 1e300, 10**400, "", "auto", "no", "steps", "epoch", "1e-4", "0.1",
    "lora", "cosine", "adamw_torch", "all", "all-linear", "dpo", "sft", "loss", "none", True, False,
    None, "./a.jsonl", "x\0y", "a\u2028b\n#c", "yes", [], {}, ["q_proj", "v_proj"], [None],
    {"": None},
    [{"path": "b.json", "type": "chat_template", "field_messages": "m"}],
    [{"path": "b", "type": "input_output"}],
    [{"path": "c", "type": {"field_instruction": "q", "format": "{q}"}, "split": 3}],
    {"min_lr_rate": 0.1}, "a=1,b", {"one": {"file_name": "x.json", "columns": {"query": 3}}},
]  # fmt: skip
ANY = st.sampled_from(ALIKE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_ends_in_a_job_file_or_an_error(tool, data, tmp_path, monkeypatch):
    """And each key of the file is carried, or listed as left out."""
    monkeypatch.chdir(tmp_path)
    keys = st.sampled_from(sorted({*ARGUMENTS, *OTHERS[tool]})) | st.text(max_size=6)
    content = WHOLE[tool] | data.draw(st.dictionaries(keys, ANY, max_size=4))
    (tmp_path / "config.yaml").write_text(json.dumps(content), encoding="utf-8")
    target = tmp_path / "jobs.yaml"
    try:
        content = read_yaml(tmp_path / "config.yaml").value
        made = import_config("config.yaml", target, tool)
    except (ImportRefused, JobFileError):
        return
    target.write_text(made.text(), encoding="utf-8")

    [job] = load_job_file(target, trust_remote_code=True).jobs
    assert job.name == made.document["jobs"][0]["name"]
    assert yaml.safe_load(made.text()).keys() == {"base", "jobs"}
    told = {*made.carried, *(item.key for item in made.left)}
    assert all(any(_is_of(each, key) for each in told) for key in content)
    assert all(any(_is_of(each, key) for key in content) for each in told)


def _is_of(told: str, key: str) -> bool:
    return told == key or told.startswith(f"{key}.")
