"""The samples of a job, and which of them each of its optimizer steps takes.

What a step takes depends on the job alone: on its data, its seed, and the number of the step.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from tlora_fx.config.base_task import pools_first
from tlora_fx.config.job import Job
from tlora_fx.errors import ChatTemplateError, EmptyDataError, MalformedRowError, NoTargetsError
from tlora_fx.runtime.data.chats import UnlocatedTurnError, template_of
from tlora_fx.runtime.data.conversations import BadRowError
from tlora_fx.runtime.data.encoding import Labelled, TextEncoder
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows, SampleLayout
from tlora_fx.runtime.data.rendered import Encoded
from tlora_fx.runtime.data.rows import evaluated, read_rows

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

    def digest(self) -> str:
        """The SHA-256 of all samples in their order, 32 hexadecimal digits of it."""
        digest = hashlib.sha256(len(self).to_bytes(8, "little"))
        for numbers in (self._ends, self._ids, self._labels):
            digest.update(numbers)
        return digest.hexdigest()[:32]


@dataclass(slots=True)
class DataReport:
    """What became of the rows of a job's data.

    rows                    rows of the data, bad ones too
    bad_rows                skipped because they could not be read
    first_bad_rows          place and reason of the first few
    truncated               samples cut to `max_length`
    dropped_without_target  samples with nothing to train on, after truncation
    prefix_mismatches       samples whose prompt is tokenised otherwise before its completion
    samples, tokens         what is left; a pair is one sample
    target_tokens           tokens that are trained in one epoch
    layout                  what the rows were read as
    notes                   other things that a user should know
    format                  of its rows, as of `SampleLayout`; empty where none was read
    unread                  columns of the rows that are not read
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
    layout: str = ""
    notes: tuple[str, ...] = ()
    format: str = ""
    unread: tuple[str, ...] = ()

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
        lines += [self.layout] if self.layout else []
        lines += [f"columns that are not read: {', '.join(self.unread)}"] if self.unread else []
        return [*lines, *(f"bad row {row}" for row in self.first_bad_rows), *self.notes]

    def add_bad_row(self, job: Job, where: str, reason: str) -> None:
        """Count a bad row; raises MalformedRowError unless the job skips bad rows."""
        if not job.data.skip_bad_rows:
            help = "mend the row, or set skip_bad_rows: true in the job's data"
            what = "a row of the data cannot be used"
            raise MalformedRowError(what, file=where, job=job.name, found=reason, help=help)
        self.bad_rows += 1
        if len(self.first_bad_rows) < 5:
            self.first_bad_rows = (*self.first_bad_rows, f"{where}: {reason}")


@dataclass(frozen=True)
class JobData:
    """The samples of a job and their order.

    samples     in the order of the data; of preferences each chosen one before its rejected one
    report      what became of the rows
    evaluation  what the job is evaluated on, in the order of the data
    tokenizer   that made the samples, where they were read; an adapter's folder gets it
    units       what a batch counts as one, by indices of samples: pairs, or what is packed into one
                sequence; None: each sample is one
    """

    job: Job
    samples: Sequence[Sample]
    report: DataReport
    evaluation: Sequence[Sample] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    units: Sequence[Sequence[int]] | None = None

    @cached_property
    def count(self) -> int:
        """How many samples a batch can count: pairs and packed sequences are one."""
        return len(self.samples) if self.units is None else len(self.units)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of what a batch counts as one."""
        lengths = [len(sample.input_ids) for sample in self.samples]
        if self.units is None:
            return lengths
        return [sum(lengths[index] for index in unit) for unit in self.units]

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which each sample is taken once; the last may be smaller."""
        micro_batches = math.ceil(self.count / self.job.per_device_train_batch_size)
        return math.ceil(micro_batches / self.job.gradient_accumulation_steps)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the job."""
        if self.job.max_steps is not None:
            return self.job.max_steps
        return math.ceil((self.job.num_train_epochs or 1.0) * self.steps_per_epoch)

    @cached_property
    def digest(self) -> str:
        """Equal for equal samples in equal order."""
        samples = self.samples
        return (samples if isinstance(samples, SampleTable) else SampleTable(samples)).digest()

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
            [sample for index in indices[start : start + batch] for sample in self.unit(index)]
            for start in range(0, len(indices), batch)
        ]

    def unit(self, index: int) -> list[Sample]:
        """The samples that a batch counts as its sample `index`."""
        if self.units is None:
            return [self.samples[index]]
        return [self.samples[at] for at in self.units[index]]

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            # Two neighbouring epochs are all that training and a look ahead read.
            for old in list(self._orders)[:-1]:
                self._orders.pop(old, None)
            order = self._orders[epoch] = sample_order(self.count, self.job, epoch)
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
    """Read, tokenise and truncate the data of a job, and what it is evaluated on.

    raises  DataError, one of its classes for each mistake
    """
    samples: Sequence[Sample]
    evaluation: Sequence[Sample] = ()
    limit = samples_of_steps(job) if job.data.streaming else None
    samples, report = _samples(job, tokenizer, limit)
    notes: list[str] = []
    if isinstance(job.eval_split, float):
        samples, evaluation = held_out(samples, job)
        each = job.sequences_per_sample
        report.samples, report.tokens = len(samples) // each, _tokens(samples)
        report.target_tokens = _targets(samples, job)
        tokens = f"{_tokens(evaluation)} tokens, {_targets(evaluation, job)} counted"
        notes.append(f"evaluation: {len(evaluation) // each} samples held out, {tokens}")
    elif (spec := evaluated(job)) is not None:
        evaluation, found = _samples(job.model_copy(update={"data": spec}), tokenizer)
        notes += [f"evaluation: {line}" for line in found.lines()]
    units = units_of(job, samples)
    if job.packing and units is not None:
        filled = report.tokens / (len(units) * job.max_length)
        notes.append(f"packed into {len(units)} sequences of max_length, {filled:.0%} full")
    count = len(samples) // job.sequences_per_sample if units is None else len(units)
    if count < job.per_device_train_batch_size:
        size = f"per_device_train_batch_size {job.per_device_train_batch_size}"
        notes.append(f"{size} is more than there are: each step takes all {count} samples")
    if tokenizer.eos_token_id is None and not job.base.is_classifier:
        notes.append("the tokenizer has no end-of-sequence token: samples end without one")
    report.notes = tuple(notes)
    return JobData(job, samples, report, evaluation, tokenizer, units)


def samples_of_steps(job: Job) -> int | None:
    """How many samples all steps of a job take; None where epochs are counted."""
    if job.max_steps is None:
        return None
    return job.max_steps * job.gradient_accumulation_steps * job.per_device_train_batch_size


def units_of(job: Job, samples: Sequence[Sample]) -> Sequence[Sequence[int]] | None:
    """What batches of a job count as one sample, by indices of samples; None: each sample."""
    if job.is_preference:
        return [(2 * pair, 2 * pair + 1) for pair in range(len(samples) // 2)]
    if not job.packing:
        return None
    return packed([len(sample.input_ids) for sample in samples], job.max_length)


def packed(lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Which samples share a sequence, each whole: best fit, the longest first.

    source   TRL's packing strategy "bfd", over the whole data
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of a bin, and its index
    for index in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        at = bisect_left(room, (lengths[index], -1))
        left, number = room.pop(at) if at < len(room) else (length, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(room, (left - lengths[index], number))
    return [tuple(sorted(own)) for own in bins]


def held_out(samples: Sequence[Sample], job: Job) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The samples that are trained, and the part that is kept for evaluation, in their order.

    Which ones depends on the job's seed and on how many there are; their number is rounded up.

    raises  EmptyDataError when none is left to train on
    """
    size = 2 if job.is_preference else 1
    total = len(samples) // size
    count = math.ceil(job.eval_split * total)
    if count >= total:
        raise EmptyDataError(
            "holding out samples for evaluation leaves none to train on",
            path=job.data.path,
            job=job.name,
            found=f"{total} samples, eval_split: {job.eval_split}",
            help="give more samples, or a file of its own under eval_data",
        )
    drawn = np.random.default_rng((job.seed, _HELD_OUT)).permutation(total)
    held = set(drawn[:count].tolist())
    parts: tuple[SampleTable, SampleTable] = SampleTable(), SampleTable()
    for index, sample in enumerate(samples):
        parts[index // size in held].append(sample.input_ids, sample.labels)
    return parts


# No epoch has this number.
_HELD_OUT = 2**32 - 1


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def _targets(samples: Sequence[Sample], job: Job) -> int:
    shift = job.label_shift
    return sum(label != NO_TARGET for sample in samples for label in sample.labels[shift:])


def _samples(
    job: Job, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> tuple[SampleTable, DataReport]:
    """The samples of the data that a job's `data` names, at least one.

    limit   rows are read until there are so many
    """
    report, table = DataReport(), SampleTable()
    size = 2 if job.is_preference else 1
    position = _label_position(job) if job.base.is_classifier else None
    rows = LaidOutRows(job, read_rows(job.data, job.name), min(WINDOW, limit or WINDOW))
    for encoded in _encoded(job, tokenizer, rows, report):
        if isinstance(encoded, Labelled):
            _keep_labelled(encoded, position, report, table)
        else:
            _keep(encoded, job, report, table)
        if limit is not None and len(table) >= limit * size:
            break
    report.samples, report.tokens = len(table) // size, table.tokens
    report.unread = tuple(rows.unread)
    if report.rows == report.bad_rows:
        what = "all rows of the data are bad" if report.rows else "the data has no rows"
        found = "\n".join(report.first_bad_rows) or None
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
    return table, report


def _encoded(
    job: Job, tokenizer: PreTrainedTokenizerBase, rows: LaidOutRows, report: DataReport
) -> Iterator[tuple[Encoded, ...] | Labelled]:
    """What becomes of each row: a sample, the two of a pair, or a sample that has a label."""
    encoder: TextEncoder | None = None
    for row in rows:
        report.rows += 1
        if row.fields is None:
            report.add_bad_row(job, row.where, row.reason)
            continue
        if encoder is None:
            assert rows.layout is not None
            encoder = _encoder(job, tokenizer, rows.layout)
            report.layout = encoder.layout.line()
            report.format = encoder.layout.format
        try:
            if job.base.is_classifier:
                yield encoder.encode_label(row.fields, job.base, job.max_length)
            elif job.is_preference:
                yield encoder.encode_pair(row.fields)
            else:
                yield (encoder.encode(row.fields),)
        except BadRowError as error:
            if isinstance(error, UnlocatedTurnError) and not job.data.skip_bad_rows:
                raise ChatTemplateError(
                    "the chat template does not show which tokens the assistant wrote",
                    file=row.where,
                    job=job.name,
                    found=error,
                    help="use a template with {% generation %}, or set loss_on: all",
                ) from None
            report.add_bad_row(job, row.where, str(error))


def _encoder(job: Job, tokenizer: PreTrainedTokenizerBase, layout: SampleLayout) -> TextEncoder:
    if layout.needs_template and not template_of(tokenizer):
        help = "name a chat model's tokenizer under base, or give prompt and completion columns"
        raise ChatTemplateError("the tokenizer has no chat template", job=job.name, help=help)
    return TextEncoder(tokenizer, layout)


def _keep(encoded: Sequence[Encoded], job: Job, report: DataReport, table: SampleTable) -> None:
    """Add a row's samples to the table, all of them or none."""
    report.prefix_mismatches += any(each.prefix_differs for each in encoded)
    report.truncated += any(len(each.ids) > job.max_length for each in encoded)
    # The first token has no token before it that could predict it.
    trained = [sum(each.targets[1 : job.max_length]) for each in encoded]
    if not all(trained):
        report.dropped_without_target += 1
        return
    report.target_tokens += sum(trained)
    for at, each in enumerate(encoded):
        ids, targets = each.ids[: job.max_length], each.targets[: job.max_length]
        if job.method == "orpo" and at == 0:
            # Its likelihood counts with its prompt; where that ends, the rejected one says.
            targets = [True] * len(ids)
        labels = [token if on else NO_TARGET for token, on in zip(ids, targets, strict=True)]
        table.append(ids, labels)


def _label_position(job: Job) -> Callable[[Sequence[int]], int]:
    """Which token of a sample the base's class reads for its label.

    As in transformers: an encoder's first one, else the last one that is no padding.
    """
    from tlora_fx.model.backbone import load_config

    config = load_config(job.base)
    if pools_first(config.to_dict()):
        return lambda ids: 0
    padding = config.get_text_config().pad_token_id
    return lambda ids: max((at for at, token in enumerate(ids) if token != padding), default=0)


def _keep_labelled(
    encoded: Labelled,
    position: Callable[[Sequence[int]], int] | None,
    report: DataReport,
    table: SampleTable,
) -> None:
    """Add a row's sample to the table, with its label at the token that is read for it."""
    report.truncated += encoded.is_truncated
    if not encoded.ids or position is None:
        report.dropped_without_target += 1
        return
    labels = [NO_TARGET] * len(encoded.ids)
    labels[position(encoded.ids)] = encoded.code
    report.target_tokens += 1
    table.append(encoded.ids, labels)
