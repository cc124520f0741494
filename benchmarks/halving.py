"""A sweep with successive halving against all of its jobs to the end.

    python -m benchmarks.halving --device cpu --threads 2
    python -m benchmarks.halving --dtype bfloat16 --trl               # on a GPU

27 configurations (three learning rates, ranks and batch sizes) train on the quickstart's base with
random weights, once to the end and once with `tlora_fx.sweep(..., halving=...)`, in turns, for each
seed. Seconds are of whole calls. What is right is compared: losses of each job that ended early are
those of the same job to the end, as far as they go. The bound on the result: the best job that
halving leaves is the best of all, or is worse by no more than the best of all differ between seeds.

With --trl, TRL's trainer and PEFT train the configurations one after the other too, for the first
seed, with their imports done. Each one's first loss, which no adapter has changed yet, is compared
with ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
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
GRID: dict[str, list[Any]] = {
    "learning_rate": [3e-4, 3e-3, 3e-2],
    "lora.r": [2, 8, 32],
    "per_device_train_batch_size": [2, 4, 8],
}
STEPS = 81
#: What halving keeps, and the parts of all steps after which it first does.
FACTOR, FIRST_CUT = 3, 9
ARMS = ("to the end", "halving")
#: Of losses of the two arms, relative: rows are shared with others there.
LOSS_BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
#: Of the first loss beside TRL's, relative.
FIRST_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
MAX_LENGTH = 256
#: Seconds of halving over those of all jobs to the end.
TIME_BOUND = 0.45


def prepare(given: argparse.Namespace, folder: Path) -> None:
    """Write the base with random weights, and the data in two parts: every fifth row is judged."""
    import transformers

    base = folder / "base"
    shutil.copytree(QUICKSTART / "base", base)
    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.from_pretrained(base)
    factory: Any = transformers.AutoModelForCausalLM
    factory.from_config(config, dtype=getattr(torch, given.dtype)).save_pretrained(base)
    lines = given.data.read_text().splitlines(keepends=True)
    for name, wanted in (("train", True), ("eval", False)):
        rows = [line for at, line in enumerate(lines) if (at % 5 > 0) is wanted]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    given.folder = folder


def job(given: argparse.Namespace, seed: int) -> tlora_fx.Job:
    """The job that is swept."""
    return tlora_fx.Job(
        "sweep",
        base=tlora_fx.BaseSpec(model=str(given.folder / "base"), dtype=given.dtype),
        lora={"r": 8, "target_modules": "all-linear"},
        data=str(given.folder / "train.jsonl"),
        eval_data=str(given.folder / "eval.jsonl"),
        eval_steps=given.steps,
        max_length=MAX_LENGTH,
        max_steps=given.steps,
        shuffle=False,
        seed=seed,
    )


def by_trl(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All configurations one after the other by TRL: seconds, and what each came to."""
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = {
        name: Dataset.from_list(
            [json.loads(line) for line in (given.folder / f"{name}.jsonl").open()]
        )
        for name in ("train", "eval")
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.folder / "base")
    half, firsts, lasts = given.dtype == "bfloat16", [], []
    begun = time.perf_counter()
    for rate, rank, batch in itertools.product(*GRID.values()):
        factory: Any = transformers.AutoModelForCausalLM
        model = factory.from_pretrained(given.folder / "base", dtype=getattr(torch, given.dtype))
        options = SFTConfig(
            output_dir=str(given.folder / "trl"), learning_rate=rate, seed=seed, bf16=half,
            per_device_train_batch_size=batch, per_device_eval_batch_size=8, max_steps=given.steps,
            max_length=MAX_LENGTH, gradient_checkpointing=False, logging_first_step=True,
            logging_steps=given.steps, save_strategy="no", report_to="none", disable_tqdm=True,
            train_sampling_strategy="sequential",
            use_cpu=given.device == "cpu",
        )  # fmt: skip
        lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            model=model, args=options, train_dataset=rows["train"], eval_dataset=rows["eval"],
            processing_class=tokenizer, peft_config=lora,
        )  # fmt: skip
        trainer.train()
        lasts.append(trainer.evaluate()["eval_loss"])
        firsts.append(next(each["loss"] for each in trainer.state.log_history if "loss" in each))
    seconds = round(time.perf_counter() - begun, 2)
    return {"seed": seed, "seconds": seconds, "first losses": firsts, "eval losses": lasts}


def train(
    arm: str, given: argparse.Namespace, seed: int, output: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One sweep: what is kept of it, and each job's losses."""
    halving = {"min_steps": given.steps // FIRST_CUT, "factor": FACTOR}
    begun = time.perf_counter()
    results = tlora_fx.sweep(
        job(given, seed), GRID, halving=halving if arm == "halving" else None,
        output=output, device=given.device, verbose=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    finished = {
        name: each.evaluations[-1]["eval_loss"]
        for name, each in results.items()
        if each.steps == given.steps
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
    """The largest relative difference of losses that both arms have."""
    return max(
        abs(mine - other) / abs(other)
        for name, losses in halved.items()
        for mine, other in zip(losses, whole[name], strict=False)
    )


def _table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """A line for each sweep, by arm."""
    table = Table("arm", "seed", "seconds", "steps", "jobs to the end", "best", "its eval_loss")
    for arm, each in runs.items():
        for run in each:
            best = run["best"]
            table.add_row(
                arm, str(run["seed"]), f"{run['seconds']:.1f}", str(run["steps"]),
                str(run["jobs to the end"]), best["job"], f"{best['eval_loss']:.4f}",
            )  # fmt: skip
    return table


def main() -> None:
    """Train both arms for each seed, compare, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a job to the end")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "word-problems.jsonl")
    parser.add_argument("--dtype", choices=LOSS_BOUNDS, default="float32")
    parser.add_argument("--trl", action="store_true", help="beside TRL, one after the other")
    given = parser.parse_args()
    # TRL's trainer would spread each job over all GPUs that it sees.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if given.threads:
        torch.set_num_threads(given.threads)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    theirs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="halving-") as folder:
        prepare(given, Path(folder))
        train("halving", given, 0, Path(folder) / "first")  # fills the caches
        losses: dict[tuple[str, int], dict[str, Any]] = {}
        for seed, arm in turns(ARMS, given.seeds):
            kept, losses[arm, seed] = train(arm, given, seed, Path(folder) / f"{arm} {seed}")
            runs[arm].append(kept)
            print(arm, kept, flush=True)
        if given.trl:
            theirs = by_trl(given, 0)
            print("trl", theirs, flush=True)
    worst = max(apart(*(losses[arm, seed] for arm in ARMS)) for seed in range(given.seeds))
    whole, halved = ([run["best"]["eval_loss"] for run in runs[arm]] for arm in ARMS)
    seconds = {arm: median(run["seconds"] for run in runs[arm]) for arm in ARMS}
    found = described("halving", given.device) | {
        "threads": torch.get_num_threads(),
        "dtype": given.dtype,
        "steps": given.steps,
        "arms": runs,
        "losses differ, relative": worst,
        "time ratio": round(seconds["halving"] / seconds["to the end"], 3),
        "time bound": TIME_BOUND,
        "worse than the best of all": max(a - b for a, b in zip(halved, whole, strict=True)),
        "the best of all differ between seeds by": max(whole) - min(whole),
    }
    wrong = worst > LOSS_BOUNDS[given.dtype]
    if theirs:
        ours = losses["to the end", 0]
        firsts = [ours[name][0] for name in ours]
        apart_first = max(
            abs(a - b) / b for a, b in zip(firsts, theirs["first losses"], strict=True)
        )
        found["trl"] = theirs | {"first losses differ, relative": apart_first}
        found["trl over ours"] = {arm: round(theirs["seconds"] / seconds[arm], 2) for arm in ARMS}
        wrong |= apart_first > FIRST_BOUNDS[given.dtype]
    shown = (name for name in found if name not in ("arms", "trl", "hardware", "versions"))
    console().print(_table(runs), {name: found[name] for name in shown})
    write(given.out / f"halving-{given.device}-{found['date']}.json", found)
    if wrong:
        raise SystemExit("losses of the arms differ beyond the bounds")


if __name__ == "__main__":
    main()
