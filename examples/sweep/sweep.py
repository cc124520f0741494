"""A sweep: ranks x learning rates x seeds on one base, each stopped once it learns no more.

    python examples/sweep/sweep.py -o runs/sweep
    python examples/sweep/sweep.py -o runs/sweep --data gsm8k/train.jsonl

The jobs train in shared rows, eight at a time. When one stops, the next that waits takes its rows
of the running model: nothing is traced or compiled for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import tlora_fx

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
DATA = QUICKSTART / "data" / "word-problems.jsonl"
RANKS = (2, 8)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (1, 2, 3)
STEPS = 200
#: Slots and rows of the model; as more jobs come than have room, both double once.
SLOTS = tlora_fx.OpenSlots(rows=32, jobs=4, rank=8, dropout=False)


def sweep_jobs(data: Path = DATA, *, stop_early: bool = True) -> list[tlora_fx.Job]:
    """The jobs of the sweep.

    data         JSON lines with prompt and completion, or question and answer as GSM8K has them
    stop_early   once two evaluations in a row are not better by 0.05; else all go to the end
    """
    base = tlora_fx.BaseSpec(config=QUICKSTART / "base", dtype="float32", seed=0)
    with data.open(encoding="utf-8") as lines:
        is_gsm8k = '"question"' in next(lines)
    columns = {"prompt": "question", "completion": "answer"} if is_gsm8k else None
    stops: dict[str, Any] = {"early_stopping_patience": 2, "early_stopping_threshold": 0.05}
    return [
        tlora_fx.Job(
            name=f"r{rank}-lr{rate:g}-s{seed}",
            base=base,
            lora={"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"},
            data={"path": data, "columns": columns} if columns else {"path": data},
            max_length=48,
            per_device_train_batch_size=1,
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            save_steps=STEPS,
            seed=seed,
            eval_split=8 / 200 if not is_gsm8k else 8 / 7473,
            eval_steps=10,
            **(stops if stop_early else {}),
        )
        for seed, rate, rank in product(SEEDS, RATES, RANKS)
    ]


def train(
    jobs: Sequence[tlora_fx.Job],
    output: Path | str,
    *,
    device: str | None = None,
    callback: tlora_fx.TrainerCallback | None = None,
) -> list[Any]:
    """Train jobs, the later ones as rows become free; returns their runs."""
    first = jobs[: SLOTS.jobs]
    model = tlora_fx.compile(first, open=SLOTS)
    trainer = tlora_fx.Trainer(model, first, output=output, device=device, callback=callback)
    for job in jobs[SLOTS.jobs :]:
        trainer.admit(job)
    return trainer.run()


class Lines(tlora_fx.TrainerCallback):
    """Says who comes and who ends."""

    def joined(self, run: Any) -> None:
        """It has a slot and rows now."""
        print(f"{run.job.name} joins", flush=True)

    def ended(self, run: Any) -> None:
        """Its rows are free."""
        print(f"{run.job.name} {run.status} at step {run.step} {run.reason}", flush=True)

    def warned(self, text: str) -> None:
        """Something went wrong that stops nobody."""
        print(text, flush=True)


def main() -> None:
    """Train the sweep and say which job was best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", required=True, help="folder for adapters and metrics")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--to-the-end", action="store_true", help="stop none early")
    given = parser.parse_args()
    jobs = sweep_jobs(given.data, stop_early=not given.to_the_end)
    runs = train(jobs, given.output, callback=Lines())
    best = min(runs, key=lambda run: run.evaluation.best_value)
    print(f"best: {best.job.name}, {best.evaluation.best_value:.4f}")


if __name__ == "__main__":
    main()
