"""Rounds: in each, every running job does one optimizer step, in as few rows as fit.

A job's micro-batch stays whole in one row, as it would be alone, so that what depends on a
micro-batch (longrope's switch) is the same. Micro-batches of different jobs share rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tlora_fx.config.job import Job
from tlora_fx.model.batch import IGNORED, JobTokens
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
