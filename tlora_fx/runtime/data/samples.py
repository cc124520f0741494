"""The samples of a job, and which of them each of its optimizer steps takes.

What a step takes depends on the job alone: on its data, its seed, and the number of the step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tlora_fx.config.job import Job
from tlora_fx.errors import (
    EmptyDataError,
    MissingColumnError,
    MixtureWeightError,
    NoTargetsError,
    StepMisuse,
)
from tlora_fx.inspect.wording import plural
from tlora_fx.model.row_ladder import RowSize
from tlora_fx.runtime.chats.renderer import asks_for_the_time, template_of
from tlora_fx.runtime.data.encode_data import bad_row, tokens_of_data
from tlora_fx.runtime.data.layout import CHATS, SampleLayout, layout_of
from tlora_fx.runtime.data.loss_inputs import loss_of, require_numbers
from tlora_fx.runtime.data.rows import NO_ROWS_HELP, evaluated
from tlora_fx.runtime.data.tables import (
    NO_TARGET,
    Cut,
    MixedTable,
    Sample,
    SampleTable,
    TokenTable,
    digest_of,
    lengths_of,
    mixed_order,
    targets_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NO_TARGET", "DataReport", "JobData", "PartReport", "Sample", "SampleTable", "held_out",
    "interleaved", "load_job_data", "packed", "sample_order", "samples_of_steps", "units_of",
]  # fmt: skip

Samples = SampleTable | MixedTable
#: Indices of the samples that a batch counts as one.
Units = np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PartReport:
    """Counts of the rows of one of several data sets.

    path      of the data set
    report    of its rows
    samples   those of the job that are trained and are of this data set; one that is taken twice
              counts twice, and a pair is one
    share     their part of all samples of the job that are trained
    """

    path: str
    report: DataReport
    samples: int
    share: float

    def lines(self) -> list[str]:
        """The report as text: the part of this data set, then what its own report says."""
        part = f"{self.samples} of the job's samples ({self.share:.1%})"
        whole, *more = self.report.lines()
        first = f"{plural(self.report.rows, 'row')}, {whole}; {part}"
        return [f"{self.path}: {line}" for line in (first, *more)]


@dataclass(slots=True)
class DataReport:
    """Counts of the rows of a job's data: read, skipped, cut, and packed.

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
    parts                   of each of several data sets. Layout, notes, first bad rows and unread
                            columns stand there alone then, and the format is that of the first
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
    parts: tuple[PartReport, ...] = ()

    def lines(self, targets: str = "trained") -> list[str]:
        """The report as text: what is left, then each thing that was changed or left out.

        targets   what is done with target tokens
        """
        size = f"{plural(self.samples, 'sample')}, {plural(self.tokens, 'token')}"
        lines = [f"{size}, {self.target_tokens:,} {targets}"]
        within = " within max_length" if self.truncated else ""
        for count, what in (
            (self.bad_rows, "bad rows skipped"),
            (self.truncated, "samples truncated to max_length"),
            (self.dropped_without_target, f"samples dropped: nothing to train on{within}"),
            (self.prefix_mismatches, "prompts tokenised otherwise before their completion"),
        ):
            if count:
                lines.append(f"{count:,} of {self.rows:,} {what}")
        lines += [self.layout] if self.layout else []
        lines += [f"columns that are not read: {', '.join(self.unread)}"] if self.unread else []
        lines += [f"bad row {row}" for row in self.first_bad_rows]
        return [*lines, *(line for part in self.parts for line in part.lines()), *self.notes]


@dataclass(frozen=True)
class JobData:
    """The samples of a job and their order.

    samples     in the order of the data; of preferences each chosen one before its rejected one
    report      what became of the rows
    evaluation  what the job is evaluated on, in the order of the data
    tokenizer   that made the samples, where they were read; an adapter's folder gets it
    units       what a batch counts as one, by indices of samples: pairs ([N, 2]), or what is packed
                into one sequence; None: each sample is one
    clock       the time that the chat template was told; None where it did not ask

    raises      StepMisuse for a list of samples that do not say what the job's loss reads, or that
                have weights, log-probabilities, advantages or inputs, which it does not read
    """

    job: Job
    samples: Sequence[Sample]
    report: DataReport
    evaluation: Sequence[Sample] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    units: Units | None = None
    clock: datetime | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.samples, (list, tuple)):
            return
        if (loss := loss_of(self.job)) is not None:
            require_numbers(self.job, loss, [*self.samples, *self.evaluation])
        elif any(of.is_scored for of in self.samples):
            raise StepMisuse(
                "samples say what the job's loss does not read",
                job=self.job.name,
                found="weights, logprobs, advantages or inputs",
                help="leave them out, or name the loss: Job(loss=...), or Batch(loss=...)",
            )

    @cached_property
    def count(self) -> int:
        """How many samples a batch can count: pairs and packed sequences are one."""
        return len(self.samples) if self.units is None else len(self.units)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of what a batch counts as one, [count]."""
        lengths = lengths_of(self.samples)
        if self.units is None:
            return lengths
        if isinstance(self.units, np.ndarray):
            return np.asarray(lengths[self.units].sum(axis=1))
        return np.array([lengths[list(unit)].sum() for unit in self.units], np.int64)

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
        return digest_of(self.samples)

    def step(self, step: int) -> list[list[Sample]]:
        """The micro-batches of optimizer step `step`, from 0.

        Any step may be asked for, in any order: after an epoch the next begins, with an order of
        its own where the job shuffles. As in transformers' Trainer, the last step of an epoch may
        have fewer micro-batches, and its last micro-batch fewer samples; none is empty.
        """
        return [
            [sample for index in batch for sample in self.unit(index)]
            for batch in self._batches(step)
        ]

    def sizes(self, step: int) -> list[RowSize]:
        """The size of each micro-batch of an optimizer step, without a look at its tokens."""
        found: list[RowSize] = []
        for batch in self._batches(step):
            at = batch if self.units is None else [at for unit in batch for at in self.units[unit]]
            lengths = self._sample_lengths[at]
            found.append(
                RowSize(
                    int(lengths.sum()), len(at), int(lengths.max()), int(self._targets[at].sum())
                )
            )
        return found

    def _batches(self, step: int) -> list[list[int]]:
        """The indices that the micro-batches of a step take."""
        if step < 0:
            raise IndexError(f"step {step} of a job")
        epoch, at = divmod(step, self.steps_per_epoch)
        batch = self.job.per_device_train_batch_size
        taken = batch * self.job.gradient_accumulation_steps
        indices = self._order(epoch)[at * taken : (at + 1) * taken].tolist()
        return [indices[start : start + batch] for start in range(0, len(indices), batch)]

    @cached_property
    def _sample_lengths(self) -> np.ndarray:
        return lengths_of(self.samples)

    @cached_property
    def _targets(self) -> np.ndarray:
        """Targets of each sample, [N]."""
        return targets_of(self.samples, self.job.label_shift)

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


def load_job_data(
    job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None = None
) -> JobData:
    """Read, tokenise and truncate the data of a job, and what it is evaluated on.

    clock   what a chat template that asks for the time is told; None: the time it is now
    raises  DataError, one of its classes for each mistake
    """
    evaluation: Sequence[Sample] = ()
    limit = samples_of_steps(job) if job.data.streaming else None
    told = (
        (clock or datetime.now().astimezone())
        if asks_for_the_time(template_of(tokenizer))
        else None
    )
    samples, report = _read(job, tokenizer, told, limit)
    notes, each = list(report.notes), job.sequences_per_sample
    if isinstance(job.eval_split, float):
        samples, evaluation = held_out(samples, job)
        counted = int(evaluation.targets(job.label_shift).sum())
        held = plural(len(evaluation) // each, "sample")
        tokens = f"{plural(int(evaluation.lengths.sum()), 'token')}, {counted:,} counted"
        notes.append(f"evaluation: {held} held out, {tokens}")
    elif (spec := evaluated(job)) is not None:
        evaluation, found = _samples(job.model_copy(update={"data": spec}), tokenizer, told)
        notes += [f"evaluation: {line}" for line in found.lines("counted")]
    if isinstance(samples, MixedTable):
        samples = interleaved(samples, job)
        report.parts = _shared(report.parts, samples, each)
    report.samples, report.tokens = len(samples) // each, int(samples.lengths.sum())
    report.target_tokens = int(samples.targets(job.label_shift).sum())
    units = units_of(job, samples)
    if job.packing and units is not None:
        filled = report.tokens / (len(units) * job.max_length)
        notes.append(
            f"packed into {plural(len(units), 'sequence')} of max_length, {filled:.0%} full"
        )
    count = len(samples) // job.sequences_per_sample if units is None else len(units)
    if count < job.per_device_train_batch_size:
        size = f"per_device_train_batch_size {job.per_device_train_batch_size}"
        whole = "the one sample" if count == 1 else f"all {count} samples"
        notes.append(f"{size} is more than there are: each step takes {whole}")
    if tokenizer.eos_token_id is None and not job.base.is_classifier:
        notes.append("the tokenizer has no end-of-sequence token: samples end without one")
    report.notes = tuple(notes)
    return JobData(job, samples, report, evaluation, tokenizer, units, told)


def samples_of_steps(job: Job) -> int | None:
    """How many samples all steps of a job take; None where epochs are counted."""
    if job.max_steps is None:
        return None
    return job.max_steps * job.gradient_accumulation_steps * job.per_device_train_batch_size


def units_of(job: Job, samples: Sequence[Sample]) -> Units | None:
    """Samples that batches of a job count as one, by their indices; None: each sample is one."""
    if job.sequences_per_sample == 2:
        return np.arange(len(samples) // 2 * 2).reshape(-1, 2)
    return packed(lengths_of(samples).tolist(), job.max_length) if job.packing else None


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


def held_out(samples: Samples, job: Job) -> tuple[Samples, Samples]:
    """The samples that are trained, and the part that is kept for evaluation, in their order.

    Which ones depends on the job's seed and on how many there are; their number is rounded up. Of
    several data sets this comes before they are interleaved: what is held out is never trained.

    raises  EmptyDataError when none is left to train on
    """
    size = job.sequences_per_sample
    total = len(samples) // size
    count = math.ceil(job.eval_split * total)
    if count >= total:
        raise EmptyDataError(
            "holding out samples for evaluation leaves none to train on",
            path=", ".join(part.path for part in job.data.parts),
            job=job.name,
            found=f"{plural(total, 'sample')}, eval_split: {job.eval_split}",
            help="give more samples, or a file of its own under eval_data",
        )
    drawn = np.random.default_rng((job.seed, _HELD_OUT)).permutation(total)
    is_held = np.zeros(total, bool)
    is_held[drawn[:count]] = True
    of_samples = np.repeat(is_held, size)
    return samples.take(np.flatnonzero(~of_samples)), samples.take(np.flatnonzero(of_samples))


# No epoch has this number.
_HELD_OUT = 2**32 - 1


def interleaved(samples: MixedTable, job: Job) -> MixedTable:
    """The samples of several data sets in the order that the job's weights and its seed give.

    samples   one data set after the other, which stays so where there are no weights
    raises    EmptyDataError when a data set has no samples; MixtureWeightError when an epoch would
              take them too often
    """
    parts, size = job.data.parts, job.sequences_per_sample
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return samples
    counts = np.bincount(samples.origin[::size], minlength=len(parts))
    if not counts.all():
        raise EmptyDataError(
            "holding out samples for evaluation leaves a data set with none to train on",
            path=parts[int(counts.argmin())].path,
            job=job.name,
            found=f"eval_split: {job.eval_split}",
            help="give it more samples, or name data under eval_data instead of eval_split",
        )
    if job.mixing == "all_exhausted":
        _require_bounded(job, counts, np.array(weights) / sum(weights))
    origin, places = mixed_order(counts.tolist(), weights, job.seed, job.mixing)
    units = (np.cumsum(counts) - counts)[origin] + places
    return samples.take((units[:, None] * size + np.arange(size)).reshape(-1))


#: How often an epoch may take the samples of a mixture, on average.
MAX_REPEATS = 1000


def _require_bounded(job: Job, counts: np.ndarray, shares: np.ndarray) -> None:
    """Refuse weights by which an epoch would hardly end.

    counts   [data sets] samples of each
    shares   [data sets] the probability that a sample is drawn from each
    """
    total = int(counts.sum())
    with np.errstate(divide="ignore"):  # a share may be too small for a number
        expected = counts / shares
    last = int(expected.argmax())
    if expected[last] <= MAX_REPEATS * total:
        return
    part = job.data.parts[last]
    raise MixtureWeightError(
        "a data set of a mixture has too small a weight to be used up",
        path=part.path,
        job=job.name,
        expected=f"an epoch of at most {MAX_REPEATS} times the {total} samples",
        found=f"weight {part.weight}: an epoch of about {expected[last]:.3g} samples",
        help="give it a greater weight, or set mixing: first_exhausted",
    )


def _read(
    job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None, limit: int | None
) -> tuple[Samples, DataReport]:
    """The samples of all data sets of a job, one after the other, and the report of them."""
    parts = job.data.parts
    if len(parts) == 1:
        return _samples(job, tokenizer, clock, limit)
    own = [_samples(job.model_copy(update={"data": part}), tokenizer, clock) for part in parts]
    _require_same_numbers(job, [table.table for table, _ in own])
    reports = [report for _, report in own]
    together = DataReport(
        **{name: sum(getattr(report, name) for report in reports) for name in _COUNTS},
        format=reports[0].format,
        parts=tuple(
            PartReport(part.path, report, report.samples, 0.0)
            for part, report in zip(parts, reports, strict=True)
        ),
    )
    return MixedTable.joined([table for table, _ in own]), together


def _require_same_numbers(job: Job, tables: Sequence[TokenTable]) -> None:
    """Refuse data sets of which one lacks a column of numbers that another has."""
    names = [set(table.number_names) - {"weights"} for table in tables]  # 1 where there are none
    for part, own in zip(job.data.parts, names, strict=True):
        if missing := sorted(set().union(*names) - own):
            raise MissingColumnError(
                f"a data set has no column {missing[0]!r} of numbers, and another has",
                path=part.path,
                job=job.name,
                help=f"add it, or leave it out of the others by columns: {{{missing[0]}: null}}",
            )


#: Numbers of a report that add up over data sets.
_COUNTS = ("rows", "bad_rows", "truncated", "dropped_without_target", "prefix_mismatches")


def _shared(parts: Sequence[PartReport], samples: MixedTable, size: int) -> tuple[PartReport, ...]:
    """The reports of data sets with what is trained of each."""
    counts = np.bincount(samples.origin[::size], minlength=len(parts)).tolist()
    return tuple(
        replace(part, samples=count, share=count / sum(counts))
        for part, count in zip(parts, counts, strict=True)
    )


def _samples(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    clock: datetime | None,
    limit: int | None = None,
) -> tuple[SampleTable, DataReport]:
    """The samples of the data that a job's `data` names, at least one.

    limit   rows are read until there are so many
    """
    table = tokens_of_data(job, tokenizer, clock, limit)
    samples, report = _cut(job, table)
    if report.rows == report.bad_rows:
        what = "all rows of the data are bad" if report.rows else "the data has no rows"
        found = "\n".join(report.first_bad_rows) or None
        help = "" if report.rows else NO_ROWS_HELP
        raise EmptyDataError(what, path=job.data.path, job=job.name, found=found, help=help)
    if not samples:
        raise _no_targets(job, report)
    return samples, report


def _no_targets(job: Job, report: DataReport) -> NoTargetsError:
    cut = report.truncated
    help = "give completions or turns of an assistant, or set loss_on: all in the job's data"
    return NoTargetsError(
        f"none of {report.rows} samples has a token to train on",
        path=job.data.path,
        job=job.name,
        max_length=job.max_length if cut else None,
        found=f"{cut} of {report.rows} samples are longer than max_length" if cut else None,
        help=f"raise max_length, {help}" if cut else help,
    )


def _cut(job: Job, table: TokenTable) -> tuple[SampleTable, DataReport]:
    """What a job trains of a table, and the report of it."""
    counts, size = table.counts, job.sequences_per_sample
    bad = [(row.place_in(job.data.path), row) for row in counts.first_bad]
    if bad and not job.data.skip_bad_rows:
        where, first = bad[0]
        raise bad_row(job, where, first.reason, by_template=first.by_template)
    report = DataReport(
        rows=counts.rows,
        bad_rows=counts.bad_rows,
        first_bad_rows=tuple(f"{where}: {row.reason}" for where, row in bad),
        notes=tuple(counts.notes),
        unread=tuple(counts.unread),
    )
    whole = False
    if counts.layout is not None:
        layout = layout_of(job, counts.layout)
        report.format, whole = layout.format, not layout.on_completion
        report.layout = layout.line() + _by_default(job, layout)
    cut = Cut(
        job.max_length,
        whole,
        odd_spans=job.method == "orpo",
        labelled=job.base.is_classifier,
        judged=job.method == "kto",
    )
    # The first token has no token before it that could predict it.
    trained = table.trained(job.label_shift, job.max_length, whole=whole).reshape(-1, size)
    longer = (table.lengths > job.max_length) | table.cut
    report.truncated = _rows_with(longer, size)
    report.prefix_mismatches = _rows_with(table.differs, size)
    kept = trained.all(axis=1)
    report.dropped_without_target = int((~kept).sum())
    samples = SampleTable(table, np.flatnonzero(np.repeat(kept, size)), cut)
    report.samples, report.tokens = len(samples) // size, int(samples.lengths.sum())
    report.target_tokens = int(samples.targets(job.label_shift).sum())
    return samples, report


def _by_default(job: Job, layout: SampleLayout) -> str:
    """What TRL trains of chats where a job does not say what is trained."""
    said = job.assistant_only_loss is not None or job.data.loss_on != "auto"
    if said or layout.format not in CHATS:
        return ""
    return "; assistant_only_loss: false trains all tokens, as TRL does by default"


def _rows_with(flags: np.ndarray, size: int) -> int:
    """Rows of which any sequence has a flag."""
    return int(flags.reshape(-1, size).any(axis=1).sum())
