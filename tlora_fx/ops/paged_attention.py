"""Attention over keys and values that stay in pages, for sequences that grow by one token a row.

A row of whole sequences attends as it does in training, and its keys and values are kept. A row of
single tokens attends to what is kept: on CUDA by a kernel that reads the pages; else, and where
scores are capped or have sinks, pages are gathered, and scores are taken in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlora_fx.ops.attention_rule import AttentionRule, attending_by, wide_dtype


def page_tokens(device: torch.device) -> int:
    """Tokens of a page: the kernel on CUDA reads pages of multiples of 64."""
    return 64 if device.type == "cuda" else 16


@dataclass(frozen=True, slots=True)
class RowPages:
    """Where the tokens of one row are kept, and what they see.

    slots     int64 [n]: page * page_tokens + offset of the row's first n tokens; others are padding
    tables    int32 [n, P]: pages of each token's sequence, in order; None: the row holds whole
              sequences, which see themselves
    lengths   int32 [n]: tokens of each sequence, this one included
    longest   of `lengths`
    """

    slots: Tensor
    tables: Tensor | None = None
    lengths: Tensor | None = None
    longest: int = 0

    def to(self, device: torch.device) -> RowPages:
        """The same on a device."""
        return self._changed(lambda each: each.to(device, non_blocking=True))

    def cloned(self) -> RowPages:
        """The same in tensors of its own."""
        return self._changed(torch.clone)

    def overwrite(self, other: RowPages) -> None:
        """Take another row's numbers, of the same sizes, into the same tensors."""
        for name in ("slots", "tables", "lengths"):
            own = getattr(self, name)
            if own is not None:
                own.copy_(getattr(other, name), non_blocking=True)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> RowPages:
        tables = None if self.tables is None else change(self.tables)
        lengths = None if self.lengths is None else change(self.lengths)
        return RowPages(change(self.slots), tables, lengths, self.longest)


@dataclass(slots=True)
class KeyValuePages:
    """Keys and values of a model's attentions, in pages; allocated by the first row.

    pages         of each attention
    page_tokens   tokens of a page
    """

    pages: int
    page_tokens: int
    _pools: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @contextmanager
    def row(self, row: RowPages) -> Iterator[None]:
        """Inside, one forward without gradients keeps and reads keys and values."""
        calls = 0

        def attend(
            q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
        ) -> Tensor | None:
            nonlocal calls
            count = len(row.slots)
            keys, values = self._pool(calls, k, v)
            calls += 1
            keys.flatten(0, 1).index_copy_(0, row.slots, k[:count])
            values.flatten(0, 1).index_copy_(0, row.slots, v[:count])
            if row.tables is None:
                return None
            out = q.new_zeros(len(q), q.shape[1], v.shape[2])
            out[:count] = attend_pages(q[:count], keys, values, row, rule, sinks)
            return out

        with attending_by(attend):
            yield

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages onto others."""
        for pool in (each for pair in self._pools for each in pair):
            pool[targets] = pool[sources]

    def _pool(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [pages, page_tokens, Hkv, D] and values [pages, page_tokens, Hkv, Dv]."""
        if index == len(self._pools):
            shape = self.pages, self.page_tokens
            self._pools.append(
                (k.new_zeros(*shape, *k.shape[1:]), v.new_zeros(*shape, *v.shape[1:]))
            )
        return self._pools[index]


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, row: RowPages, rule: AttentionRule,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of the last token of each sequence to all of its tokens.

    q        [n, H, D]
    keys     [pages, page_tokens, Hkv, D]
    values   [pages, page_tokens, Hkv, Dv]
    row      of single tokens
    rule     causal, without dropout
    returns  [n, H, Dv] in q's type
    """
    assert row.tables is not None
    assert row.lengths is not None
    if q.is_cuda and q.dtype != torch.float64 and sinks is None and not rule.softcap:
        from tlora_fx.ops.kernels import paged_attention  # Triton is not everywhere.

        read = row.tables, row.lengths, row.longest
        return paged_attention.attend(q, keys, values, *read, rule.scale, rule.window)
    tables = row.tables[:, : -(-row.longest // keys.shape[1])].long()
    k, v = keys[tables].flatten(1, 2), values[tables].flatten(1, 2)
    behind = row.lengths[:, None] - 1 - torch.arange(k.shape[1], device=q.device)
    hidden = behind < 0
    if rule.window > 0:
        hidden |= behind >= rule.window
    wide, groups = wide_dtype(q.dtype), k.shape[2]
    heads = torch.unflatten(q.to(wide), 1, (groups, q.shape[1] // groups))
    scores = torch.einsum("bgsd,blgd->bgsl", heads, k.to(wide)) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    total = torch.logsumexp(scores, -1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide).view(groups, -1))
    weights = torch.exp(scores - total.unsqueeze(-1))
    # What others left in a page, which may be NaN, is read by nobody.
    seen = v.to(wide).masked_fill(hidden[..., None, None], 0)
    return torch.einsum("bgsl,blge->bgse", weights, seen).flatten(1, 2).to(q.dtype)
