"""State that a forward reads and writes, and generators that belong to no job."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.silence.modules import HIDDEN, Cases, Decoder, attended, decoder, seeded, with_part


class Seen(nn.Module):
    """A buffer that counts calls: reassigned, or written in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.how = how

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Weaker each time."""
        if self.how == "reassigned":
            self.seen = self.seen + 1
        elif self.how == "in place":
            self.seen += 1
        elif self.how == "data":
            self.seen.data = self.seen.data + 1
        else:
            self.seen.copy_(0.9 * self.seen + 0.1 * x.detach().mean())
        return x / (1 + self.seen)


class Counter(nn.Module):
    """Counts its calls in Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.calls, self.known, self.how = 0, [], how
        self.turn = itertools.cycle([1.0, 2.0, 3.0])

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Weaker each time."""
        if self.how == "list":
            self.known.append(1)
            return x / len(self.known)
        if self.how == "iterator":
            return x * next(self.turn)
        self.calls += 1
        if self.how == "warm-up":
            return x if self.calls < 3 else x * 2
        return x / self.calls


class Remembers(nn.Module):
    """Keeps something of the first call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.kept: Any = None
        self.by_length: dict[int, Any] = {}
        self.how = how

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Scaled by what was kept."""
        if self.how == "mean":
            if self.kept is None:
                self.kept = x.detach().mean()
            return x * self.kept
        if self.how == "length":
            if self.kept is None:
                self.kept = x.shape[1]
            return x * self.kept
        if self.how == "mask":
            if self.kept is None or self.kept.shape[0] < x.shape[1]:
                self.kept = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return attended(x, self.kept[: x.shape[1], : x.shape[1]].to(x.device))
        if x.shape[1] not in self.by_length:
            self.by_length[x.shape[1]] = len(self.by_length)
        return x * (1 + self.by_length[x.shape[1]])


class Dropped(nn.Module):
    """Skips its layer by chance."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """x or nothing."""
        return x * 0 if self.draw() < 0.5 else x


def by_numpy() -> float:
    """A number of NumPy's generator."""
    import numpy as np

    return float(np.random.rand())


_GLOBAL = {"calls": 0}


def counted(x: Tensor) -> Tensor:
    """Counts calls in a global."""
    _GLOBAL["calls"] += 1
    return x / _GLOBAL["calls"]


def defaulted(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006  (is what is meant)
    """Counts calls in a default."""
    calls.append(1)
    return x / len(calls)


class Swaps(nn.Module):
    """Changes places with another module each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """The first one, which is another each time."""
        self.first, self.second = self.second, self.first
        return self.first(x)


class Warmed(Decoder):
    """A model whose own number of calls scales its logits."""

    calls = 0

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> Tensor:
        """Louder each time."""
        type(self).calls += 1
        return super().forward(input_ids) * (1 + type(self).calls)


class Spectral(nn.Module):
    """A linear with spectral norm, whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """The linear."""
        return F.linear(x, self.lin.weight)


STATE: Cases = {
    **{
        f"a buffer, {how}": with_part(lambda h=how: Seen(h))
        for how in ("reassigned", "in place", "data", "copied")
    },
    **{
        f"a counter by {how}": with_part(lambda h=how: Counter(h))
        for how in ("number", "list", "iterator", "warm-up")
    },
    **{
        f"what was first, its {how}": with_part(lambda h=how: Remembers(h))
        for how in ("mean", "length", "mask", "turn")
    },
    "layer drop by Python": with_part(lambda: Dropped(random.random)),
    "layer drop by NumPy": with_part(lambda: Dropped(by_numpy)),
    "layer drop by torch": with_part(lambda: Dropped(lambda: torch.rand(()).item())),
    "noise": decoder(lambda l, x: x + torch.randn_like(x)),
    "dropout by torch's generator": decoder(lambda l, x: x * (torch.rand_like(x) > 0.5)),
    "dropout of ids": decoder(lambda l, x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "random order": decoder(lambda l, x: x[..., torch.randperm(8, device=x.device)]),
    "a global": decoder(lambda l, x: counted(x)),
    "a default": decoder(lambda l, x: defaulted(x)),
    "a class attribute": seeded(Warmed),
    "modules that change places": with_part(Swaps),
    "spectral norm": with_part(Spectral),
    "batch norm": with_part(lambda: Normalised(nn.BatchNorm1d(HIDDEN))),
    "instance norm": with_part(lambda: Normalised(nn.InstanceNorm1d(HIDDEN))),
    "group norm": with_part(lambda: Normalised(nn.GroupNorm(2, HIDDEN))),
}


class Normalised(nn.Module):
    """A norm over [B, H, S]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Over tokens too."""
        return self.norm(x.transpose(1, 2)).transpose(1, 2)
