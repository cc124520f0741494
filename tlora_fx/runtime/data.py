"""The samples of a job, and which of them each of its optimizer steps takes.

What a step takes depends on the job alone: on its data, its seed, and the number of the step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from tlora_fx.config.job import Job
from tlora_fx.errors import ChatTemplateError, EmptyDataError, NoTargetsError
from tlora_fx.runtime.columns import find_layout
from tlora_fx.runtime.encode import BadRowError, Encoded, Encoder, PrefixError, template_of
from tlora_fx.runtime.rows import BadRows, Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence.

    input_ids  token ids
    labels     the same length, not shifted: the token's id, or -100 where it is not trained
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


class SampleTable(Sequence[Sample]):
    """Many samples in eight bytes a token; a sample is built when it is read."""

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        """Make a table of `samples`."""
        self._ids = array("i")
        self._labels = array("i")
        self._ends = array("q")
        for sample in samples:
            self.append(sample.input_ids, sample.labels)

    def append(self, ids: Sequence[int], labels: Sequence[int]) -> None:
        """Add a sample of equally many ids and labels."""
        assert len(ids) == len(labels)
        self._ids.extend(ids)
        self._labels.extend(labels)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        """One sample, or a list of them."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = self._ends[at - 1] if at else 0, self._ends[at]
        return Sample(tuple(self._ids[start:end]), tuple(self._labels[start:end]))

    @property
    def tokens(self) -> int:
        """How many tokens all samples have."""
        return len(self._ids)


@dataclass(slots=True)
class DataReport:
    """What became of the rows of a job's data.

    rows                    rows of the data, bad ones too
    bad_rows                skipped because they could not be read
    first_bad_rows          place and reason of the first few
    truncated               samples cut to `max_length`
    dropped_without_target  samples with nothing to train on, after truncation
    prefix_mismatches       samples whose prompt is tokenised otherwise before its completion
    samples, tokens         what is left
    target_tokens           tokens that are trained in one epoch
    notes                   other things that a user should know
    """

    rows: int = 0
    bad_rows: int = 0
    first_bad_rows: tuple[str, ...] = ()
    truncated: int = 0
    dropped_without_target: int = 0
    prefix_mismatches: int = 0
    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report as text: what is left, then each thing that was changed or left out."""
        lines = [f"{self.samples} samples, {self.tokens} tokens, {self.target_tokens} trained"]
        for count, what in (
            (self.bad_rows, "bad rows skipped"),
            (self.truncated, "samples truncated to max_length"),
            (self.dropped_without_target, "samples dropped: nothing to train on"),
            (self.prefix_mismatches, "prompts tokenised otherwise before their completion"),
        ):
            if count:
                lines.append(f"{count} of {self.rows} {what}")
        return [*lines, *(f"bad row {row}" for row in self.first_bad_rows), *self.notes]


@dataclass(frozen=True)
class JobData:
    """The samples of a job and their order.

    samples  in the order of the data
    report   what became of the rows
    """

    job: Job
    samples: Sequence[Sample]
    report: DataReport

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which each sample is taken once; the last may be smaller."""
        micro_batches = math.ceil(len(self.samples) / self.job.per_device_train_batch_size)
        return math.ceil(micro_batches / self.job.gradient_accumulation_steps)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the job."""
        if self.job.max_steps is not None:
            return self.job.max_steps
        return math.ceil((self.job.num_train_epochs or 1.0) * self.steps_per_epoch)

    def step(self, step: int) -> list[list[Sample]]:
        """The micro-batches of optimizer step `step`, from 0.

        Any step may be asked for, in any order: after an epoch the next begins, with an order of
        its own where the job shuffles. As in transformers' Trainer, the last step of an epoch may
        have fewer micro-batches, and its last micro-batch fewer samples; none is empty.
        """
        if step < 0:
            raise IndexError(f"step {step} of a job")
        epoch, at = divmod(step, self.steps_per_epoch)
        batch = self.job.per_device_train_batch_size
        taken = batch * self.job.gradient_accumulation_steps
        indices = self._order(epoch)[at * taken : (at + 1) * taken].tolist()
        return [
            [self.samples[index] for index in indices[start : start + batch]]
            for start in range(0, len(indices), batch)
        ]

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            # Two neighbouring epochs are all that training and a look ahead read.
            for old in list(self._orders)[:-1]:
                self._orders.pop(old, None)
            order = self._orders[epoch] = sample_order(len(self.samples), self.job, epoch)
        return order

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}


def sample_order(count: int, job: Job, epoch: int) -> np.ndarray:
    """The indices of `count` samples in the order that `job` takes them in `epoch`, from 0."""
    if not job.shuffle:
        return np.arange(count)
    return np.random.default_rng((job.seed, epoch)).permutation(count)


def load_job_data(job: Job, tokenizer: PreTrainedTokenizerBase) -> JobData:
    """Read, tokenise and truncate the data of a job.

    raises  DataError, one of its classes for each mistake
    """
    report, table = DataReport(), SampleTable()
    bad = BadRows(job.name, job.data.skip_bad_rows)
    for encoded in _encoded(job, tokenizer, report, bad):
        _keep(encoded, job, report, table)
    report.bad_rows, report.first_bad_rows = bad.count, bad.first
    report.samples, report.tokens = len(table), table.tokens
    if tokenizer.eos_token_id is None:
        report.notes = ("the tokenizer has no end-of-sequence token: samples end without one",)
    if report.rows == bad.count:
        what = "all rows of the data are bad" if bad.count else "the data has no rows"
        found = "\n".join(bad.first) or None
        raise EmptyDataError(what, path=job.data.path, job=job.name, found=found)
    if not table:
        raise NoTargetsError(
            f"none of {report.rows} samples has a token to train on",
            path=job.data.path,
            job=job.name,
            max_length=job.max_length,
            found=f"{report.truncated} samples are longer than max_length",
            help="give completions, raise max_length, or set loss_on: all",
        )
    return JobData(job, table, report)


def _encoded(
    job: Job, tokenizer: PreTrainedTokenizerBase, report: DataReport, bad: BadRows
) -> Iterator[Encoded]:
    encoder: Encoder | None = None
    for row in read_rows(job.data, job.name):
        report.rows += 1
        if row.fields is None:
            bad.add(row.where, row.reason)
            continue
        encoder = encoder or _encoder(job, tokenizer, row)
        try:
            yield encoder.encode(row.fields)
        except BadRowError as error:
            if isinstance(error, PrefixError) and not bad.skip:
                raise ChatTemplateError(
                    "the chat template does not show which tokens the assistant wrote",
                    file=row.where,
                    job=job.name,
                    found=error,
                    help="use a template with {% generation %}, or set loss_on: all",
                ) from None
            bad.add(row.where, str(error))


def _encoder(job: Job, tokenizer: PreTrainedTokenizerBase, row: Row) -> Encoder:
    layout = find_layout(job.data, row.fields or (), where=row.where, job=job.name)
    if layout.format == "messages" and not template_of(tokenizer):
        help = "name a chat model's tokenizer under base, or give prompt and completion columns"
        raise ChatTemplateError("the tokenizer has no chat template", job=job.name, help=help)
    return Encoder(tokenizer, layout)


def _keep(encoded: Encoded, job: Job, report: DataReport, table: SampleTable) -> None:
    report.prefix_mismatches += encoded.prefix_differs
    report.truncated += len(encoded.ids) > job.max_length
    ids = encoded.ids[: job.max_length]
    targets = encoded.targets[: job.max_length]
    # The first token has no token before it that could predict it.
    trained = sum(targets[1:])
    if not trained:
        report.dropped_without_target += 1
        return
    report.target_tokens += trained
    labels = [token if on else NO_TARGET for token, on in zip(ids, targets, strict=True)]
    table.append(ids, labels)
