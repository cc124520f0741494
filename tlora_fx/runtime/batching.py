"""Rounds: in each, every running job does one optimizer step, in as few rows as fit.

A job's micro-batch stays whole in one row, as it would be alone, so that what depends on a
micro-batch (longrope's switch) is the same. Micro-batches of different jobs share rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tlora_fx.config.job import Job
from tlora_fx.model.batch import (
    IGNORED,
    SMALLEST,
    JobTokens,
    PackedBatch,
    pack,
    pad,
    repeating_length,
)
from tlora_fx.runtime.data import Sample

MicroBatches = Sequence[Sequence[Sample]]


def rows_of_round(
    jobs: Sequence[Job],
    batches: Mapping[int, MicroBatches],
    steps: Mapping[int, int],
    max_row_tokens: int,
) -> Iterator[list[JobTokens]]:
    """The rows of one round; each is what `pack` or `pad` takes.

    jobs             all jobs, in table order
    batches          by job index, the micro-batches of the step that it is at
    steps            by job index, that step
    max_row_tokens   a row is closed before it grows beyond this; a larger micro-batch has one alone
    """
    offsets = dict.fromkeys(batches, 0)
    for place in range(max(map(len, batches.values()), default=0)):
        row = _empty(jobs)
        size = 0
        for index, micro_batches in batches.items():
            if place >= len(micro_batches):
                continue
            samples = micro_batches[place]
            tokens = sum(len(sample.input_ids) for sample in samples)
            if size and size + tokens > max_row_tokens:
                yield row
                row, size = _empty(jobs), 0
            row[index] = JobTokens(
                [sample.input_ids for sample in samples],
                [sample.labels for sample in samples],
                jobs[index].seed,
                steps[index],
                offsets[index],
            )
            offsets[index] += tokens
            size += tokens
        yield row


def count_targets(micro_batches: MicroBatches) -> int:
    """Target tokens of an optimizer step, after the shift inside each sequence."""
    return sum(
        label != IGNORED
        for samples in micro_batches
        for sample in samples
        for label in sample.labels[1:]
    )


def count_tokens(micro_batches: MicroBatches) -> int:
    """Tokens of an optimizer step."""
    return sum(len(sample.input_ids) for samples in micro_batches for sample in samples)


def _empty(jobs: Sequence[Job]) -> list[JobTokens]:
    return [JobTokens((), (), job.seed) for job in jobs]


# Rows as tensors; on a GPU with a little padding, so that their lengths come again.
#
# What serves a row of one length is kept and started again for the next one: kernels' launches,
# and what `torch.compile` made. Rows of real data are hardly ever of one length, so they are
# padded to one of few: by a thirty-second at most, a sixty-fourth on average.


@dataclass(slots=True)
class RowBucketer:
    """Makes rows, and counts what it adds.

    packed       in packed form, else in batch form, whose padding is its own
    lengthened   packed rows get one of few lengths
    tokens       of all rows so far, without padding
    padding      tokens that were added to packed rows
    """

    packed: bool
    lengthened: bool = False
    tokens: int = 0
    padding: int = 0

    def made(self, rows: Sequence[Sequence[JobTokens]]) -> list[PackedBatch]:
        """Each row as `pack` or `pad` lays it out."""
        return [self._packed(row) if self.packed else pad(row) for row in rows]

    def _packed(self, row: Sequence[JobTokens]) -> PackedBatch:
        tokens = sum(len(sequence) for job in row for sequence in job.sequences)
        length = max(SMALLEST, repeating_length(tokens) if self.lengthened and tokens else tokens)
        self.tokens += tokens
        self.padding += length - tokens
        return pack(row, length)
