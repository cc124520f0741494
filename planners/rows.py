"""Cut the rows of a round into as many parts as a plan's processes and micro-batches need.

A loss is a sum over a job's whole step, and dropout counts tokens in the whole step, so it does not
matter which forward a sequence is in. A job's sequences stay in order and a part holds one run of
them, so that one offset says where they stand in the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from tlora_fx.model.batch import JobTokens
from tlora_fx.model.supermodel import SuperModel

Row = list[JobTokens]


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


def cut_round(rows: Iterable[Row], unit: int, cutting: Cutting) -> list[Row]:
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


def _by_sequences(rows: Sequence[Row], unit: int, cutting: Cutting) -> list[Row]:
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
            return [_piece(jobs, start, stop) for start, stop in pairwise(cuts)]
        parts += unit


def _by_jobs(rows: Sequence[Row], unit: int, cutting: Cutting) -> list[Row]:
    """Cut each row between jobs, whose micro-batches stay whole."""
    pieces = max(1, unit // len(rows))
    made: list[Row] = []
    for row in rows:
        costs = [sum(cutting.cost(len(ids)) for ids in job.sequences) for job in row]
        ends = [0, *accumulate(len(job.sequences) for job in row)]
        cuts = balanced_cuts(costs, pieces)
        made.extend(_piece(row, ends[start], ends[stop]) for start, stop in pairwise(cuts))
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


def _piece(jobs: Sequence[JobTokens], start: int, stop: int) -> Row:
    """The sequences start:stop, counted over all jobs."""
    row: Row = []
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
