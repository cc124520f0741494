"""Each job's loss, from the last hidden state to a sum, without the logits of the whole row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20


class ChunkedLoss(nn.Module):
    """Sums of token losses, a job each.

    head         the graph from the last hidden state to the logits
    vocabulary   size of the logits' last dimension
    tables       names of the row tables that the head takes after the hidden state
    lines        whether jobs own lines, as in batch form: each row is then a line of one token
    """

    def __init__(
        self, head: nn.Module, vocabulary: int, tables: tuple[str, ...], *, lines: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.tables = tables
        self.width_dim = 1 if lines else 0
        self.chunk_rows = max(64, CHUNK_BYTES // (4 * vocabulary))

    def forward(
        self,
        hidden: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        target_segments: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        """The loss sum of each job.

        hidden            [1, T, H], in batch form [B, S, H]
        target_rows       int64 [N], flat positions with a target
        targets           int64 [N]
        target_segments   int32 [J + 1] on the CPU
        tables            the row's tables, as named by `tables`
        returns           [J], float32, or wider where the logits are
        """
        given = dict(zip(self.tables, tables, strict=True))
        flat = hidden.reshape(-1, hidden.shape[-1])
        bounds = target_segments.tolist()
        losses = []
        for start in range(0, bounds[-1], self.chunk_rows):
            stop = min(start + self.chunk_rows, bounds[-1])
            rows = target_rows[start:stop]
            losses.append(
                checkpoint(
                    self._chunk,
                    flat.index_select(0, rows).unsqueeze(self.width_dim),
                    targets[start:stop],
                    self._tables_of(given, rows, target_segments, start, stop),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        if not losses:
            wide = torch.promote_types(torch.float32, hidden.dtype)
            return flat[:0].sum().to(wide).expand(len(bounds) - 1)
        every = torch.cat(losses)
        return torch.stack([every[a:b].sum() for a, b in pairwise(bounds)])

    def _tables_of(
        self, given: dict[str, Tensor], rows: Tensor, segments: Tensor, start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """The row's tables for the rows of one chunk."""
        made: dict[str, Any] = dict(given)
        if "segments" in given:
            made["segments"] = (segments.clamp(start, stop) - start).to(torch.int32)
        if "token_index" in given:
            index = given["token_index"].reshape(-1).index_select(0, rows)
            made["token_index"] = index.unsqueeze(self.width_dim)
        return tuple(made[name] for name in self.tables)

    def _chunk(self, hidden: Tensor, targets: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        logits = self.head(hidden, *tables).squeeze(self.width_dim)
        wide = torch.promote_types(torch.float32, logits.dtype)
        return F.cross_entropy(logits.to(wide), targets, reduction="none")
