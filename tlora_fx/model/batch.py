"""Rows: the tokens of many jobs in one forward.

A row holds each job's sequences in one run, jobs in the order of the job table. Packed form lays
all tokens in one line; batch form pads each sequence to the longest, a sequence a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.model.objectives import (
    Objective,
    SequenceLoss,
    TokenTerms,
    sequence_losses,
    terms_of,
)
from tlora_fx.model.preference import Pairs, Preference, pairs_of
from tlora_fx.model.row_ladder import RowLadder, RowSize, power_of_two

#: Target that no loss counts, as of torch's cross_entropy.
IGNORED = -100
#: Index of what no job brought.
PADDING = -1
#: Added to a target of a number's bits: what is asked for is the distance to it, with its sign.
SIGNED = 1 << 40
# Tokens of a row, so that no dimension is specialised to one.
SMALLEST = 2


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Tokens of one job in one row.

    sequences    token ids of each sequence
    labels       same lengths, unshifted, IGNORED where there is no loss
    seed, step   key of the job's dropout masks
    offset       tokens of the job's optimizer step that earlier rows held
    preference   how its sequences, which are then pairs, are compared
    shift        how far before its label a prediction stands: 0 where labels are of their tokens
    objective    a loss of a loop of one's own; None: cross entropy, or that of the preference
    """

    sequences: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    seed: int = 0
    step: int = 0
    offset: int = 0
    preference: Preference | None = None
    shift: int = 1
    objective: Objective | None = None


@dataclass(slots=True)
class PackedBatch:
    """One row; T tokens, S sequences, J jobs, N target rows.

    input_ids, position_ids   int64 [1, T]; batch form [B, S]
    cu_seqlens                int32 [S + 1] where each sequence begins
    max_seqlen                int32 [] on the CPU
    segments                  int32 [J + 1] on the CPU: job j owns units segments[j]:segments[j+1];
                              a unit is a token, in batch form a line
    token_index               int32, as input_ids: index in the job's whole-step batch; -1 where a
                              line is padded
    keys                      int64 [J, 2] on the CPU: the job's seed and optimizer step
    target_rows               int64 [N]: flat positions whose next token is a target, by job; of
                              classifiers those that a label belongs to
    targets                   int64 [N]: that next token, or the label's integer, of rewards with
                              SIGNED added
    target_segments           int32 [J + 1] on the CPU: job j owns this run of target rows
    pairs                     of each job that learns from pairs, or by losses of whole sequences
    compared                  a row of those that the base is asked for too; None: of none
    terms                     losses by token, where a job has another one than cross entropy
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: Tensor
    segments: Tensor
    token_index: Tensor
    keys: Tensor
    target_rows: Tensor
    targets: Tensor
    target_segments: Tensor
    pairs: tuple[Pairs | SequenceLoss, ...] = ()
    compared: PackedBatch | None = None
    terms: TokenTerms | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all losses are sums of token losses that its tensors say."""
        return not self.pairs and self.terms is None

    def tensors(self) -> dict[str, Tensor]:
        """The row's tensors by name, as an exported program takes them."""
        apart = ("pairs", "compared", "terms")
        names = (f.name for f in fields(self) if f.name not in apart)
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same row with its token-sized tensors on a device; small tables stay on the CPU."""
        host = {"max_seqlen", "segments", "keys", "target_segments"}
        moved = {
            name: tensor if name in host else tensor.to(device, non_blocking=True)
            for name, tensor in self.tensors().items()
        }
        compared = None if self.compared is None else self.compared.to(device)
        terms = None if self.terms is None else self.terms.to(device)
        pairs = tuple(own.to(device) for own in self.pairs)
        return PackedBatch(**moved, pairs=pairs, compared=compared, terms=terms)


def repeating_form(row: PackedBatch, sizes: tuple[int, int, int] | None = None) -> PackedBatch:
    """A packed row of the same tokens and losses whose every size is one of few.

    By sequences of no tokens, and by the last target's row without its label, which counts as that
    row's job's. Without `sizes` the number of sequences rises to a power of two, `max_seqlen` to a
    power of two, and the number of target rows to a multiple of an eighth of the tokens.

    row      on the CPU, in packed form, with a target at least
    sizes    its sequences, its `max_seqlen` and its target rows, none less than it has
    """
    tokens, count = row.input_ids.numel(), len(row.target_rows)
    if sizes is None:
        sequences, longest = len(row.cu_seqlens) - 1, int(row.max_seqlen)
        eighth = max(SMALLEST, tokens // 8)
        sizes = power_of_two(sequences), power_of_two(longest), count + -count % eighth
    more, missing = sizes[0] - (len(row.cu_seqlens) - 1), sizes[2] - count
    segments = row.target_segments.clone()
    # All jobs behind the last one that has targets end where it ends.
    segments[row.target_segments == count] += missing
    return replace(
        row,
        cu_seqlens=F.pad(row.cu_seqlens, (0, more), value=tokens),
        max_seqlen=torch.tensor(sizes[1], dtype=torch.int32),
        target_rows=torch.cat([row.target_rows, row.target_rows[-1:].expand(missing)]),
        targets=F.pad(row.targets, (0, missing), value=IGNORED),
        target_segments=segments,
        terms=None if row.terms is None else row.terms.padded(missing),
    )


def size_of(row: PackedBatch) -> RowSize:
    """The size of a packed row."""
    sizes = row.input_ids.numel(), len(row.cu_seqlens) - 1
    return RowSize(*sizes, int(row.max_seqlen), len(row.target_rows))


def size_of_jobs(jobs: Iterable[JobTokens]) -> RowSize:
    """The size of the row that `pack` makes of these."""
    lengths, targets = [0], 0
    for job in jobs:
        lengths.extend(map(len, job.sequences))
        targets += sum(label != IGNORED for labels in job.labels for label in labels[job.shift :])
    return RowSize(sum(lengths), len(lengths) - 1, max(lengths), targets)


def padded_by(ladder: RowLadder, row: PackedBatch) -> PackedBatch:
    """A row with all other sizes of the step whose tokens it has, or `repeating_form`.

    row      on the CPU, in packed form, with a target at least
    """
    step = ladder.step_of(size_of(row))
    return repeating_form(row) if step is None else repeating_form(row, step[1:])


def example_row(step: RowSize, jobs: int) -> PackedBatch:
    """A row of a step's size whose tokens are all 0, the jobs' parts about as long as each other.

    jobs   of the model
    """
    lengths = [step.longest] * (step.tokens // step.longest)
    if rest := step.tokens % step.longest:
        lengths.append(rest)
    left, parts = step.targets, [list[list[int]]() for _ in range(jobs)]
    labels = [list[list[int]]() for _ in range(jobs)]
    for number, length in enumerate(lengths):
        own = number * jobs // len(lengths)
        parts[own].append([0] * length)
        trained = min(left, length - 1)
        labels[own].append([IGNORED] * (length - trained) + [0] * trained)
        left -= trained
    given = zip(parts, labels, strict=True)
    row = pack([JobTokens(sequences, own) for sequences, own in given])
    return repeating_form(row, step[1:])


def pack(jobs: Sequence[JobTokens], length: int = SMALLEST) -> PackedBatch:
    """Lay the jobs' sequences into one packed line.

    length   tokens that the row has at least; two at least, so that no dimension is specialised to
             one. What is missing is padding: sequences by themselves without targets, no longer
             than those before them, which count as of the last job that has any (of the last one
             where none has)
    """
    ids: list[int] = []
    positions: list[int] = []
    index: list[int] = []
    starts, segments = [0], [0]
    for job in jobs:
        first = len(ids)
        for sequence in job.sequences:
            ids.extend(sequence)
            positions.extend(range(len(sequence)))
            starts.append(len(ids))
        index.extend(range(job.offset, job.offset + len(ids) - first))
        segments.append(len(ids))
    losses = _losses(jobs, starts)
    compared = _compared(jobs)
    if len(ids) < length:
        owner = max((j for j, job in enumerate(jobs) if job.sequences), default=len(jobs) - 1)
        longest = max((len(sequence_ids) for sequence_ids in jobs[owner].sequences), default=length)
        segments[owner + 1 :] = [length] * (len(jobs) - owner)
        while (missing := length - len(ids)) > 0:
            piece = min(missing, longest)
            ids.extend([0] * piece)
            positions.extend(range(piece))
            index.extend([0] * piece)
            starts.append(len(ids))
    lengths = [end - start for start, end in pairwise(starts)]
    return PackedBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64),
        position_ids=torch.tensor([positions], dtype=torch.int64),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=torch.tensor(max(lengths), dtype=torch.int32),
        segments=torch.tensor(segments, dtype=torch.int32),
        token_index=torch.tensor([index], dtype=torch.int32),
        compared=pack(compared) if compared else None,
        **losses,
    )


def pad(jobs: Sequence[JobTokens], padding: int = 0) -> PackedBatch:
    """Lay each sequence into a line of its own, padded on the right to the longest.

    At least two lines of two tokens; lines added for that count as the last job's.
    """
    sequences = [sequence for job in jobs for sequence in job.sequences]
    width = max([2, *map(len, sequences)])
    lines = max(2, len(sequences))
    ids = torch.full((lines, width), padding, dtype=torch.int64)
    index = torch.full((lines, width), PADDING, dtype=torch.int32)
    segments = [0]
    line = 0
    for job in jobs:
        token = job.offset
        for sequence in job.sequences:
            ids[line, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
            index[line, : len(sequence)] = torch.arange(token, token + len(sequence))
            token += len(sequence)
            line += 1
        segments.append(line)
    segments[-1] = lines
    starts = [line * width for line in range(lines + 1)]
    return PackedBatch(
        input_ids=ids,
        position_ids=torch.arange(width).expand(lines, width).contiguous(),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=torch.tensor(width, dtype=torch.int32),
        segments=torch.tensor(segments, dtype=torch.int32),
        token_index=index,
        compared=pad(compared, padding) if (compared := _compared(jobs)) else None,
        **_losses(jobs, starts),
    )


def _pairs(jobs: Sequence[JobTokens]) -> tuple[Pairs | SequenceLoss, ...]:
    pairs = tuple(
        pairs_of(index, job.preference, job.labels, IGNORED)
        for index, job in enumerate(jobs)
        if job.preference is not None and job.sequences
    )
    objectives = [job.objective for job in jobs]
    if not any(objectives):
        return pairs
    counts = [
        [sum(label != IGNORED for label in labels[job.shift :]) for labels in job.labels]
        for job in jobs
    ]
    return pairs + sequence_losses(objectives, [job.offset for job in jobs], counts)


def _compared(jobs: Sequence[JobTokens]) -> list[JobTokens]:
    """The jobs with what the base is asked for alone; none where it is asked for nothing."""
    asked = [own.job for own in _pairs(jobs) if own.needs_base]
    nothing: dict[str, Any] = {"sequences": (), "labels": ()}
    return [
        replace(job, preference=None, objective=None, **({} if index in asked else nothing))
        for index, job in enumerate(jobs)
        if asked
    ]


def _losses(jobs: Sequence[JobTokens], starts: Sequence[int]) -> dict[str, Any]:
    """What a row's losses and keys are, whose sequences begin at `starts`."""
    rows: list[int] = []
    targets: list[int] = []
    runs = [0]
    sequence = 0
    for job in jobs:
        scores = job.preference is not None and job.preference.method == "reward"
        for labels in job.labels:
            start = starts[sequence]
            for position, label in enumerate(labels[job.shift :]):
                if label != IGNORED:
                    rows.append(start + position)
                    targets.append(label + SIGNED if scores else label)
            sequence += 1
        runs.append(len(rows))
    firsts, keys = [job.offset for job in jobs], [[job.seed, job.step] for job in jobs]
    counts = [end - start for start, end in pairwise(runs)]
    return {
        "keys": torch.tensor(keys, dtype=torch.int64).reshape(-1, 2),
        "target_rows": torch.tensor(rows, dtype=torch.int64),
        "targets": torch.tensor(targets, dtype=torch.int64),
        "target_segments": torch.tensor(runs, dtype=torch.int32),
        "pairs": _pairs(jobs),
        "terms": terms_of([job.objective for job in jobs], firsts, counts),
    }
