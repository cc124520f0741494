"""`verify` in float32 on the decoders that the installed transformers offers.

    python -m benchmarks.verify_decoders
    python -m benchmarks.verify_decoders --only glm4 ctrl

Each decoder has two layers and a vocabulary of 128, and all dropouts that its config names. Two
jobs adapt all its linears; on mixtures of experts (`--mixtures`), those of attention. Their samples
get longer from step to step, so the first steps hold only short ones. The table has each decoder's
largest differences over both jobs, and the noise of the base itself where that difference was
found.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from transformers import AutoConfig
from transformers.utils import logging

from benchmarks.results_file import RESULTS, console, described, write
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import BaseRefused, TloraError
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.verify import JobDifference, bounds_of, verify

VOCABULARY = 128
STEPS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
# What a config calls otherwise, or needs besides.
_EIGHT: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 24}
_LOCAL: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EIGHT, "norm_topk_prob": True},
    "qwen2_moe": {**_EIGHT, "shared_expert_intermediate_size": 24},
    "mixtral": _LOCAL,
    "olmoe": _EIGHT,
    "gpt_oss": {**_LOCAL, "sliding_window": 8},
    "granitemoe": _LOCAL,
    "deepseek_v3": {
        "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    },
    "llama4_text": {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "qwen3_next": {
        **_EIGHT, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
# Modules that attention has, where a mixture's experts stay as they are.
ATTENTION = r".*\.self_attn\.\w+_proj\w*"
MIXTURES = tuple(CHANGES)
DECODERS = (
    "apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "ctrl", "cwm",
    "diffllama", "doge", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "granite",
    "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "llama", "minicpm3",
    "ministral", "ministral3", "mistral", "modernbert-decoder", "mpt", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm", "youtu",
)  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = described("verify_decoders", "cpu")
    found |= {"bounds": _triple(bounds_of("float32", "cpu")), "steps": STEPS, "rows": []}
    out = console()
    kind = "mixtures" if given.mixtures else "dense-decoders"
    path = Path(given.out) / f"verify-{kind}-{found['date']}.json"
    for name in given.only or (MIXTURES if given.mixtures else DECODERS):
        rows = measured(name)
        found["rows"] += rows
        out.print(_table(rows))
        failed = {row["decoder"] for row in found["rows"] if not row["ok"]}
        found["passed"] = len({row["decoder"] for row in found["rows"]} - failed)
        write(path, found)
    out.print(f"{found['passed']} decoders pass; not: {', '.join(sorted(failed)) or 'none'}")


def measured(name: str) -> list[dict[str, Any]]:
    """A row for each way of dropout, or one that says why there is none."""
    try:
        return _rows(name, base_drops=True)
    except BaseRefused:
        # Attention that only batch form can run: a dropped weight belongs to two tokens there.
        return _rows_or_error(name)
    except Exception as error:  # noqa: BLE001  (a table of what each decoder comes to)
        return [_failure(name, error)]


def _rows_or_error(name: str) -> list[dict[str, Any]]:
    try:
        return _rows(name, base_drops=False)
    except Exception as error:  # noqa: BLE001  (as above)
        return [_failure(name, error)]


def _failure(name: str, error: Exception) -> dict[str, Any]:
    kind = error.code if isinstance(error, TloraError) else type(error).__name__
    return {"decoder": name, "ok": False, "error": f"{kind}: {str(error).splitlines()[0]}"}


def _rows(name: str, base_drops: bool) -> list[dict[str, Any]]:
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        targets = ATTENTION if name in MIXTURES else "all-linear"
        jobs = jobs_on(base_of(name, Path(folder), base_drops), targets)
        differences = list(verify(jobs, STEPS, device="cpu", data=data_of(jobs)))
    seconds = time.perf_counter() - began
    ways = dict.fromkeys(row.against for row in differences)
    return [
        {
            "decoder": name, "form": rows[0].form, "against": against, "base drops": base_drops,
            "steps": STEPS, **{key: _worst(rows, key) for key in ("loss", "gradient", "adapter")},
            "ok": all(row.within(bounds_of("float32", "cpu")) for row in rows),
            "seconds": round(seconds, 1),
        }
        for against in ways
        if (rows := [row for row in differences if row.against == against])
    ]  # fmt: skip


def base_of(name: str, folder: Path, drops: bool) -> BaseSpec:
    """A small decoder in float32; where it `drops`, wherever its config has a rate."""
    config = AutoConfig.for_model(name, **SIZES | CHANGES.get(name, {}))
    for field, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in field:
            setattr(config, field, 0.1 if drops and field != "layerdrop" else 0.0)
    config.save_pretrained(folder)
    return BaseSpec(config=folder, dtype="float32", seed=3)


def jobs_on(base: BaseSpec, targets: str) -> list[Job]:
    """Two jobs on the same linears."""
    first = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": targets}
    second = {"r": 4, "lora_alpha": 4, "target_modules": targets}
    settings: dict[str, Any] = {
        "base": base, "data": {"path": "unused.jsonl"}, "learning_rate": 1e-3, "max_steps": STEPS,
        "shuffle": False, "per_device_train_batch_size": 3,
    }  # fmt: skip
    return [
        Job(name="a", lora=first, seed=1, **settings),
        Job(name="b", lora=second, seed=2, gradient_accumulation_steps=2, **settings),
    ]


def data_of(jobs: list[Job]) -> dict[str, JobData]:
    """Fifty samples a job, from 2 tokens to 51."""
    data: dict[str, JobData] = {}
    for job in jobs:
        draw = random.Random(job.name)  # noqa: S311  (tokens to train on)
        samples = []
        for length in range(2, 52):
            ids = tuple(draw.randrange(2, VOCABULARY) for _ in range(length))
            free = length // 4
            samples.append(Sample(ids, (-100,) * free + ids[free:]))
        data[job.name] = JobData(job, samples, DataReport())
    return data


def _worst(rows: list[JobDifference], key: str) -> dict[str, float]:
    """The largest difference, with the noise and the bound of its job."""
    row = max(rows, key=lambda row: float(getattr(row, key)))
    bound = bounds_of("float32", "cpu").over(row.noise)
    return {
        "difference": getattr(row, key),
        "noise": getattr(row.noise, key),
        "bound": getattr(bound, key),
    }


def _triple(bounds: Any) -> dict[str, float]:
    return {key: getattr(bounds, key) for key in ("loss", "gradient", "adapter", "lift")}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, title="largest relative difference / noise of the base")
    for title in ("decoder", "form", "dropout", "steps", "loss", "gradient", "adapter", ""):
        table.add_column(title, no_wrap=title != "")
    for row in rows:
        if "error" in row:
            table.add_row(row["decoder"], "", "", "", "", "", "", row["error"])
            continue
        cells = (
            f"{row[key]['difference']:.1e} / {row[key]['noise']:.1e}"
            for key in ("loss", "gradient", "adapter")
        )
        way = "off" if "dropout 0" in row["against"] else "on"
        verdict = "ok" if row["ok"] else "BEYOND"
        table.add_row(row["decoder"], row["form"], way, str(row["steps"]), *cells, verdict)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="model types, instead of all")
    parser.add_argument("--mixtures", action="store_true", help="mixtures of experts")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
