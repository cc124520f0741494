"""Positions that a model makes when it is given none."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.silence.cases.right import Learned
from tests.silence.modules import Cases, Decoder, seeded


class FromOne(Learned):
    """Positions from 1."""

    first = 1


class FromTheEnd(Learned):
    """Positions that count down."""

    def default(self, ids: Tensor) -> Tensor:
        """To the last token."""
        return torch.arange(ids.shape[1] - 1, -1, -1, device=ids.device)[None]


class EverySecond(Learned):
    """Positions two apart, up to 90."""

    def default(self, ids: Tensor) -> Tensor:
        """0, 0, 1, 1, and so on."""
        return torch.arange(ids.shape[1], device=ids.device)[None] // 2


class Counted(Learned):
    """Positions by a count of what is no padding, where 0 is."""

    def default(self, ids: Tensor) -> Tensor:
        """How many before are not 0."""
        return (ids != 0).long().cumsum(1)


class ByLines(Learned):
    """Positions that begin behind the number of lines."""

    def default(self, ids: Tensor) -> Tensor:
        """From B on."""
        return torch.arange(ids.shape[1], device=ids.device)[None] + ids.shape[0]


class Otherwise(Learned):
    """Adds nothing where it is given no positions."""

    def embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Tokens, and places that were given."""
        known = self.embed(ids)
        return known if positions is None else known + self.places(positions)


class Cached(Decoder):
    """Scales what is not cached, which is what `use_cache` says."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = True
    ) -> Tensor:
        """Logits that differ with a cache."""
        return super().forward(input_ids) * (2 if use_cache else 1)


POSITIONS: Cases = {
    "from 1": seeded(FromOne),
    "from the end": seeded(FromTheEnd),
    "every second": seeded(EverySecond),
    "of tokens that count": seeded(Counted),
    "behind the lines": seeded(ByLines),
    "none by default": seeded(Otherwise),
    "another result with a cache": seeded(Cached),
}
