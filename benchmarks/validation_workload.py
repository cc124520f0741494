"""Twelve jobs that `validation.py` trains and simulates: files, data, and when they come."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
SHAPE_8B = Path(__file__).parent / "shapes" / "llama-3-8b"
RANKS = (2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
ROWS = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """One job of the workload.

    fields         of its job file
    arrives        seconds after the first
    lone_seconds   that it shall take alone
    """

    name: str
    fields: dict[str, Any]
    arrives: float
    lone_seconds: float


def base_of(model: str, layers: int, vocabulary: int, folder: Path) -> dict[str, Any]:
    """The base's entry in job files; its config is written to `folder`.

    model        "tiny" is the quickstart's in float32, "8b" Llama-3-8B's widths in bfloat16
    layers       of it
    vocabulary   of it; a real one takes long to draw, and the tokenizer has 512 words
    """
    source = QUICKSTART / "base" if model == "tiny" else SHAPE_8B
    sizes = {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = json.loads((source / "config.json").read_text()) | sizes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "config": str(folder),
        "tokenizer": str(QUICKSTART / "base"),
        "dtype": "float32" if model == "tiny" else "bfloat16",
    }


def workload(
    count: int, lone_seconds: float, over_seconds: float, longest: int, seed: int, folder: Path
) -> list[Planned]:
    """Jobs of mixed ranks, batches, lengths and durations; their data is written to `folder`.

    count          of jobs
    lone_seconds   of a job alone, on average; from half to twice that
    over_seconds   within which they come
    longest        tokens of the longest samples
    """
    chance = random.Random(seed)  # noqa: S311  (a workload, not a secret)
    arrivals = sorted(chance.uniform(0, over_seconds) for _ in range(count - 1))
    planned = []
    for number, arrives in enumerate([0.0, *arrivals]):
        length = longest >> chance.randrange(3)
        name = f"job-{number:02d}"
        fields = {
            "name": name,
            "lora": {"r": chance.choice(RANKS), "target_modules": "all-linear"},
            "data": {"path": str(_data(folder / f"{name}.jsonl", length, chance))},
            "per_device_train_batch_size": chance.choice(BATCHES),
            "max_length": length,
            "learning_rate": 1e-4,
            "seed": number,
            "save_steps": 1_000_000,
        }
        share = 2 ** chance.uniform(-1, 1)
        planned.append(Planned(name, fields, arrives, lone_seconds * share))
    return planned


def _data(path: Path, length: int, chance: random.Random) -> Path:
    """Texts that are mostly longer than `length` tokens, and then cut there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = (QUICKSTART / "data" / "records.jsonl").read_text().split()
    rows = [
        {"text": " ".join(chance.choices(words, k=max(2, int(length * chance.uniform(0.3, 1.0)))))}
        for _ in range(ROWS)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_file(path: Path, base: dict[str, Any], jobs: list[dict[str, Any]]) -> Path:
    """A job file, there at once as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(yaml.safe_dump({"base": base, "jobs": jobs}))
    return hidden.replace(path)
