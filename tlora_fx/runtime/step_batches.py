"""Batches of a loop of one's own: samples, their loss, and what comes of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.config.losses import LOSSES
from tlora_fx.errors import StepMisuse
from tlora_fx.model.batch import IGNORED
from tlora_fx.model.objectives import Objective, OwnLoss, Scores
from tlora_fx.runtime.data.batching import MicroBatches, objective_by
from tlora_fx.runtime.data.loss_inputs import loss_of, require_numbers, target_places
from tlora_fx.runtime.data.samples import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch that one job learns from in one call of `GroupStep.accumulate`.

    micro_batches   lists of samples; a micro-batch stays whole in one row
    normalizer      the sum of the token losses is divided by it; None: as `reduction` says
    loss            None: cross entropy without log-probabilities, or that of the job's own fields;
                    else a name of `losses.LOSSES`, or a
                    function of the log-probabilities of one micro-batch's sequences, a list of
                    tensors [n], and of what their samples say, a list of dicts of tensors [n]. It
                    returns a sum of losses, [], or that and a dict of numbers
    loss_options    numbers that a loss with a name takes, as in `losses.LOSSES`
    reduction       "mean": the sum is divided by the number of the batch's own targets, or of its
                    pairs where the job compares pairs; "sum": by 1
    """

    micro_batches: MicroBatches
    normalizer: float | None = None
    loss: str | OwnLoss | None = None
    loss_options: Mapping[str, float] = field(default_factory=dict)
    reduction: Literal["mean", "sum"] = "mean"

    def of(self, job: Job) -> Batch:
        """The same with the job's loss, where it names none; raises JobError."""
        if self.loss is not None or self.loss_options or job.named_loss is None:
            return self
        return replace(self, loss=loss_of(job), loss_options=job.loss_options)

    def divisor(self, terms: int) -> float:
        """Divisor of the sum of the losses, of a batch of so many terms."""
        if self.normalizer is not None:
            return self.normalizer
        return 1.0 if self.reduction == "sum" else float(terms)

    def objectives(self, scores: Scores, shift: int) -> list[Objective]:
        """The loss of each micro-batch, of a batch that `require_batch` has let pass.

        scores   get what is found
        shift    how far before its label a prediction stands
        """
        assert self.loss is not None
        return [
            objective_by(self.loss, self.loss_options, samples, shift, scores)
            for samples in self.micro_batches
        ]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one batch of one job.

    loss       sum of token losses over the batch's normalizer; NaN where the batch failed
    tokens     of the batch
    terms      its target tokens, or pairs, or samples of kto
    error      why it failed: the job's gradients are then what they were before the call
    logprobs   of each sample the log-probabilities of its target tokens, [n] each, on the model's
               device; None where the batch names no loss, or failed
    metrics    of each micro-batch the numbers that a function as loss returned
    """

    loss: float
    tokens: int
    terms: int
    error: Exception | None = None
    logprobs: tuple[Tensor, ...] | None = None
    metrics: tuple[Mapping[str, float], ...] = ()


def logprobs_of(scores: Scores, batch: MicroBatches, shift: int) -> tuple[Tensor, ...]:
    """The log-probabilities of each sample's target tokens."""
    every = [scores.logprobs[first] for first in sorted(scores.logprobs)]
    counts = (
        [len(target_places(sample, shift)) for sample in samples] for samples in batch if samples
    )
    pieces = (torch.split(own, of) for own, of in zip(every, counts, strict=True))
    return tuple(piece for own in pieces for piece in own)


def require_batch(job: Job, batch: Batch, vocabulary: int, *, alone: bool) -> None:
    """Refuse a batch from which nothing can be learnt, or which the base cannot read.

    vocabulary   token ids of the base are below it
    alone        whether one process runs each row whole
    raises       StepMisuse
    """
    samples = _samples_of(job, batch)
    if not samples:
        raise StepMisuse("a batch has no sample, or one without tokens", job=job.name)
    for number, sample in enumerate(samples):
        _require_tokens(job, number, sample, vocabulary)
    if job.method == "reward":
        _require_scored(job, batch)
    normalizer = batch.normalizer
    if normalizer is not None and not (math.isfinite(normalizer) and normalizer > 0):
        raise StepMisuse(
            "a batch's loss cannot be divided by this",
            job=job.name,
            expected="a normalizer above 0",
            found=normalizer,
        )
    if batch.reduction not in ("mean", "sum"):
        raise StepMisuse(
            "there is no such reduction", job=job.name, expected="mean, sum", found=batch.reduction
        )
    if batch.loss is not None:
        _require_loss(job, batch, samples, alone=alone)
    elif any(sample.is_scored for sample in samples):
        raise StepMisuse(
            "samples say what the batch's loss does not read",
            job=job.name,
            found="weights, logprobs, advantages or inputs",
            help="name the loss, such as Batch(..., loss='cross_entropy'), which reads weights",
        )
    elif batch.loss_options:
        raise StepMisuse(
            "options are of a loss with a name",
            job=job.name,
            found=", ".join(batch.loss_options),
            help="name the loss in Batch(loss=...)",
        )


def _samples_of(job: Job, batch: Batch) -> list[Sample]:
    """All samples of a batch; raises StepMisuse where it is no list of lists of samples."""
    micro_batches = batch.micro_batches
    flat = isinstance(micro_batches, Sample)
    if flat or any(isinstance(of, Sample) for of in _listed(job, micro_batches)):
        raise _no_batch(job, "a sample that is in no micro-batch")
    samples: list[Sample] = []
    for item in (item for micro in micro_batches for item in _listed(job, micro)):
        if not isinstance(item, Sample):
            raise _no_batch(job, f"{type(item).__name__} in place of a sample")
        samples.append(item)
    return samples


def _listed(job: Job, items: object) -> Collection[object]:
    if isinstance(items, Collection) and not isinstance(items, (str, Mapping)):
        return items
    raise _no_batch(job, f"{type(items).__name__} in place of a list")


def _no_batch(job: Job, found: str) -> StepMisuse:
    return StepMisuse(
        "a batch is a list of micro-batches, and a micro-batch is a list of samples",
        job=job.name,
        found=found,
        help="write [[Sample(input_ids=..., labels=...), ...]] for one micro-batch",
    )


def _require_tokens(job: Job, number: int, sample: Sample, vocabulary: int) -> None:
    """Refuse ids and labels that a GPU would read beyond its tables, or would round."""
    ids, labels = sample.input_ids, sample.labels
    for name, of in (("input_ids", ids), ("labels", labels)):
        wrong = [kind.__name__ for kind in set(map(type, of)) if not issubclass(kind, Integral)]
        if wrong or not isinstance(of, Sequence):
            raise StepMisuse(
                f"{name} of sample {number} are no list of whole numbers",
                job=job.name,
                found=f"{type(of).__name__} of {wrong[0]}" if wrong else type(of).__name__,
                help="of a tensor or an array, give .tolist()",
            )
    if not ids:
        raise StepMisuse("a batch has no sample, or one without tokens", job=job.name)
    if len(labels) != len(ids):
        raise StepMisuse(
            f"labels of sample {number} do not fit its input_ids",
            job=job.name,
            expected=f"{len(ids)} labels, one for each token, not shifted",
            found=len(labels),
            help="-100 is the label of a token that is not trained",
        )
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocabulary:
        raise StepMisuse(
            "a batch has a token that the base does not know",
            job=job.name,
            expected=f"token ids from 0, below {vocabulary}",
            found=lowest if lowest < 0 else highest,
        )
    if job.method == "reward" or job.label_shift == 0:
        # A label is then no token: a margin, or what a classifier is to answer.
        return
    for label in set(labels) - {IGNORED}:
        if not 0 <= label < vocabulary:
            raise StepMisuse(
                "a batch has a label that is no token of the base",
                job=job.name,
                expected=f"token ids from 0, below {vocabulary}, or {IGNORED}",
                found=label,
            )


def _require_loss(job: Job, batch: Batch, samples: Sequence[Sample], *, alone: bool) -> None:
    loss = batch.loss
    if job.is_preference or job.label_shift == 0:
        what = f"method: {job.method}" if job.is_preference else "classes of sequences"
        raise StepMisuse(
            "the job has a loss already",
            job=job.name,
            found=what,
            help="leave out `loss`, or train this batch by a job with method: sft",
        )
    if not alone:
        raise StepMisuse(
            "losses with a name run where one process runs each row whole",
            job=job.name,
            found="a plan of several processes, or of nano-batches",
            help="leave out `loss` for plain cross entropy, or use the plan 'single'",
        )
    if isinstance(loss, str) and loss not in LOSSES:
        raise StepMisuse(
            "there is no such loss",
            job=job.name,
            expected=", ".join(LOSSES),
            found=loss,
            help="name one of these, or give a function",
        )
    if not isinstance(loss, str) and not callable(loss):
        raise StepMisuse("a loss is a name, or a function", job=job.name, found=type(loss).__name__)
    known = LOSSES[loss] if isinstance(loss, str) else {}
    for name, value in batch.loss_options.items():
        if name not in known or not math.isfinite(value):
            raise StepMisuse(
                f"the loss {loss if isinstance(loss, str) else 'function'} takes no such option",
                job=job.name,
                expected=", ".join(known) or "no options",
                found=f"{name}={value}",
            )
    if loss == "kto":
        _require_judged(job, samples)
    require_numbers(job, loss, samples)


def _require_scored(job: Job, batch: Batch) -> None:
    """Refuse what is no pairs of a chosen and a rejected sequence, each read at one token."""
    for number, micro in enumerate(batch.micro_batches):
        counts = [len(target_places(sample, job.label_shift)) for sample in micro]
        if len(counts) % 2 or counts != [1] * len(counts):
            raise StepMisuse(
                f"micro-batch {number} is no pairs of which each sequence is read at one token",
                job=job.name,
                expected="chosen and rejected samples in turn, with one label that is not -100",
                found=f"{counts} labels",
            )


def _require_judged(job: Job, samples: Sequence[Sample]) -> None:
    """Refuse what kto cannot compare: samples without a judgement, a base that is not at hand."""
    require_base_beside(job)
    for number, sample in enumerate(samples):
        if sample.desirable is None or not target_places(sample, job.label_shift):
            raise StepMisuse(
                f"sample {number} does not fit the loss kto",
                job=job.name,
                expected="Sample(..., desirable=True or False), with a target",
                found=f"desirable={sample.desirable}",
            )


def require_base_beside(job: Job) -> None:
    """Refuse to ask the base of a job that trains more than A and B; raises StepMisuse."""
    if not (job.has_adapter_reference or job.trains_matrices_alone):
        raise StepMisuse(
            "the base alone is not at hand beside this job's adapter",
            job=job.name,
            expected="LoRA without DoRA, biases and trained modules",
            help="score it in a step of another job",
        )
