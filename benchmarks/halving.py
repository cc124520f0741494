"""A sweep with successive halving against all of its jobs to the end.

    python -m benchmarks.halving --device cpu --threads 2
    python -m benchmarks.halving --data gsm8k/train.jsonl

27 configurations (three learning rates, ranks and batch sizes) train on the quickstart's base, once
to the end and once with `tlora_fx.sweep(..., halving=...)`, in turns, for each seed. Seconds are of
whole calls. What is right is compared first: losses of each job that ended early are those of the
same job to the end, as far as they go. The bound on the result: the best job that halving leaves is
the best of all, or is worse by no more than the best of all differ between seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

import tlora_fx
from benchmarks.arguments import parser_of
from benchmarks.interleaved import turns
from benchmarks.results_file import console, described, write

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
GRID = {
    "learning_rate": [3e-4, 3e-3, 3e-2],
    "lora.r": [2, 8, 32],
    "per_device_train_batch_size": [2, 4, 8],
}
STEPS, HALVING = 81, {"min_steps": 9, "factor": 3}
ARMS = ("to the end", "halving")
#: Of losses of the two arms, relative: rows are shared with others there, in float32.
LOSS_BOUND = 1e-3
#: Seconds of halving over those of all jobs to the end.
TIME_BOUND = 0.45


def job(given: argparse.Namespace, seed: int) -> tlora_fx.Job:
    """The job that is swept."""
    return tlora_fx.Job(
        "sweep",
        base=tlora_fx.BaseSpec(config=QUICKSTART / "base", dtype="float32"),
        lora={"r": 8, "target_modules": "all-linear"},
        data=str(given.data),
        eval_split=0.2,
        eval_steps=STEPS,
        max_length=256,
        max_steps=STEPS,
        seed=seed,
    )


def train(
    arm: str, given: argparse.Namespace, seed: int, output: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One sweep: what is kept of it, and each job's losses."""
    begun = time.perf_counter()
    results = tlora_fx.sweep(
        job(given, seed), GRID, halving=HALVING if arm == "halving" else None,
        output=output, device=given.device, verbose=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    finished = {
        name: each.evaluations[-1]["eval_loss"]
        for name, each in results.items()
        if each.steps == STEPS
    }
    best = min(finished, key=lambda name: finished[name])
    kept = {
        "seed": seed,
        "seconds": round(seconds, 2),
        "jobs to the end": len(finished),
        "steps": sum(each.steps for each in results.values()),
        "best": {"job": best, "eval_loss": finished[best]},
    }
    return kept, {name: each.losses for name, each in results.items()}


def apart(whole: dict[str, list[float]], halved: dict[str, list[float]]) -> float:
    """The largest relative difference of losses that both arms have.

    raises    RuntimeError beyond the bound
    """
    worst = max(
        abs(mine - other) / abs(other)
        for name, losses in halved.items()
        for mine, other in zip(losses, whole[name], strict=False)
    )
    if not worst <= LOSS_BOUND:
        raise RuntimeError(f"losses of the arms differ by {worst}, beyond {LOSS_BOUND}")
    return worst


def main() -> None:
    """Train both arms for each seed, compare, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "word-problems.jsonl")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="halving-") as folder:
        train("halving", given, 0, Path(folder) / "first")  # fills the caches
        losses: dict[tuple[str, int], dict[str, Any]] = {}
        for seed, arm in turns(ARMS, given.seeds):
            kept, losses[arm, seed] = train(arm, given, seed, Path(folder) / f"{arm} {seed}")
            runs[arm].append(kept)
            print(arm, kept, flush=True)
    worst = max(apart(*(losses[arm, seed] for arm in ARMS)) for seed in range(given.seeds))
    whole, halved = ([run["best"]["eval_loss"] for run in runs[arm]] for arm in ARMS)
    found = described("halving", given.device) | {
        "threads": torch.get_num_threads(),
        "arms": runs,
        "losses differ, relative": worst,
        "time ratio": round(
            median(run["seconds"] for run in runs["halving"])
            / median(run["seconds"] for run in runs["to the end"]),
            3,
        ),
        "time bound": TIME_BOUND,
        "worse than the best of all": max(a - b for a, b in zip(halved, whole, strict=True)),
        "the best of all differ between seeds by": max(whole) - min(whole),
    }
    table = Table("arm", "seed", "seconds", "steps", "jobs to the end", "best", "its eval_loss")
    for arm, each in runs.items():
        for run in each:
            best = run["best"]
            table.add_row(
                arm, str(run["seed"]), f"{run['seconds']:.1f}", str(run["steps"]),
                str(run["jobs to the end"]), best["job"], f"{best['eval_loss']:.4f}",
            )  # fmt: skip
    console().print(table, {name: found[name] for name in list(found)[-5:]})
    write(given.out / f"halving-{found['date']}.json", found)


if __name__ == "__main__":
    main()
