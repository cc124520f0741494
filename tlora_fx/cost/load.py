"""How much work a round brings: tokens by job, and the lengths of sequences.

A round is rows; a row is each job's sequences. Plans cut a round between sequences into parts, one
for each replica and micro-batch; here it is cut in the same way, so that a plan can be costed
before any data is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from tlora_fx.config.job import Job
from tlora_fx.model.batch import PackedBatch
from tlora_fx.planners.rows import balanced_cuts

MAX_ROW_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Load:
    """What one forward has to do.

    tokens      of each job
    squares     sum of squared lengths of sequences, what causal attention grows with
    sequences   how many there are
    targets     tokens with a loss, at most
    """

    tokens: tuple[int, ...]
    squares: float = 0.0
    sequences: int = 0
    targets: int = 0

    @property
    def total(self) -> int:
        """Tokens of all jobs."""
        return sum(self.tokens)

    def __add__(self, other: Load) -> Load:
        return Load(
            tuple(a + b for a, b in zip(self.tokens, other.tokens, strict=True)),
            self.squares + other.squares,
            self.sequences + other.sequences,
            self.targets + other.targets,
        )

    @classmethod
    def of_lengths(cls, lengths: Sequence[Sequence[int]]) -> Load:
        """The load of a row.

        lengths   of each job's sequences
        """
        flat = [length for own in lengths for length in own]
        return cls(
            tokens=tuple(map(sum, lengths)),
            squares=float(sum(length * length for length in flat)),
            sequences=len(flat),
            targets=sum(max(0, length - 1) for length in flat),
        )

    @classmethod
    def of_row(cls, row: PackedBatch) -> Load:
        """The load of a packed row."""
        segments = row.segments.diff().tolist()
        lengths = row.cu_seqlens.diff().tolist()
        squares = float(sum(n * n for n in lengths))
        return cls(tuple(segments), squares, len(lengths), int(row.targets.shape[0]))


#: A row as lengths of each job's sequences.
Row = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of all jobs.

    rows             what one process would run one after the other
    max_row_tokens   no part is longer, where its sequences allow it
    """

    rows: tuple[Row, ...]
    max_row_tokens: int = MAX_ROW_TOKENS

    @property
    def load(self) -> Load:
        """All rows together."""
        first, *rest = (Load.of_lengths(row) for row in self.rows)
        return sum(rest, first)

    def parts(self, unit: int, square_tokens: float) -> list[Load]:
        """The forwards of a round, cut as `rows.cut_round` cuts them.

        unit            their number is a multiple of it
        square_tokens   a sequence of so many tokens costs as much in attention as in all else
        """
        return list(_parts(self, unit, square_tokens))

    def longest(self) -> tuple[int, int]:
        """The job with the longest sequence, and its length."""
        lengths = [(max(own), job) for row in self.rows for job, own in enumerate(row) if own]
        length, job = max(lengths)
        return job, length

    def shortened(self, job: int, length: int) -> Round:
        """The same round with a job's sequences cut to a length."""
        rows = (
            tuple(
                tuple(min(n, length) for n in own) if place == job else own
                for place, own in enumerate(row)
            )
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))


@lru_cache(maxsize=128)
def _parts(work: Round, unit: int, square_tokens: float) -> tuple[Load, ...]:
    if unit == 1:
        return tuple(Load.of_lengths(row) for row in work.rows)
    jobs = len(work.rows[0])
    flat = [(n, job) for job in range(jobs) for row in work.rows for n in row[job]]
    costs = [n + n * n / square_tokens for n, _ in flat]
    total = sum(n for n, _ in flat)
    count = -(-max(1, -(-total // work.max_row_tokens)) // unit) * unit
    while True:
        cuts = balanced_cuts(costs, count)
        made = [_piece(flat[start:stop], jobs) for start, stop in pairwise(cuts)]
        longest = max(load.total for load in made)
        if longest <= work.max_row_tokens or count >= len(flat):
            return tuple(made)
        count += unit


def _piece(sequences: Sequence[tuple[int, int]], jobs: int) -> Load:
    lengths: list[list[int]] = [[] for _ in range(jobs)]
    for length, job in sequences:
        lengths[job].append(length)
    return Load.of_lengths(lengths)


def round_of_jobs(
    jobs: Sequence[Job],
    *,
    length: int | None = None,
    tokens: int | None = None,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> Round:
    """The round of jobs as their files describe it.

    length           tokens of each sequence, at most the job's max_length; None: max_length
    tokens           of the whole round: batch sizes are scaled to it, at least one sequence a job
    max_row_tokens   a row is closed before it grows beyond this
    """
    lengths = [min(length or job.max_length, job.max_length) for job in jobs]
    counts = [job.per_device_train_batch_size for job in jobs]
    steps = [job.gradient_accumulation_steps for job in jobs]
    if tokens is not None:
        asked = sum(n * c * s for n, c, s in zip(lengths, counts, steps, strict=True))
        counts = [max(1, round(c * tokens / asked)) for c in counts]
    batches = [[(n,) * c] * s for n, c, s in zip(lengths, counts, steps, strict=True)]
    return round_of_batches(batches, max_row_tokens)


def round_of_batches(
    batches: Sequence[Sequence[tuple[int, ...]]], max_row_tokens: int = MAX_ROW_TOKENS
) -> Round:
    """The round of these micro-batches.

    batches          for each job, for each of its micro-batches, the lengths of its sequences
    max_row_tokens   a row is closed before it grows beyond this
    """
    rows: list[Row] = []
    for place in range(max(map(len, batches))):
        row: list[tuple[int, ...]] = [()] * len(batches)
        size = 0
        for job, own in enumerate(batches):
            if place >= len(own):
                continue
            if size and size + sum(own[place]) > max_row_tokens:
                rows.append(tuple(row))
                row, size = [()] * len(batches), 0
            row[job] = own[place]
            size += sum(own[place])
        rows.append(tuple(row))
    return Round(tuple(rows), max_row_tokens)
