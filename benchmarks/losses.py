"""Jobs with other losses beside cross entropy, on an 8B shape: `python -m benchmarks.losses`.

    python -m benchmarks.losses                                             # on a GPU
    python -m benchmarks.losses --device cpu --layers 2 --hidden 64         # tries the code

Steps of a loop of one's own (`GroupStep.accumulate` and `apply`) of eight jobs with --sequences
sequences of --tokens tokens each, all arms in turns:

cross entropy   all eight
mixed           four of them, two with ppo and two with a function, which reads whole sequences
nine            the eight with cross entropy, and a ninth of four sequences
preferences     the eight, and a ninth of the same sequences as two pairs of DPO

`preferences` also runs the pairs' sequences through the base alone. What these cost is the half of
what they add to `nine`, for a backward takes as long as a forward where the base is frozen; so its
ratio is that over nine + (nine - cross entropy) / 2.

Before an arm is timed, its gradients by CUDA graphs are compared with those of rows that are
launched.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import Spread, ratios, seconds_of, turns
from benchmarks.results_file import console, described, write
from benchmarks.sampling import disturbed_step
from benchmarks.step_mixes import SEED, Shape
from tlora_fx import Batch, Sample
from tlora_fx.runtime.adapters.files import base_tensors

JOBS, OTHERS = 8, ("ppo", "ppo", "function", "function")
PAIRS = 2
#: Rows of a size before its graph is replayed, with some to spare.
WARM_UP = 4
#: How far gradients of replayed rows may be from those of launched ones, by norm.
BOUND = 0.02

Batches = Mapping[str, Batch | list[list[Sample]]]


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    found = described("losses", given.device) | {"layers": given.layers, "tokens": given.tokens}
    with tempfile.TemporaryDirectory(prefix="losses-") as folder:
        step = _step(shape_of(given), given, Path(folder))
        arms = arms_of(shape_of(given).vocabulary, given.sequences, given.tokens)
        found["gradients"] = {name: require_gradients(step, arm) for name, arm in arms.items()}
        times = interleaved(step, arms, given)
    ours = step.graphs
    found |= {
        "rows": None if ours is None else [ours.rows_run, ours.rows_replayed, ours.captured],
        "ms": {name: Spread.of(each).json() for name, each in times.items()},
        "ratios": {name: of.json() for name, of in ratios_of(times).items()},
    }
    out = console()
    for name in ("gradients", "rows", "ms", "ratios"):
        out.print(name, found[name], highlight=False)
    write(given.out / f"losses-{given.sequences}x{given.tokens}-{found['date']}.json", found)


def ratios_of(times: Mapping[str, list[float]]) -> dict[str, Spread]:
    """What the losses cost, round by round."""
    plain, nine = times["cross entropy"], times["nine"]
    fair = [more + (more - less) / 2 for less, more in zip(plain, nine, strict=True)]
    return {
        "mixed over cross entropy": ratios(times["mixed"], plain),
        "preferences over their own tokens": ratios(times["preferences"], fair),
    }


def arms_of(vocabulary: int, sequences: int, tokens: int) -> dict[str, Batches]:
    """The batches of each arm, by job."""
    torch.manual_seed(SEED)

    def samples(count: int) -> list[Sample]:
        ids = torch.randint(0, vocabulary, (count, tokens)).tolist()
        chances = (-torch.rand(count, tokens) - 8).tolist()
        worth = torch.randn(count, tokens).tolist()
        return [
            Sample(tuple(own), (-100, *own[1:]), None, tuple(old), tuple(gain))
            for own, old, gain in zip(ids, chances, worth, strict=True)
        ]

    eight = [samples(sequences) for _ in range(JOBS)]
    ninth = [Sample(each.input_ids, each.labels) for each in samples(2 * PAIRS)]
    plain: dict[str, Any] = {
        f"job-{place}": Batch([of], loss="cross_entropy") for place, of in enumerate(eight)
    }
    mixed = dict(plain)
    for place, loss in enumerate(OTHERS, JOBS - len(OTHERS)):
        own = worth_of_sequences if loss == "function" else loss
        mixed[f"job-{place}"] = Batch([eight[place]], loss=own)
    prompt = tokens // 2
    pairs = [
        Sample(each.input_ids, (-100,) * prompt + each.input_ids[prompt:]) for each in ninth
    ]  # fmt: skip
    return {
        "cross entropy": plain,
        "mixed": mixed,
        "nine": plain | {f"job-{JOBS}": Batch([ninth], loss="cross_entropy")},
        "preferences": plain | {f"job-{JOBS + 1}": Batch([pairs])},
    }


def worth_of_sequences(
    logprobs: list[Tensor], given: list[Mapping[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that mixes the tokens of a sequence, and the sequences of a micro-batch."""
    means = torch.stack([own.mean() for own in logprobs])
    gains = torch.stack([of["advantages"].mean() for of in given])
    shares = torch.softmax(means, 0)
    return -(shares * gains).sum() - means.sum(), {"mean": means.mean()}


def require_gradients(step: tlora_fx.GroupStep, batches: Batches) -> float:
    """Compare the gradients of a replayed row with those of a launched one; their distance."""

    def gradients(times: int) -> Tensor:
        for _ in range(times):
            for name in batches:
                step.member(name).optimizer.zero_grad()
            for name, output in step.accumulate(batches).items():
                if output.error is not None:
                    raise SystemExit(f"{name}: {output.error}")
        owned = [step.member(name).optimizer.trained.values() for name in batches]
        every = [
            each.grad.flatten().double() for own in owned for each in own if each.grad is not None
        ]
        step.apply({name: {"lr": 0.0} for name in batches})
        return torch.cat(every)

    replayed = gradients(WARM_UP)
    if step.graphs is None:
        return 0.0
    with mock.patch.object(step.graphs, "most", 0):
        launched = gradients(1)
    distance = ((replayed - launched).norm() / launched.norm()).item()
    if not distance <= BOUND:
        raise SystemExit(f"gradients of replayed rows are {distance} off")
    return float(f"{distance:.2g}")


def interleaved(
    step: tlora_fx.GroupStep, arms: Mapping[str, Batches], given: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of a step of each arm, one figure a round."""
    times: dict[str, list[float]] = {name: [] for name in arms}

    def train(name: str) -> None:
        step.accumulate(arms[name])
        step.apply({job: {} for job in arms[name]})

    for number, name in turns(arms, given.rounds + 1):
        seconds = seconds_of(partial(train, name), given.repeats)
        if number:  # The first round only warms up.
            times[name].append(1e3 * seconds)
    return times


def _step(shape: Shape, given: argparse.Namespace, folder: Path) -> tlora_fx.GroupStep:
    """Ten jobs, the last of which learns from pairs; their adapters are random."""
    jobs = jobs_of(shape, folder, JOBS + 2)
    steps = {"max_steps": 10_000, "learning_rate": 1e-6}
    jobs = [job.model_copy(update=steps) for job in jobs]
    jobs[-1] = jobs[-1].model_copy(update={"method": "dpo"})
    model = tlora_fx.compile(jobs)
    weights = base_tensors(model.backbone, torch.device(given.device))
    return disturbed_step(model, weights, given.device, compiled=given.compiled)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--sequences", type=int, default=1, help="of a job in a step")
    parser.add_argument("--tokens", type=int, default=160, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="steps of an arm in a round")
    parser.add_argument("--compiled", action="store_true", help="layers by torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
