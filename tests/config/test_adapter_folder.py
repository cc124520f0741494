"""Adapter folders that a job continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlora_fx.config.adapter_folder import ignored_fields, read_adapter_config
from tlora_fx.errors import AdapterFolderError


def folder(path: Path, config: object, weights: str | None = "adapter_model.safetensors") -> Path:
    """An adapter folder with this configuration."""
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "adapter_config.json").write_text(text)
    if weights:
        (path / weights).touch()
    return path


def test_only_lora_fields_are_read(tmp_path: Path) -> None:
    """What PEFT writes of itself is no part of the job."""
    config = {"peft_type": "LORA", "task_type": None, "peft_version": "0.1", "r": 4, "bias": "none"}

    assert read_adapter_config(folder(tmp_path, config)) == {"bias": "none", "r": 4}


@pytest.mark.parametrize("value", [None, False, "", [], {}])
@pytest.mark.parametrize("kind", ["LORA", "LOHA"])
def test_an_unknown_field_that_says_nothing_is_left_out(
    tmp_path: Path, value: object, kind: str
) -> None:
    """PEFT 0.3 wrote enable_lora: null; a later PEFT writes fields of its own."""
    path = folder(tmp_path, {"peft_type": kind, "r": 4, "future_field": value, "enable_lora": None})

    assert read_adapter_config(path)["r"] == 4
    assert ignored_fields(path) == ["future_field", "enable_lora"]


def test_a_known_field_is_not_left_out_because_it_is_empty(tmp_path: Path) -> None:
    """False may be the value that means something."""
    path = folder(tmp_path, {"peft_type": "LORA", "r": 4, "init_lora_weights": False})

    assert read_adapter_config(path) == {"init_lora_weights": False, "r": 4}
    assert ignored_fields(path) == []


def test_an_empty_list_of_parameters_is_none(tmp_path: Path) -> None:
    """PEFT 0.21 writes it for adapters on a mixture's attention."""
    config = {"r": 4, "target_modules": ["q_proj"], "target_parameters": []}

    assert read_adapter_config(folder(tmp_path, config)) == {"r": 4, "target_modules": ["q_proj"]}


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    """A folder with adapter_model.bin alone is refused with the reason and the way out."""
    with pytest.raises(AdapterFolderError, match="a pickle, which can run code") as caught:
        read_adapter_config(folder(tmp_path, {"r": 4}, "adapter_model.bin"))

    assert "safe_serialization=True" in caught.value.help


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "ADALORA"}, "AdaLoRA needs .total_step"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is not"),
        ({"peft_type": "LORA", "task_type": "SEQ_CLS"}, "task_type is not CAUSAL_LM"),
        ({"peft_type": "LORA", "use_qalora": True}, "'use_qalora' is refused"),
        ({"peft_type": "LORA", "future_field": 1}, "unknown key 'future_field'"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "beside what 'pissa' left"),
        ({"peft_type": "LORA", "r": 0}, "1 <= n"),
        ([1], "no JSON object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_wrong_configuration_is_told(tmp_path: Path, config: Any, said: str) -> None:
    """A folder's configuration is held against the same tables as a job's."""
    with pytest.raises(AdapterFolderError, match=said):
        read_adapter_config(folder(tmp_path, config))


def test_incomplete_folders_are_told(tmp_path: Path) -> None:
    """No folder, no configuration, no weights: each has its words."""
    with pytest.raises(AdapterFolderError, match="does not exist"):
        read_adapter_config(tmp_path / "none")
    with pytest.raises(AdapterFolderError, match=r"has no adapter_config\.json"):
        read_adapter_config(tmp_path)
    with pytest.raises(AdapterFolderError, match=r"has no adapter_model\.safetensors"):
        read_adapter_config(folder(tmp_path, {"r": 4}, None))
