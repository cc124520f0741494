"""Branches on lengths and counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.silence.modules import Cases, attended, blocks, causal, decoder, distance, with_part


class Keeps(nn.Module):
    """Reads only the newest tokens where there are many (Doge)."""

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Attention to a window that exists for long sequences only."""
        seen = distance(x) >= 0
        if x.shape[1] > 16:
            seen = seen & (distance(x) < 16)
        return attended(x, seen)


GUARDS: Cases = {
    **{
        f"longer than {limit}": decoder(
            lambda l, x, n=limit: causal(l, x) * (2 if x.shape[1] > n else 1)
        )
        for limit in (3, 12, 64, 1000)
    },
    "longer than 64, by token": decoder(lambda l, x: x * 2 if x.shape[1] > 64 else x),
    "exactly 40": decoder(lambda l, x: x * 2 if x.shape[1] == 40 else x),
    "not 11": decoder(lambda l, x: x * 2 if x.shape[1] != 11 else x),
    "odd lengths": decoder(lambda l, x: x * (1 + x.shape[1] % 2)),
    "a branch on odd lengths": decoder(lambda l, x: x * 2 if x.shape[1] % 2 else x),
    "blocks of 32, at least one": decoder(lambda l, x: x * max(1, x.shape[1] // 32)),
    "at most 32": decoder(lambda l, x: x * min(x.shape[1], 32)),
    "a loop over blocks": decoder(lambda l, x: sum([x] * (x.shape[1] // 32 + 1))),
    "the newest 16 only": with_part(Keeps),
    "the first three": decoder(lambda l, x: x + x[:, : min(3, x.shape[1])].sum(1, keepdim=True)),
    "many values": decoder(lambda l, x: x * 2 if x.numel() > 500 else x),
    "many lines": decoder(lambda l, x: x * 2 if x.shape[0] > 2 else x),
    "one line": decoder(lambda l, x: x if x.shape[0] == 1 else x * 2),
    "an even number of lines": decoder(lambda l, x: x if x.shape[0] % 2 else x * 2),
    "more lines than tokens": decoder(lambda l, x: x if x.shape[0] > x.shape[1] else x * 2),
    "a logarithm of the length": decoder(lambda l, x: x * math.ceil(math.log2(x.shape[1] + 1))),
    "a table that ends": decoder(
        lambda l, x: x + (torch.arange(64, device=x.device)[: x.shape[1], None] > 20)
        if x.shape[1] <= 64
        else x
    ),
    "an error for long ones": decoder(lambda l, x: (_require(x.shape[1] < 100), x)[1]),
    "long by bool": decoder(lambda l, x: x * (1 + (x.shape[1] > 64))),
    "long by int": decoder(lambda l, x: x * (1 + int(x.shape[1] > 64))),
    "long by range": decoder(lambda l, x: x * len(range(0, x.shape[1], 32))),
    "blocks of three, branching": decoder(
        lambda l, x: blocks(x, 3) if x.shape[1] % 3 == 0 else x
    ),
}  # fmt: skip


def _require(fact: bool) -> None:
    if not fact:
        raise ValueError("too long")
