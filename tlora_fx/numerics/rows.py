"""The small input that graphs run on: a few sequences of every job."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from random import Random

from tlora_fx.ir.graph import Form
from tlora_fx.model.batch import IGNORED, JobTokens, PackedBatch, pack, pad

MANY_JOBS = 8
TOKENS, TOKENS_OF_MANY = 12, 6
# Each fifth token is no target, and no job begins at the start of its step.
SKIPPED, OFFSET = 5, 3
LARGEST_ID = 997


class ProbeRows:
    """Rows of the same tokens: each job alone, and all jobs together.

    tokens       of each job, more or less; None: fewer where there are many jobs
    """

    def __init__(
        self, names: Sequence[str], form: Form, seed: int, tokens: int | None, vocabulary: int
    ) -> None:
        self._vocabulary = vocabulary
        few = TOKENS if len(names) <= MANY_JOBS else TOKENS_OF_MANY
        asked = max(4, few if tokens is None else tokens)
        self.names = list(names)
        self._form = form
        self._parts = [
            _part(Random(f"{seed} {name}"), index, asked, vocabulary)  # noqa: S311  (no secrets)
            for index, name in enumerate(names)
        ]
        # Units of a row are tokens, in batch form lines.
        packed = form == "packed"
        units = [sum(map(len, p.sequences)) if packed else len(p.sequences) for p in self._parts]
        self.segments = [0, *accumulate(units)]

    def with_other_tokens(self, jobs: Collection[str]) -> ProbeRows:
        """The same rows with other tokens of these jobs: lengths, keys and all others' are kept."""
        changed = copy(self)
        changed._parts = [
            _redrawn(part, Random(f"other {name}"), self._vocabulary) if name in jobs else part  # noqa: S311
            for name, part in zip(self.names, self._parts, strict=True)
        ]
        return changed

    def together(self) -> PackedBatch:
        """One row of all jobs."""
        return self._row(self._parts)

    def alone(self, job: str) -> PackedBatch:
        """One row of one job's tokens."""
        return self._row([self._parts[self.names.index(job)]])

    def _row(self, parts: Sequence[JobTokens]) -> PackedBatch:
        return pack(parts) if self._form == "packed" else pad(parts)


def _part(source: Random, place: int, tokens: int, vocabulary: int) -> JobTokens:
    """Two sequences of a job, whose length differs from job to job."""
    lengths = (tokens - tokens // 3 + place % 3, max(2, tokens // 3))
    largest = min(vocabulary, LARGEST_ID) - 1
    drawn = [[source.randint(min(1, largest), largest) for _ in range(n)] for n in lengths]
    labels = [
        [IGNORED if place % SKIPPED == SKIPPED - 1 else token for place, token in enumerate(ids)]
        for ids in drawn
    ]
    seed, step = source.getrandbits(31), place + 1
    return JobTokens(drawn, labels, seed=seed, step=step, offset=OFFSET + place)


def _redrawn(part: JobTokens, source: Random, vocabulary: int) -> JobTokens:
    """Other tokens in the same places, where there is another one to choose."""
    largest = min(vocabulary, LARGEST_ID) - 1
    drawn = [
        [(token + source.randint(1, max(1, largest))) % (largest + 1) for token in ids]
        for ids in part.sequences
    ]
    labels = [
        [kept if kept == IGNORED else token for kept, token in zip(known, ids, strict=True)]
        for known, ids in zip(part.labels, drawn, strict=True)
    ]
    return replace(part, sequences=drawn, labels=labels)


def halves(names: Sequence[str]) -> Iterator[list[str]]:
    """Few sets of jobs such that of any two jobs, each is in one set that the other is not in."""
    for bit in range(max(len(names) - 1, 0).bit_length()):
        for wanted in (0, 1):
            yield [name for index, name in enumerate(names) if index >> bit & 1 == wanted]
