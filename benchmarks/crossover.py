"""What sharing gains by tokens a job and number of jobs: `python -m benchmarks.crossover`.

    python -m benchmarks.crossover                                                 # on a GPU
    python -m benchmarks.crossover --device cpu --layers 2 --hidden 64 --jobs 1 2 --lengths 16 32
    python -m benchmarks.crossover --draw RESULT.json docs/assets/crossover.svg

A cell is a whole round of the trainer: data, rows, forward, backward, norms, update, metrics. Its
gain is how much longer the same jobs take one after another, each in rounds of its own (on a GPU
CUDA graphs, as those of a group are). Before a cell is timed, the gradients of its first job are
compared with those that the job has alone, run eagerly.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import Spread, seconds_of
from benchmarks.results_file import console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.launching.interrupts import Interrupts
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

JOBS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (64, 160, 320, 640, 1280, 2048)
MANY = 1_000_000
WARM_UP = 4
#: Of the norm of a job's gradients, in the group against alone and eager.
BOUND = {"cpu": 1e-4, "cuda": 5e-2}

Figures = dict[str, Any]


def main() -> None:
    """Measure and write, or draw what was measured."""
    given = _arguments()
    if given.draw:
        source, target = given.draw
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(chart(json.loads(source.read_text("utf-8"))), "utf-8")
        return
    found = described("crossover", given.device) | {"layers": given.layers, "ms": {}}
    path = given.out / f"crossover-{found['date']}.json"
    with tempfile.TemporaryDirectory(prefix="crossover-") as folder:
        measure(shape_of(given), given, Path(folder), found, path)
    show(found)


def measure(
    shape: Shape, given: argparse.Namespace, folder: Path, found: Figures, path: Path
) -> None:
    """Fill `found["ms"]`, by jobs and then by tokens a job; written after each cell."""
    weights: dict[str, Tensor] = {}
    alone: dict[int, list[Tensor]] = {}
    for count in sorted({1, *given.jobs}):
        fields = {"max_steps": MANY, "save_steps": MANY, "per_device_train_batch_size": 1}
        jobs = [job.model_copy(update=fields) for job in jobs_of(shape, folder / "base", count)]
        model = tlora_fx.compile(jobs)
        weights = weights or dict(base_tensors(load_backbone(jobs[0].base), given.device))
        model.materialize(weights, given.device)
        for length in given.lengths:
            if count * length > given.max_tokens:
                continue
            trainer = _trainer(model, jobs, length, shape, given, folder / f"{count}-{length}")
            if length not in alone:
                with torch.compiler.set_stance("force_eager"):
                    alone[length] = _gradients(trainer)
            _require_alike(_gradients(trainer), alone[length], BOUND[given.device])
            found["ms"].setdefault(str(count), {})[str(length)] = _timed(trainer, given)
            trainer._let_go()
            del trainer
            gc.collect()
            write(path, found)
        del model
        if given.device == "cuda":
            torch.cuda.empty_cache()


def _trainer(
    model: Any, jobs: Sequence[Any], length: int, shape: Shape, given: argparse.Namespace,
    folder: Path,
) -> Trainer:  # fmt: skip
    data = {}
    for place, job in enumerate(jobs):
        generator = torch.Generator().manual_seed(SEED + place)
        drawn = torch.randint(0, shape.vocabulary, (2, length), generator=generator)
        samples = [Sample(tuple(ids), tuple(ids)) for ids in drawn.tolist()]
        data[job.name] = JobData(job, samples, DataReport())
    trainer = Trainer(
        model, output=folder, device=given.device, data=data,
        options=TrainerOptions(compiled=given.device == "cuda"),
    )  # fmt: skip
    trainer.prepare(data)
    return trainer


def _gradients(trainer: Trainer) -> list[Tensor]:
    """Of the first job, of one round that trains nothing."""
    rows = {place: [[run.data.samples[0]]] for place, run in enumerate(trainer.runs)}
    trainer.gradients(rows)
    found = [p.grad.clone() for p in trainer.runs[0].parameters.values() if p.grad is not None]
    for run in trainer.runs:
        run.optimizer.zero_grad()
    return found


def _require_alike(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    apart = sum(
        float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True)
    )
    whole = sum(float(b.double().square().sum()) for b in expected)
    if not whole or (apart / whole) ** 0.5 > bound:
        raise RuntimeError(f"gradients of a job are off by {apart**0.5:g} of {whole**0.5:g}")


def _timed(trainer: Trainer, given: argparse.Namespace) -> Figures:
    with Interrupts() as interrupts:
        for _ in range(WARM_UP):
            trainer._round(interrupts)
        times = [
            1e3 * seconds_of(lambda: trainer._round(interrupts), given.rounds)
            for _ in range(given.repeats)
        ]
        trainer._end.collect()
    return Spread.of(times).json()


def gains(found: Figures) -> dict[int, dict[int, float]]:
    """By jobs and tokens a job, the time of all jobs one after another over that of their round."""
    alone = {length: one["median"] for length, one in found["ms"]["1"].items()}
    return {
        int(count): {
            int(length): int(count) * alone[length] / one["median"]
            for length, one in row.items()
            if length in alone
        }
        for count, row in found["ms"].items()
    }


def show(found: Figures) -> None:
    """A line for each number of jobs."""
    cells = gains(found)
    lengths = sorted({length for row in cells.values() for length in row})
    table = Table("jobs", *(f"{length} tokens" for length in lengths), box=None)
    for count, row in sorted(cells.items()):
        table.add_row(str(count), *(f"{row[n]:.2f}" if n in row else "" for n in lengths))
    console().print(table)


CELL, LEFT, TOP = (84, 30), 64, 78


def chart(found: Figures) -> str:
    """A cell for each size, the darker the more sharing gains, as SVG."""
    cells = gains(found)
    lengths = sorted({length for row in cells.values() for length in row})
    where = found["hardware"].get("gpu", "a CPU")
    width, height = max(LEFT + CELL[0] * len(lengths) + 16, 520), TOP + CELL[1] * len(cells) + 16
    parts = [
        _text(
            16, 22, f"Jobs one after another over the same jobs in one round; {where}", bold=True
        ),
        _text(16, 42, "tokens a job and step"),
        _text(16, 68, "jobs"),
    ]
    parts += [
        _text(LEFT + CELL[0] * (x + 0.5), 68, f"{length:,}", anchor="middle")
        for x, length in enumerate(lengths)
    ]
    for y, (count, row) in enumerate(sorted(cells.items())):
        top = TOP + CELL[1] * y
        parts.append(_text(LEFT - 14, top + 20, str(count), anchor="end"))
        for x, length in enumerate(lengths):
            if length in row:
                parts += _cell(LEFT + CELL[0] * x, top, row[length])
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2328">'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>\n"]
    )


def _cell(x: float, y: float, gain: float) -> list[str]:
    """White at 1 and below, full colour from 4."""
    strength = min(max(gain - 1, 0) / 3, 1)
    ink = "#ffffff" if strength > 0.55 else "#1f2328"
    size = f'width="{CELL[0] - 2}" height="{CELL[1] - 2}"'
    paint = f'fill="#1f6feb" fill-opacity="{strength:.2f}" stroke="#d0d7de"'
    return [
        f'<rect x="{x}" y="{y}" {size} {paint}/>',
        _text(x + CELL[0] / 2, y + 19, f"{gain:.2f}", anchor="middle", ink=ink),
    ]


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, ink: str = ""
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    fill = f' fill="{ink}"' if ink else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}{fill}>{escape(words)}</text>'


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--jobs", type=int, nargs="*", default=list(JOBS))
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a round that is timed")
    parser.add_argument("--rounds", type=int, default=6, help="rounds that are timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
