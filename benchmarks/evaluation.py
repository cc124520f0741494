"""Evaluate eight jobs: in rows that they share, one after the other, and each by plain PEFT.

    python -m benchmarks.evaluation                       # on a GPU, a base of Llama-3.2-1B's shape
    python -m benchmarks.evaluation --layers 32 --hidden 4096 --intermediate 14336    # Llama-3-8B's
    python -m benchmarks.evaluation --device cpu --layers 2 --hidden 64 --vocabulary 512

`fused`   the trainer's evaluation of all jobs, whose batches share rows
`alone`   the same evaluation, one job after the other
`peft`    transformers with each adapter by PEFT, one job after the other, in padded batches

All arms read the same samples of 120 to 200 tokens, in batches of the same size, from the same
weights in memory. First each job's loss by `alone` and by `peft` is compared with `fused`; where
one is further away than the bound, nothing is timed. Then arms take turns, odd rounds backwards.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import tlora_fx
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import Spread, ratios
from benchmarks.results_file import RESULTS, console, described, write
from benchmarks.rounds import data_of
from benchmarks.step_mixes import Shape
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.generation import AdapterGenerator, AdapterWeights, resident_base
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

FUSED, ALONE, PEFT = "fused", "alone", "peft"
#: Of the largest relative difference of a job's loss, by dtype.
BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}
NOT_TARGET = -100

Losses = list[float]


def main() -> None:
    """Compare, measure, print and write."""
    given = _arguments()
    names = ("layers", "hidden", "jobs", "samples", "batch", "rounds", "warm_up")
    found = described("evaluation", given.device) | {name: getattr(given, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        arms = arms_of(shape_of(given), given, Path(folder))
        found["loss"] = compared(arms, BOUNDS[shape_of(given).dtype])
        found["arms"] = measured(arms, given)
    write(Path(given.out) / f"evaluation-{found['date']}.json", found)
    show(found)


def shape_of(given: argparse.Namespace) -> Shape:
    """The base's shape, in float32 on a CPU."""
    hidden = given.hidden
    return Shape(
        layers=given.layers, hidden=hidden, vocabulary=given.vocabulary,
        intermediate=given.intermediate or hidden * 4,
        heads=max(2, hidden // (128 if hidden >= 4096 else 64)),
        key_value_heads=max(2, min(8, hidden // 256)),
        dtype="float32" if given.device == "cpu" else "bfloat16",
    )  # fmt: skip


def arms_of(
    shape: Shape, given: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], Losses]]:
    """What evaluates all jobs once, by arm; each returns their losses."""
    jobs = [_evaluated(job, given.batch) for job in jobs_of(shape, folder / "base", given.jobs)]
    drawn = data_of(jobs, shape.vocabulary, given.samples)
    data = {
        job.name: JobData(job, drawn[job.name].samples, DataReport(), drawn[job.name].samples)
        for job in jobs
    }
    trainer = Trainer(
        tlora_fx.compile(jobs), output=folder / "run", device=given.device, data=data,
        options=TrainerOptions(compiled=given.compile, max_row_tokens=given.max_row_tokens),
    )  # fmt: skip
    trainer.prepare(data)
    evaluator = trainer.measurements.evaluator
    assert evaluator is not None
    places = dict(enumerate(data.values()))

    def fused() -> Losses:
        return [each["eval_loss"] for each in evaluator.measure(places).values()]

    def alone() -> Losses:
        apart = (evaluator.measure({place: each}) for place, each in places.items())
        return [next(iter(each.values()))["eval_loss"] for each in apart]

    peft = _peft(trainer)
    return {
        FUSED: fused,
        ALONE: alone,
        PEFT: lambda: [peft(place, each.evaluation, given.batch) for place, each in places.items()],
    }


def _evaluated(job: Job, batch: int) -> Job:
    """The job with data to evaluate, and an adapter that does something before any step."""
    fields = {
        "eval_data": DataSpec(path="-"), "eval_strategy": "epoch", "save_steps": 1_000_000,
        "per_device_eval_batch_size": batch,
        "lora": {**job.lora_fields, "init_lora_weights": False},
    }  # fmt: skip
    return job.model_copy(update=fields)


def _peft(trainer: Trainer) -> Callable[[int, Sequence[Sample], int], float]:
    """A job's mean loss by transformers and PEFT, over the weights that the trainer holds."""
    adapters = {
        run.job.name: AdapterWeights(run.job.lora_config(), adapter_tensors(run.parameters))
        for run in trainer.runs
    }
    names = tuple(adapters)
    generator = AdapterGenerator(resident_base(trainer.model), None, adapters)  # type: ignore[arg-type]
    model: Any = generator._adapted_by(names)

    def loss(place: int, samples: Sequence[Sample], batch: int) -> float:
        model.set_adapter(str(place))
        total, count = torch.zeros((), dtype=torch.float64, device=trainer.device), 0
        for start in range(0, len(samples), batch):
            ids, labels, attended = _padded(samples[start : start + batch], trainer.device)
            targets = int((labels[:, 1:] != NOT_TARGET).sum())
            with torch.no_grad():
                out = model(input_ids=ids, attention_mask=attended, labels=labels, use_cache=False)
            total += out.loss.double() * targets
            count += targets
        return float(total) / count

    return loss


def _padded(samples: Sequence[Sample], device: torch.device) -> tuple[torch.Tensor, ...]:
    width = max(len(sample.input_ids) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    labels, attended = torch.full_like(ids, NOT_TARGET), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        ids[row, :length] = torch.tensor(sample.input_ids)
        labels[row, :length] = torch.tensor(sample.labels)
        attended[row, :length] = 1
    return ids.to(device), labels.to(device), attended.to(device)


def compared(arms: Mapping[str, Callable[[], Losses]], bound: float) -> dict[str, Any]:
    """The largest relative difference of a job's loss from `fused`, by arm.

    raises   RuntimeError beyond the bound
    """
    losses = {name: arm() for name, arm in arms.items()}
    apart = {
        name: max(abs(a - b) / abs(b) for a, b in zip(own, losses[FUSED], strict=True))
        for name, own in losses.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    if not apart[worst] <= bound:
        raise RuntimeError(f"losses of '{worst}' are {apart[worst]:.2e} apart: {losses}")
    return {"bound": bound, "apart": apart, "losses": losses[FUSED]}


def measured(arms: Mapping[str, Callable[[], Losses]], given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each arm, and how many times as long as `fused` it takes."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(given.warm_up + given.rounds):
        for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
            ms = _timed(arms[name])
            if number >= given.warm_up:
                times[name].append(ms)
    return {
        name: {"ms": Spread.of(own).json(), "over fused": ratios(own, times[FUSED]).json()}
        for name, own in times.items()
    }


def _timed(arm: Callable[[], Losses]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    arm()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def show(found: Mapping[str, Any]) -> None:
    """A table of the arms."""
    table = Table("arm", "ms", "times fused", "loss apart", box=None)
    for name, arm in found["arms"].items():
        ms, over = arm["ms"], arm["over fused"]
        table.add_row(
            name, f"{ms['median']:.1f} ({ms['least']:.1f} to {ms['most']:.1f})",
            f"{over['median']:.2f} ({over['least']:.2f} to {over['most']:.2f})",
            f"{found['loss']['apart'][name]:.1e}",
        )  # fmt: skip
    console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, help="by default four times --hidden")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="of each job")
    parser.add_argument("--batch", type=int, default=8, help="per_device_eval_batch_size")
    parser.add_argument("--max-row-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7, help="that count")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before")
    parser.add_argument("--compile", action="store_true", help="our layers are compiled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default=str(RESULTS), help="folder for the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
