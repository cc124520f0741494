"""A small base with weights and a tokenizer in a folder, and rows of sums, for jobs of Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
import yaml

from tlora_fx import Results, train

TOKENIZER = Path(__file__).parents[2] / "examples" / "quickstart" / "base"
ROWS = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(1, 6) for b in range(1, 6)
]
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
SHORT: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2}


def save_base(folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """A Llama of two layers with drawn weights, and the tokenizer of the quickstart."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """The base as its user loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def from_file(folder: Path, base: Path, rows: list[dict[str, Any]] = ROWS, **job: Any) -> Results:
    """Train one job that a job file holds, with its data in a file."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"name": "a", "lora": LORA, "data": {"path": "rows.jsonl"}} | SHORT | job
    written = {"base": {"model": str(base), "dtype": "float64"}, "jobs": [entry]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(written))
    return train(str(folder / "jobs.yaml"), output=folder / "file", device="cpu", verbose=False)


def adapter(results: Results, name: str = "a") -> dict[str, torch.Tensor]:
    """The tensors of a job's adapter folder."""
    return safetensors.torch.load_file(results[name].adapter / "adapter_model.safetensors")


def assert_same(one: Results, two: Results) -> None:
    """Losses, evaluations and adapters are equal bit for bit."""
    assert one["a"].losses == two["a"].losses
    times = {"eval_runtime"}
    assert [{k: v for k, v in each.items() if k not in times} for each in one["a"].evaluations] == [
        {k: v for k, v in each.items() if k not in times} for each in two["a"].evaluations
    ]
    first, second = adapter(one), adapter(two)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
