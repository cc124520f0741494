"""Bases that must run, and equal training alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.silence.modules import (
    HIDDEN,
    Attention,
    Cases,
    Decoder,
    attended,
    before,
    causal,
    decoder,
    distance,
    eager,
    heads,
    mixes,
    rows,
    seeded,
    with_part,
)


class Experts(nn.Module):
    """All experts on every token, weighted by a router."""

    def __init__(self, top: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.top = top

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """A sum over experts."""
        weights = self.router(x).softmax(-1)
        least = weights.topk(self.top, -1).values.amin(-1, keepdim=True)
        weights = weights * (weights >= least)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts))


class CausalConv(nn.Module):
    """A convolution over four tokens, each and those before it."""

    def __init__(self, left: int = 3, right: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN)
        self.room = (left, right)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Padded at the left."""
        return self.conv(F.pad(x.transpose(1, 2), self.room)).transpose(1, 2)


def rotary(layer: Any, x: Tensor) -> Tensor:
    """Causal attention whose queries turn with their place."""
    angle = rows(x)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype, device=x.device)
    first, second = heads(x).chunk(2, -1)
    turned = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
    scores = (turned @ turned.transpose(2, 3)).masked_fill(distance(x) < 0, -torch.inf)
    return (scores.softmax(-1) @ heads(x)).transpose(1, 2).flatten(2)


class Learned(Decoder):
    """Positions that are learned; by default from `first` on."""

    first = 0

    def embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Tokens and places."""
        if positions is None:
            positions = self.default(ids)
        return self.embed(ids) + self.places(positions)

    def default(self, ids: Tensor) -> Tensor:
        """The positions of ids that came with none."""
        return torch.arange(ids.shape[1], device=ids.device)[None] + self.first


class Tied(Decoder):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Rounded(Decoder):
    """Scales by what is known of a token by itself."""

    def embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Every third token is louder."""
        return self.embed(ids) * (1 + (ids % 3)[..., None])


RIGHT_EVERYWHERE: Cases = {
    **mixes(
        plain=lambda x: x,
        gelu=F.gelu,
        rms=lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        gated=lambda x: torch.cat(x.chunk(2, -1)[::-1], -1).sigmoid() * x,
        straight_through=lambda x: x + (x.round() - x).detach(),
        frozen_norm=lambda x: x / (1 + x.detach().abs().amax(-1, keepdim=True)),
        features_sorted=lambda x: x.sort(-1).values,
        features_summed=lambda x: x.cumsum(-1),
        constant=lambda x: x * torch.tensor([0.5, 2.0] * 4, dtype=x.dtype, device=x.device),
        einsum=lambda x: torch.einsum("bsh,bsh->bs", x, x)[..., None] * x,
        dtype_branch=lambda x: x * 2 if x.dtype == torch.float64 else x * 3,
        log_sigmoid=F.logsigmoid,
        other_names=lambda x: torch.multiply(torch.subtract(x, 1), torch.divide(x, 3)).absolute(),
        viewed_as=lambda x: x * x[:, :, None].sigmoid().view_as(x).reshape_as(other=x),
    ),
    "causal convolution": with_part(CausalConv),
    "experts": with_part(Experts),
    "top two experts": with_part(lambda: Experts(2)),
    "tied head": seeded(Tied),
    "token numbers": seeded(Rounded),
    "learned positions": seeded(Learned),
    "four layers": decoder(layers=4),
    "zero outputs": decoder(zero=True),
}

RIGHT_IN_BATCH_FORM: Cases = {
    # Its eager attention hides tokens by itself, which a packed row cannot know.
    "attention of the interface": seeded(
        lambda: Decoder(make=lambda: Attention(eager()), layers=2)
    ),
    "causal attention": decoder(causal, layers=2),
    "causal attention, one layer": decoder(causal),
    "causal attention behind zeros": decoder(causal, zero=True),
    "rotary attention": decoder(rotary),
    "window": decoder(lambda l, x: attended(x, (distance(x) >= 0) & (distance(x) < 5))),
    "chunks": decoder(
        lambda l, x: attended(
            x, (distance(x) >= 0) & ((rows(x)[:, None] // 4) == (rows(x)[None] // 4))
        )
    ),
    "alibi": decoder(lambda l, x: attended(x, distance(x) >= 0, -0.3 * distance(x))),
    "causal by tril": decoder(
        lambda l, x: attended(
            x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        )
    ),
    "causal by an additive mask": decoder(
        lambda l, x: attended(
            x, None, torch.full((x.shape[1],) * 2, -1e9, dtype=x.dtype, device=x.device).triu(1)
        )
    ),
    "torch's attention": decoder(
        lambda l, x: (
            F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
    ),
    "token before": decoder(lambda l, x: x + before(x)),
    "token before by cat": decoder(lambda l, x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1)),
    "running sum": decoder(lambda l, x: x.cumsum(1) / 20),
    "decay": decoder(
        lambda l, x: torch.where(distance(x) >= 0, 0.7 ** distance(x).abs(), 0.0).to(x.dtype) @ x
    ),
}
