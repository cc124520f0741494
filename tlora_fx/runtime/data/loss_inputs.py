"""Numbers that samples have for their tokens beside ids and labels, for losses that read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from tlora_fx.config.functions import UserFunction, callable_of
from tlora_fx.config.job import Job
from tlora_fx.config.losses import FIELDS, MAX_LOGPROB, NEEDS, reads_logprobs
from tlora_fx.errors import StepMisuse
from tlora_fx.runtime.data.tables import NO_TARGET, Sample


def target_places(sample: Sample, shift: int) -> list[int]:
    """Where a sample's labels stand that are targets.

    shift   how far before its label a prediction stands
    """
    labels = sample.labels
    return [at for at in range(shift, len(labels)) if labels[at] != NO_TARGET]


def loss_of(job: Job) -> str | Callable[..., Any] | None:
    """A job's loss that reads more of samples than tokens: its name, or the function.

    raises    JobError where its function is not at hand
    """
    loss = job.named_loss
    return callable_of(loss, "loss", job.name) if isinstance(loss, UserFunction) else loss


def require_numbers(job: Job, loss: str | Callable[..., Any], samples: Sequence[Sample]) -> None:
    """Refuse samples that do not say what a loss reads; raises StepMisuse."""
    for number, sample in enumerate(samples):
        for name, found in _wrong_numbers(loss, sample):
            raise StepMisuse(
                f"{name} of sample {number} do not fit the loss",
                job=job.name,
                expected=f"{len(sample.labels)} finite numbers, one for each label",
                found=found,
            )
        if reads_logprobs(loss) and sample.logprobs is not None:
            _require_log_probabilities(job, number, sample)


def _require_log_probabilities(job: Job, number: int, sample: Sample) -> None:
    """Refuse a log-probability above 0 of a target token; raises StepMisuse."""
    assert sample.logprobs is not None
    for at in target_places(sample, 0):
        if sample.logprobs[at] > MAX_LOGPROB:
            raise StepMisuse(
                f"logprobs of sample {number} are no log-probabilities",
                job=job.name,
                expected="at most 0, for each label that is a token",
                found=f"{sample.logprobs[at]:g} at {at}",
                help="give the logarithm, not the probability, or its negative",
            )


def _wrong_numbers(loss: Any, sample: Sample) -> Iterator[tuple[str, str]]:
    """What of a sample's numbers is missing or does not fit a loss, by name, and how."""
    needed = NEEDS[loss] if isinstance(loss, str) else ()
    fields = ((name, getattr(sample, name)) for name in FIELDS)
    for name, given in chain(fields, sample.inputs.items()):
        if given is None:
            if name in needed:
                yield name, "none"
        elif len(given) != len(sample.labels):
            yield name, str(len(given))
        elif not all(map(math.isfinite, given)):
            yield name, str(next(value for value in given if not math.isfinite(value)))


def numbers_of_targets(sample: Sample, shift: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Numbers of a sample's target tokens; weights are 1 where it has none."""
    places = target_places(sample, shift)
    weights = (1.0,) * len(sample.labels) if sample.weights is None else sample.weights
    numbers = {name: getattr(sample, name) for name in FIELDS[1:]} | dict(sample.inputs)
    said = {"weights": weights} | {name: numbers[name] for name in names}
    return {name: [of[at] for at in places] for name, of in said.items() if of is not None}
