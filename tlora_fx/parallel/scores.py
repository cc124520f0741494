"""Scores of rows without dropout and gradients, as runners hand them on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class RowScores:
    """The scores of some rows.

    losses      float64 [J] on the process's device: sums of token losses
    predicted   by the index of a row that this process ran to its last layer: int64 [N] on the
                CPU, the most likely token at each target row
    """

    losses: Tensor
    predicted: dict[int, Tensor]
