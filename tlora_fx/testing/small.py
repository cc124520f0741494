"""A model and jobs small enough to compile and run in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlora_fx.config.job import BaseSpec, DtypeName, Job

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def small_base(
    folder: Path, model_type: str = "llama", dtype: DtypeName = "float32", **config: Any
) -> BaseSpec:
    """A base of three layers; its weights are drawn from a seed.

    folder       where its config.json is written
    model_type   one of transformers', such as "qwen3" or "gpt2"
    config       fields of its config instead of the small ones
    """
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type, **{**SIZES, **config})
    made.save_pretrained(folder)
    return BaseSpec(config=folder, dtype=dtype)


def small_job(name: str, base: BaseSpec, **lora: Any) -> Job:
    """A job that is compiled and not trained.

    lora   fields of its LoraConfig; rank 4 on q_proj and down_proj where nothing is said
    """
    fields = {"r": 4, "target_modules": ["q_proj", "down_proj"], **lora}
    return Job(name=name, base=base, lora=fields, data={"path": "unused.jsonl"})
