"""How much work a round brings: tokens by job, and the lengths of sequences.

A round is rows; a row is each job's sequences. Plans cut a round between sequences into parts, one
for each replica and micro-batch; here it is cut in the same way, so that a plan can be costed
before any data is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from tlora_fx.config.job import Job
from tlora_fx.model.batch import JobTokens, PackedBatch
from tlora_fx.model.supermodel import SuperModel

# Cut the rows of a round into as many parts as a plan's processes and micro-batches need.
#
# A loss is a sum over a job's whole step, and dropout counts tokens in the whole step, so it does
# not matter which forward a sequence is in. A job's sequences stay in order and a part holds one
# run of them, so that one offset says where they stand in the step.


Row_rows = list[JobTokens]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the rows of a model may be cut.

    whole            a micro-batch stays whole in its row, because the base's graph depends on it
    square_tokens    a sequence of so many tokens costs as much in attention as in all else
    max_row_tokens   a part is at most as long, where its sequences allow it
    """

    whole: bool
    square_tokens: float
    max_row_tokens: int

    @staticmethod
    def of(model: SuperModel, max_row_tokens: int) -> Cutting:
        """How a model's rows may be cut."""
        switches = torch.ops.tlora_fx.segment_switch.default
        nodes = (node for graph in model.group.graphs() for node in graph.nodes)
        whole = any(node.op == "call_function" and node.target is switches for node in nodes)
        # The products of a layer with hidden size h multiply 12 h² numbers a token, causal
        # attention h a token and token before it.
        hidden = getattr(model.backbone.config, "hidden_size", None) or 1024
        return Cutting(whole, 12.0 * hidden, max_row_tokens)

    def cost(self, tokens: int) -> float:
        """What a sequence costs, in tokens."""
        return tokens + tokens * tokens / self.square_tokens


def cut_round(rows: Iterable[Row_rows], unit: int, cutting: Cutting) -> list[Row_rows]:
    """The rows of a round, cut into a multiple of `unit` parts of about equal cost.

    rows      as `rows_of_round` makes them
    returns   parts with the same sequences; some may be empty
    """
    given = list(rows)
    if unit == 1 or not given:
        return given
    parts = _by_jobs(given, unit, cutting) if cutting.whole else _by_sequences(given, unit, cutting)
    empty = [JobTokens((), (), job.seed, job.step) for job in given[0]]
    return parts + [list(empty) for _ in range(-len(parts) % unit)]


def _by_sequences(rows: Sequence[Row_rows], unit: int, cutting: Cutting) -> list[Row_rows]:
    """Cut anywhere between sequences."""
    jobs = [_joined([row[index] for row in rows]) for index in range(len(rows[0]))]
    lengths = [len(sequence) for job in jobs for sequence in job.sequences]
    costs = [cutting.cost(length) for length in lengths]
    before = [0, *accumulate(lengths)]
    parts = -(-max(1, -(-before[-1] // cutting.max_row_tokens)) // unit) * unit
    while True:
        cuts = balanced_cuts(costs, parts)
        longest = max(before[stop] - before[start] for start, stop in pairwise(cuts))
        fits = longest <= cutting.max_row_tokens
        if not fits and parts >= len(lengths):
            # No cut is shorter than each sequence by itself.
            cuts = [min(place, len(lengths)) for place in range(parts + 1)]
        if fits or parts >= len(lengths):
            return [_piece_rows(jobs, start, stop) for start, stop in pairwise(cuts)]
        parts += unit


def _by_jobs(rows: Sequence[Row_rows], unit: int, cutting: Cutting) -> list[Row_rows]:
    """Cut each row between jobs, whose micro-batches stay whole."""
    pieces = max(1, unit // len(rows))
    made: list[Row_rows] = []
    for row in rows:
        costs = [sum(cutting.cost(len(ids)) for ids in job.sequences) for job in row]
        ends = [0, *accumulate(len(job.sequences) for job in row)]
        cuts = balanced_cuts(costs, pieces)
        made.extend(_piece_rows(row, ends[start], ends[stop]) for start, stop in pairwise(cuts))
    return made


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Places that cut a line of costs into parts of which the dearest is as cheap as can be.

    returns   parts + 1 places, from 0 to the number of costs
    """
    before = [0.0, *accumulate(costs)]
    bound = _bottleneck(before, parts)
    # first[p]: the earliest place from which p parts reach the end.
    first = [len(costs)]
    for _ in range(parts):
        first.append(bisect_left(before, before[first[-1]] - bound - _slack(before)))
    cuts = [0]
    for left in range(parts - 1, 0, -1):
        start = cuts[-1]
        last = bisect_right(before, before[start] + bound + _slack(before)) - 1
        wanted = before[start] + (before[-1] - before[start]) / (left + 1)
        place = bisect_left(before, wanted)
        if place > start + 1 and wanted - before[place - 1] < before[min(place, last)] - wanted:
            place -= 1
        cuts.append(min(max(place, first[left], start), last))
    return [*cuts, len(costs)]


def _bottleneck(before: Sequence[float], parts: int) -> float:
    """The least bound that so many runs of a line, none dearer, can cover."""
    largest = max((stop - start for start, stop in pairwise(before)), default=0.0)
    low, high = max(largest, before[-1] / parts), before[-1]
    for _ in range(50):
        if high - low <= _slack(before):
            break
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(before, parts, middle) else (middle, high)
    return high


def _covers(before: Sequence[float], parts: int, bound: float) -> bool:
    place = 0
    for _ in range(parts):
        place = bisect_right(before, before[place] + bound + _slack(before)) - 1
    return place == len(before) - 1


def _slack(before: Sequence[float]) -> float:
    return 1e-9 * before[-1]


def _joined(pieces: Sequence[JobTokens]) -> JobTokens:
    """One job's tokens of successive rows as one."""
    own = [piece for piece in pieces if piece.sequences]
    first = own[0] if own else pieces[0]
    sequences = [ids for piece in own for ids in piece.sequences]
    labels = [row for piece in own for row in piece.labels]
    return JobTokens(sequences, labels, first.seed, first.step, first.offset)


def _piece_rows(jobs: Sequence[JobTokens], start: int, stop: int) -> Row_rows:
    """The sequences start:stop, counted over all jobs."""
    row: Row_rows = []
    passed = 0
    for job in jobs:
        count = len(job.sequences)
        low, high = (min(max(place - passed, 0), count) for place in (start, stop))
        skipped = sum(len(ids) for ids in job.sequences[:low])
        row.append(
            JobTokens(
                job.sequences[low:high], job.labels[low:high], job.seed, job.step,
                job.offset + skipped,
            )
        )  # fmt: skip
        passed += count
    return row


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
