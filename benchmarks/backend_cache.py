"""Measure how much faster the backend compiles a model that another process compiled before.

Each pair of processes gets an empty cache folder. Both build the same PEFT model and time its first
training step (forward and backward) under `torch.compile(model, backend="tlora-fx")`; imports and
building are not counted. The second process finds what the first left in Inductor's and
AOTAutograd's caches. Two bounds: by wall time, and that the second hits the cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tlora-fx", "torch", "transformers", "peft")
BOUND = 3.0
MODELS = {"LlamaConfig": {}, "Qwen3Config": {"head_dim": 16}}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LORA = {"r": 8, "lora_dropout": 0.05, "target_modules": "all-linear"}


@dataclass(frozen=True, slots=True)
class Step:
    """What one process measured: seconds of its first training step, and what the caches did."""

    seconds: float
    hits: int
    misses: int
    branches_lowered: int


def measure(model_name: str) -> Step:
    """Time the first training step in this process."""
    import peft
    import torch
    import transformers
    from torch._dynamo.utils import counters

    import tlora_fx.backend  # noqa: F401  (compiling would import it)

    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    config = getattr(transformers, model_name)(**SIZES, **MODELS[model_name])
    auto: Any = transformers.AutoModelForCausalLM
    base = auto.from_config(config)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**LORA))  # type: ignore[arg-type]
    ids = torch.randint(0, SIZES["vocab_size"], (2, 32))
    compiled: Any = torch.compile(
        model, backend="tlora-fx", options={"strict": True}, fullgraph=True
    )
    started = time.perf_counter()
    compiled(input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - started
    cache = counters["aot_autograd"]
    return Step(
        seconds,
        cache["autograd_cache_hit"],
        cache["autograd_cache_miss"],
        counters["tlora_fx"]["branches_lowered"],
    )


def spawn(model_name: str, folder: str, seed: int) -> Step:
    """Measure in a fresh process with this cache folder and another hash seed."""
    command = [sys.executable, __file__, "--measure", model_name]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"measuring {model_name} failed:\n{done.stderr}")
    return Step(**json.loads(done.stdout.splitlines()[-1]))


def pair(model_name: str) -> tuple[Step, Step]:
    """The first and the second process on one cache folder, empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        return spawn(model_name, folder, 1), spawn(model_name, folder, 2)


def hardware() -> dict[str, Any]:
    """The machine, as far as it matters here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }


def report(runs: dict[str, list[tuple[Step, Step]]], count: int) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    return {
        "benchmark": "backend_cache",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/backend_cache.py --runs {count}",
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "model": SIZES | {"lora": LORA, "batch": [2, 32], "dtype": "float32"},
        "bound": {"what": "first step, second process against first", "at_least": BOUND},
        "cases": [
            {
                "model": name,
                "times_faster": faster(own),
                "holds": holds(own),
                "runs": [{"first": asdict(one), "second": asdict(two)} for one, two in own],
            }
            for name, own in runs.items()
        ],
    }


def faster(own: list[tuple[Step, Step]]) -> float:
    """How many times faster the second process is: the median over the pairs."""
    return float(statistics.median(one.seconds / two.seconds for one, two in own))


def holds(own: list[tuple[Step, Step]]) -> bool:
    """Whether the bound holds and every second process hit the cache."""
    return faster(own) >= BOUND and all(two.hits and not two.misses for _, two in own)


def show(runs: dict[str, list[tuple[Step, Step]]], console: Console) -> None:
    """A table of medians."""
    table = Table("model", "branches", "first", "second", "times faster", "at least", "holds")
    for name, own in runs.items():
        first, second = (statistics.median(steps[i].seconds for steps in own) for i in (0, 1))
        table.add_row(
            name,
            str(own[0][0].branches_lowered),
            f"{first:.1f} s",
            f"{second:.1f} s",
            f"{faster(own):.1f}",
            f"{BOUND:g}",
            "yes" if holds(own) else "NO",
        )
    console.print(table)


def main() -> int:
    """Measure all models; exit status 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="pairs of processes a model")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    parser.add_argument("--measure", choices=MODELS, help="measure one model in this process")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(measure(given.measure))))
        return 0
    runs = {name: [pair(name) for _ in range(given.runs)] for name in MODELS}
    show(runs, Console(width=100))
    found = report(runs, given.runs)
    output = given.output or RESULTS / f"backend-cache-{found['date']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {output}")
    return 0 if all(holds(own) for own in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
