"""What a token of a sampled completion costs: `python -m benchmarks.sampling`.

    python -m benchmarks.sampling                                              # on a GPU
    python -m benchmarks.sampling --device cpu --layers 2 --hidden 64          # tries the code

Milliseconds of one token of all completions that grow together, prompts not counted: the time of
many tokens less that of few. `read` is what reading the base's weights once takes, by the bandwidth
of a copy in the same run. Before an arm is timed its log-probabilities, and those that the trainer
computes of the whole sequences, are compared with those of the same model in float32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import seconds_of
from benchmarks.results_file import console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.adapters.files import base_tensors

#: By name: jobs, modules that they adapt, completions in all.
ARMS: dict[str, tuple[int, Any, int]] = {
    "1 job, 1 completion": (1, "all-linear", 1),
    "1 job, 64 completions": (1, "all-linear", 64),
    "8 jobs, 64 completions": (8, "all-linear", 64),
    "almost the base alone, 1 completion": (1, r".*layers\.0\.self_attn\.q_proj", 1),
    "almost the base alone, 64 completions": (1, r".*layers\.0\.self_attn\.q_proj", 64),
}
FEW = 4
#: A sampler's log-probabilities may be so many times as far from those in float32 as the trainer's.
BOUND = 1.5


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    shape, out = shape_of(given), console()
    found = described("sampling", given.device) | {"layers": given.layers, "arms": {}}
    weights: dict[str, Tensor] = {}
    chosen = [*ARMS.items()] if given.only is None else [[*ARMS.items()][n] for n in given.only]
    for name, arm in chosen:
        with tempfile.TemporaryDirectory(prefix="sampling-") as folder:
            figures = measured(shape, arm, given, Path(folder), weights)
        gc.collect()
        found["arms"][name] = figures
        out.print(name, figures, highlight=False)
        write(given.out / f"sampling{'-compiled' * given.compiled}-{found['date']}.json", found)


def measured(
    shape: Shape, arm: tuple[int, Any, int], given: argparse.Namespace, folder: Path,
    weights: dict[str, Tensor],
) -> dict[str, float]:  # fmt: skip
    """The figures of one arm; `weights` is filled by the first."""
    jobs, targets, completions = arm
    step = _step(shape, jobs, targets, folder, weights, given.device, compiled=given.compiled)
    sampler = tlora_fx.Sampler(step)
    share = completions // jobs
    ids = torch.randint(0, shape.vocabulary, (jobs, share, given.prompt)).tolist()
    prompts = {member.job.name: ids[at] for at, member in enumerate(step.members.values())}

    def seconds(tokens: int) -> float:
        return seconds_of(
            lambda: sampler.sample(prompts, max_new_tokens=tokens, stop=(), seed=SEED)
        )

    wide = _step(replace(shape, dtype="float32"), jobs, targets, folder, weights, given.device)
    ours, trainers = _errors(step, sampler, prompts, wide)
    del wide
    gc.collect()
    if ours > BOUND * trainers + 1e-5:
        raise SystemExit(f"log-probabilities are {ours} off, the trainer's {trainers}")
    seconds(FEW)
    times = [
        1e3 * (seconds(FEW + given.tokens) - seconds(FEW)) / given.tokens
        for _ in range(given.repeats)
    ]
    token = statistics.median(times)
    size = sum(each.numel() * each.element_size() for each in weights.values())
    read = 1e3 * size / _bandwidth(given.device)
    figures = {"ms_a_token": token, "least": min(times), "most": max(times), "read_ms": read}
    figures |= {"tokens_a_second": 1e3 * completions / token}
    figures |= {"error": ours, "error_of_trainer": trainers}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _step(
    shape: Shape, jobs: int, targets: Any, folder: Path, weights: dict[str, Tensor], device: str,
    *, compiled: bool = False,
) -> tlora_fx.GroupStep:  # fmt: skip
    """Jobs on the weights, which the first call draws."""
    model = tlora_fx.compile(jobs_of(shape, folder / shape.dtype, jobs, targets))
    weights |= {} if weights else dict(base_tensors(model.backbone, torch.device(device)))
    return disturbed_step(model, weights, device, compiled=compiled)


def disturbed_step(
    model: SuperModel, weights: Mapping[str, Tensor], device: str, *, compiled: bool
) -> tlora_fx.GroupStep:
    """A step that is ready; adapters are random, the same each time."""
    model.materialize(weights, device)
    options = tlora_fx.StepOptions(compiled=compiled)
    step = tlora_fx.GroupStep(model, device=device, options=options)
    step.prepare(probe=lambda _: None)
    torch.manual_seed(SEED)
    for member in step.members.values():
        for parameter in member.parameters.values():
            parameter.data.normal_(std=0.01)
    return step


def _errors(
    step: tlora_fx.GroupStep, sampler: tlora_fx.Sampler, prompts: dict[str, list[list[int]]],
    wide: tlora_fx.GroupStep,
) -> tuple[float, float]:  # fmt: skip
    """Mean absolute errors of log-probabilities: the sampler's and the trainer's."""
    drawn = sampler.sample(prompts, max_new_tokens=32, stop=(), seed=SEED)
    samples = {name: [[each.to_sample(0.0) for [each] in of]] for name, of in drawn.items()}
    exact, trainers = (
        torch.stack([each.cpu() for of in group.score(samples).values() for each in of])
        for group in (wide, step)
    )
    mine = torch.tensor([each.logprobs for of in drawn.values() for [each] in of])
    return (mine - exact).abs().mean().item(), (trainers - exact).abs().mean().item()


def _bandwidth(device: str) -> float:
    """Bytes a second that are read, by a copy."""
    source = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.numel() / seconds


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion that are timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", help="arms by number, from 0")
    parser.add_argument("--compiled", action="store_true", help="layers by torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
