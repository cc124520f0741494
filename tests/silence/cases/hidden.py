"""Mixers that a short probe of the base alone does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.silence.modules import (
    HIDDEN,
    Cases,
    Decoder,
    Ending,
    Make,
    ahead,
    attended,
    blocks,
    decoder,
    distance,
    rows,
    seeded,
    with_part,
)


def late(mix: Callable[[Any, Tensor], Tensor], first: int = 16) -> Callable[[Any, Tensor], Tensor]:
    """A mixer of tokens from `first` on."""
    return lambda layer, x: torch.where((rows(x) >= first)[:, None], mix(layer, x), x)


def lines_mixed(layer: Any, x: Tensor) -> Tensor:
    """Each line less the mean of all."""
    return x - x.mean(0, keepdim=True)


def looks_at(count: int) -> Callable[[Any, Tensor], Tensor]:
    """The token so many places later."""
    return lambda layer, x: x + F.pad(x, (0, 0, 0, count))[:, count:]


class Unsure(nn.Module):
    """A mixer that a gate of zero hides."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor], size: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN, bias=False)
        nn.init.constant_(self.gate.weight, size)
        self.mix = mix

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """x, and what the gate lets through."""
        return x + self.gate(self.mix(layer, x))


class Rare(Decoder):
    """Looks ahead from one token only."""

    def embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Every token 3 has something of the token after it."""
        x = self.embed(ids)
        return torch.where((ids == 3)[..., None], looks_at(1)(None, x), x)


def backward_only(layer: Any, x: Tensor) -> Tensor:
    """Nothing of other tokens forward; their gradients backward."""
    total = x.sum(1, keepdim=True)
    return x + total - total.detach()


def backward_lines(layer: Any, x: Tensor) -> Tensor:
    """Nothing of other lines forward; their gradients backward."""
    total = x.sum(0, keepdim=True)
    return x + total - total.detach()


def gated(mix: Callable[[Any, Tensor], Tensor], size: float = 0.0) -> Make:
    """A decoder whose mixer stands behind a gate of zero."""
    return with_part(lambda: Unsure(mix, size))


HIDDEN_MIXERS: Cases = {
    "mean behind zero outputs": decoder(lambda l, x: x - x.mean(1, keepdim=True), zero=True),
    "all tokens behind zero outputs": decoder(lambda l, x: attended(x, None), zero=True),
    "lines behind zero outputs": decoder(lines_mixed, zero=True),
    "mean behind a gate": gated(lambda l, x: x.mean(1, keepdim=True).expand_as(x)),
    "one ahead behind a gate": gated(looks_at(1)),
    "one ahead behind a tiny gate": gated(looks_at(1), 1e-14),
    "flip behind a gate": gated(lambda l, x: x.flip(1)),
    "length behind a gate": gated(lambda l, x: x * x.shape[1]),
    "long branch behind a gate": gated(lambda l, x: x * 2 if x.shape[1] > 64 else x),
    **{f"{count} ahead": decoder(looks_at(count)) for count in (1, 7, 13, 30)},
    "attention 13 ahead": decoder(ahead(13)),
    "attention to exactly 20 ahead": decoder(
        lambda l, x: attended(x, (distance(x) >= 0) | (distance(x) == -20))
    ),
    **{f"blocks of {size}": decoder(lambda l, x, n=size: blocks(x, n)) for size in (2, 3, 16, 33)},
    "blocks of three behind a gate": gated(lambda l, x: blocks(x, 3)),
    "ahead from the 16th on": decoder(late(looks_at(1))),
    "ahead from the 50th on": decoder(late(looks_at(1), 50)),
    "ahead from every 16th": decoder(
        lambda l, x: torch.where((rows(x) % 16 == 15)[:, None], looks_at(1)(l, x), x)
    ),
    "mean from the 20th on": decoder(late(lambda l, x: x - x.mean(1, keepdim=True), 20)),
    "length from the 20th on": decoder(late(lambda l, x: x * x.shape[1], 20)),
    "lines from the 20th on": decoder(late(lines_mixed, 20)),
    "ahead from a rare token": seeded(Rare),
    "backward from all tokens": decoder(backward_only),
    "backward from all lines": decoder(backward_lines),
    "mean behind the layers": seeded(lambda: Ending(lambda x: x - x.mean(1, keepdim=True))),
    "ahead behind the layers": seeded(lambda: Ending(lambda x: looks_at(1)(None, x))),
    "running sum behind the layers": seeded(lambda: Ending(lambda x: x.cumsum(1) / 9)),
}
