"""What packed attention computes: which keys a query sees, and how scores become weights."""

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.errors import AttentionShapeError, MaskKeyError, SegmentError
from tlora_fx.ops.masks import JobMasks
from tlora_fx.ops.philox import keep_scale, sixteens, threshold_of
from tlora_fx.ops.tables import INTEGERS, check_rate


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The numbers of one attention; `window` -1 and `softcap` 0 mean none."""

    scale: float
    causal: bool
    window: int
    softcap: float
    dropout: float

    def check(self) -> None:
        """Refuse numbers out of range; raises AttentionShapeError, MaskKeyError."""
        check_rate(self.dropout)
        if self.window != -1 and self.window < 1:
            raise AttentionShapeError(
                "a sliding window needs at least one token, or -1 for none", found=self.window
            )
        if self.softcap < 0 or not math.isfinite(self.scale):
            raise AttentionShapeError(
                "scale must be finite and softcap at least 0",
                found=f"scale {self.scale}, softcap {self.softcap}",
            )

    @property
    def drops(self) -> bool:
        """Whether any weight may be dropped."""
        return threshold_of(self.dropout) > 0

    def is_plain(self, length: int) -> bool:
        """Whether a sequence this long needs nothing but scaling and the causal mask."""
        windowed = 0 < self.window < length
        return not windowed and self.softcap == 0 and not self.drops

    def visible(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The run of keys that queries start:stop see between them."""
        first = max(0, start - self.window + 1) if self.window > 0 else 0
        return first, stop if self.causal else length

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """Which of these keys each query does not see, bool [queries, keys]; None: it sees all."""
        distance = (
            torch.arange(queries.start, queries.stop, device=device)[:, None]
            - torch.arange(keys.start, keys.stop, device=device)
        )  # fmt: skip
        hidden = None
        if self.causal:
            hidden = distance < 0
        if 0 < self.window <= queries.stop - 1 - keys.start:
            far = distance >= self.window
            hidden = far if hidden is None else hidden | far
        return hidden


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a row lie, and the masks of each sequence's job."""

    spans: tuple[tuple[int, int], ...]  # without empty ones
    masks: JobMasks

    @classmethod
    def read(
        cls,
        cu_seqlens: Tensor,
        segments: Tensor,
        keys: Tensor,
        token_index: Tensor,
        site: Tensor | None,
        dropout: float,
        tokens: int,
    ) -> "Sequences":
        """Check the tables of a row.

        raises  AttentionShapeError, SegmentError, MaskKeyError
        """
        if site is None and threshold_of(dropout):
            raise MaskKeyError("attention dropout needs the site of its masks", found=None)
        rates = torch.full((segments.numel() - 1,), dropout, dtype=torch.float64)
        number = 0 if site is None else site
        masks = JobMasks.read(rates, segments, keys, token_index, number, tokens)
        # After the tables of the host, which tell whether a graph is being captured.
        spans = _spans(cu_seqlens.tolist(), tokens)
        for start, stop in spans:
            if stop > masks.bounds[bisect_right(masks.bounds, start)]:
                raise SegmentError(
                    "a sequence reaches from one job into the next",
                    found=f"tokens {start}:{stop}, jobs at {masks.bounds}",
                )
        return cls(spans, masks)

    def keep(self, queries: slice, keys: slice, heads: int) -> Tensor:
        """Which attention weights stay, bool [heads, queries, keys]; slices are of the row."""
        masks = self.masks
        assert masks.token_index is not None
        job = bisect_right(masks.bounds, queries.start) - 1
        index = masks.token_index[keys]
        blocks, which = torch.unique(index >> 3, return_inverse=True)
        values = sixteens(
            masks.token_index[queries][:, None],
            blocks,
            blocks.new_full((), masks.site),
            torch.arange(1, heads + 1, device=index.device)[:, None, None],
            masks.keys[job],
        )
        keep = values.flatten(2) >= threshold_of(masks.rates[job]) - 32768
        return keep.index_select(2, which * 8 + (index & 7))

    @property
    def keep_scale(self) -> float:
        """What kept weights are multiplied by."""
        return keep_scale(self.masks.rates[0])


def _spans(bounds: list[int], tokens: int) -> tuple[tuple[int, int], ...]:
    pairs = tuple(itertools.pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != tokens or any(first > last for first, last in pairs):
        raise AttentionShapeError(
            "cu_seqlens must rise from 0 to the number of tokens",
            expected=f"0 ... {tokens}",
            found=bounds,
        )
    return tuple((first, last) for first, last in pairs if first < last)


def check_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse shapes and types that do not fit each other; raises AttentionShapeError."""
    if not (q.dim() == k.dim() == v.dim() == 3):
        raise AttentionShapeError(
            "q, k and v must be [T, heads, dim]",
            found=f"{q.dim()}, {k.dim()} and {v.dim()} dimensions",
        )
    fits = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    if not fits or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise AttentionShapeError(
            "q, k and v must share tokens, and q's heads be a multiple of k's",
            expected="q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]",
            found=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.dtype.is_floating_point:
        raise AttentionShapeError(
            "q, k and v need one floating type", found=f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in INTEGERS:
        raise AttentionShapeError(
            "cu_seqlens must be int32 [sequences + 1]",
            found=f"{cu_seqlens.dtype}{list(cu_seqlens.shape)}",
        )
