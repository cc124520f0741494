"""Two jobs learn three tasks one after another, by SD-LoRA and by LoRA: what is forgotten.

    pip install ./examples/sd_lora
    python examples/sd_lora/sequence.py -o runs/sequence

The tasks are the quickstart's data sets; each job has its own order. In each task four jobs train
in one Shared Super-Model: both streams by SD-LoRA, and both by one LoRA adapter that goes on.
After each task every adapter is loaded by PEFT and measured on rows of all tasks so far that
nobody trained on. No task is named then, and no row of an earlier task is seen again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tlora_fx_sd_lora.tasks import next_task
from torch import nn

import tlora_fx
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.data.samples import Sample

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
STREAMS = {
    "desk": ("word-problems", "records", "small-talk"),
    "hall": ("small-talk", "word-problems", "records"),
}
METHODS = ("sd-lora", "lora")
HELD_OUT, STEPS, RATE, RANK, LENGTH = 20, 30, 1e-2, 4, 32


def main() -> None:
    """Train both streams by both methods, and print the losses on all tasks so far."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each task")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are too small to share
    losses = train(given.output, given.steps)
    for (stream, method), rows in losses.items():
        print("\n".join(table(f"{stream}, {method}", STREAMS[stream], rows)), end="\n\n")


def train(output: Path, steps: int = STEPS) -> dict[tuple[str, str], list[list[float]]]:
    """By stream and method: the base's losses, and after each task those on the tasks so far."""
    base = small_base(output / "base")
    plain = plain_base(load_backbone(base))
    files = {task: split(output / "data", task) for task in STREAMS["desk"]}
    held = {task: held_out(base, measuring) for task, (_, measuring) in files.items()}
    losses = {
        (stream, method): [measured(plain, None, [held[task] for task in tasks])]
        for stream, tasks in STREAMS.items()
        for method in METHODS
    }
    for index in range(len(files)):
        folder = output / f"task-{index + 1}"
        before = output / f"task-{index}" if index else None
        jobs = [job_of(base, *who, files, index, before, steps) for who in losses]
        tlora_fx.Trainer(tlora_fx.compile(jobs), output=folder).run()
        for (stream, method), rows in losses.items():
            seen = [held[task] for task in STREAMS[stream][: index + 1]]
            rows.append(measured(plain, folder / f"{stream}-{method}", seen))
    return losses


def small_base(folder: Path) -> tlora_fx.BaseSpec:
    """The quickstart's base with half of its layers and half of their width."""
    half = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 16, "num_hidden_layers": 2}
    config = json.loads((QUICKSTART / "base" / "config.json").read_text("utf-8")) | half
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = str(QUICKSTART / "base")
    return tlora_fx.BaseSpec(config=folder, tokenizer=tokenizer, dtype="float32", seed=0)


def split(folder: Path, task: str) -> tuple[Path, Path]:
    """Two files of one of the quickstart's: to train on, and to measure."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (QUICKSTART / "data" / f"{task}.jsonl").read_text("utf-8").splitlines(keepends=True)
    train, held = folder / f"{task}.jsonl", folder / f"{task}-held-out.jsonl"
    train.write_text("".join(lines[:-HELD_OUT]), "utf-8")
    held.write_text("".join(lines[-HELD_OUT:]), "utf-8")
    return train, held


def job_of(
    base: tlora_fx.BaseSpec,
    stream: str,
    method: str,
    files: Mapping[str, tuple[Path, Path]],
    index: int,
    before: Path | None,
    steps: int,
) -> tlora_fx.Job:
    """A stream in one of its tasks, which goes on from the folder of the task before."""
    name = f"{stream}-{method}"
    kind: dict[str, Any] = {"peft_type": "SDLORA"} if method == "sd-lora" else {"lora_alpha": RANK}
    source: dict[str, Any] = {"lora": {"r": RANK, "target_modules": "all-linear", **kind}}
    if before is not None:
        source = {"adapter": before / name}
    if before is not None and method == "sd-lora":
        source = {"adapter": next_task(before / name, before / f"{name}-next", seed=index)}
    return tlora_fx.Job(
        name=name,
        base=base,
        data={"path": files[STREAMS[stream][index]][0]},
        max_length=LENGTH,
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=steps,
        learning_rate=RATE,
        seed=index,
        **source,
    )


def held_out(base: tlora_fx.BaseSpec, file: Path) -> Sequence[Sample]:
    """The samples of a file, as a job would read them."""
    job = tlora_fx.Job(name="held-out", base=base, lora={}, data={"path": file}, max_length=LENGTH)
    return load_all_data([job])[job.name].samples


@torch.no_grad()
def measured(
    base: nn.Module, adapter: Path | None, tasks: Sequence[Sequence[Sample]]
) -> list[float]:
    """The mean loss on each task's samples, by the base with an adapter as PEFT loads it."""
    from peft import PeftModel

    model: Any = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    model.eval()
    losses = []
    for samples in tasks:
        total = torch.zeros(())
        targets = 0
        for sample in samples:
            logits = model(torch.tensor([sample.input_ids])).logits[0, :-1]
            labels = torch.tensor(sample.labels[1:])
            total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels != -100).sum())
        losses.append(float(total) / targets)
    if adapter is not None:
        model.unload()
    return losses


def table(title: str, tasks: Sequence[str], rows: Sequence[Sequence[float]]) -> list[str]:
    """A stream's losses: a line for the base and after each task, a column for each task."""
    names = ["the base", *(f"after {task}" for task in tasks)]
    lines = [f"{title:<24}" + "".join(f"{task:>15}" for task in tasks)]
    lines += [
        f"{name:<24}" + "".join(f"{loss:>15.3f}" for loss in row)
        for name, row in zip(names, rows, strict=True)
    ]
    last, learned = rows[-1], [row[-1] for row in rows[1:]]
    forgotten = [last[index] - learned[index] for index in range(len(tasks) - 1)]
    return [*lines, f"{'forgotten':<24}" + "".join(f"{loss:>+15.3f}" for loss in forgotten)]


if __name__ == "__main__":
    main()
