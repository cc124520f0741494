"""Rows as tensors; on a GPU with a little padding, so that their lengths come again.

What serves a row of one length is kept and started again for the next one: kernels' launches, and
what `torch.compile` made. Rows of real data are hardly ever of one length, so they are padded to
one of few: by a thirty-second at most, a sixty-fourth on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlora_fx.model.batch import SMALLEST, JobTokens, PackedBatch, pack, pad, repeating_length


@dataclass(slots=True)
class Rows:
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
