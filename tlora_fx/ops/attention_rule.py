"""Formula of an attention, in numbers, and the implementation that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tlora_fx.errors import AttentionShapeError
from tlora_fx.ops.dropout import threshold_of
from tlora_fx.ops.tables import check_rate


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
        if self.window < 0:
            return 0, stop if self.causal else length
        first, last = start - self.window + 1, stop + self.window - 1
        return max(0, first), stop if self.causal else min(last, length)

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """Mask of the keys that each query does not see, bool [queries, keys]; or None."""
        distance = (
            torch.arange(queries.start, queries.stop, device=device)[:, None]
            - torch.arange(keys.start, keys.stop, device=device)
        )  # fmt: skip
        hidden = None
        if self.causal:
            hidden = distance < 0
        behind, ahead = queries.stop - 1 - keys.start, keys.stop - 1 - queries.start
        if 0 < self.window <= (behind if self.causal else max(behind, ahead)):
            far = distance.abs() >= self.window
            hidden = far if hidden is None else hidden | far
        return hidden


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and log-sum-exp: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


#: Attends a row in place of `packed_attention`: from q, k, v, rule and sinks to [T, H, Dv], or None
#: where the operator is to do it itself.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionRule, Tensor | None], Tensor | None]
_REPLACEMENT: ContextVar[Attend | None] = ContextVar("replacement", default=None)


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    """Inside, each `packed_attention` asks this first, in the order of the model's layers.

    For rows without gradients: no backward knows of it.
    """
    token = _REPLACEMENT.set(attend)
    try:
        yield
    finally:
        _REPLACEMENT.reset(token)


def replacement() -> Attend | None:
    """The implementation that `attending_by` has set; None outside."""
    return _REPLACEMENT.get()
