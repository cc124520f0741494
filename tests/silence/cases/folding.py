"""Layers that their model treats otherwise, each by its number."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.silence.modules import HIDDEN, Cases, Decoder, Layer, Make, causal, seeded


class ByIndex(Decoder):
    """An outer loop that treats each layer by its number."""

    def __init__(self, treat: Callable[[Any, int, Any, Tensor], Tensor], layers: int = 4) -> None:
        super().__init__(causal, layers=layers)
        self.treat = treat
        self.settings = types.SimpleNamespace(
            scales=[1.0, 1.0, 0.5, 2.0], kinds=["full", "full", "none", "full"]
        )
        self.register_buffer("tables", torch.rand(4, HIDDEN))

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        for index, layer in enumerate(self.layers):
            x = self.treat(self, index, layer, x)
        return x


class Shared(Decoder):
    """Layers that are one, or have one linear."""

    def __init__(self, what: str) -> None:
        super().__init__(causal, layers=3)
        if what == "layer":
            self.layers[2] = self.layers[0]
        for layer in self.layers if what == "linear" else ():
            layer.out = self.layers[0].out
        for layer in self.layers if what == "weight" else ():
            layer.out.weight = self.layers[0].out.weight


class Numbered(Layer):
    """A layer that knows its number, and reads it as a text, a key or an attribute's name."""

    def __init__(self, index: int, how: str) -> None:
        super().__init__(causal)
        self.index, self.how = index, how
        self.scale_0 = self.scale_1 = 1.0
        self.scale_2 = 3.0

    def forward(self, x: Tensor) -> Tensor:
        """Another scale for the third."""
        scales = {
            "key": lambda: {0: 1.0, 1: 1.0, 2: 3.0}[self.index],
            "text": lambda: len("x" * int(f"{self.index}")) + 1.0,
            "name": lambda: getattr(self, f"scale_{self.index}"),
            "list": lambda: [1.0, 1.0, 3.0][self.index],
        }
        return super().forward(x * scales[self.how]())


class NumberedStack(Decoder):
    """Layers that know their numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(index, how) for index in range(3))


def by_index(treat: Callable[[Any, int, Any, Tensor], Tensor], **options: Any) -> Make:
    """Makes a decoder with an outer loop."""
    return seeded(lambda: ByIndex(treat, **options))


FOLDING: Cases = {
    "scaled by the index": by_index(lambda m, i, layer, x: layer(x * (1 + i))),
    "scaled by a list": by_index(lambda m, i, layer, x: layer(x * m.settings.scales[i])),
    "a kind by a list": by_index(
        lambda m, i, layer, x: layer(x) if m.settings.kinds[i] == "full" else x
    ),
    "a table by the index": by_index(lambda m, i, layer, x: layer(x * m.tables[i])),
    "the last layer otherwise": by_index(
        lambda m, i, layer, x: layer(x) if i < len(m.layers) - 1 else layer(x) * 2
    ),
    "every second layer twice": by_index(
        lambda m, i, layer, x: layer(layer(x)) if i % 2 else layer(x)
    ),
    "a layer skipped": by_index(lambda m, i, layer, x: x if i == 2 else layer(x)),
    "in reverse": by_index(lambda m, i, layer, x: m.layers[-1 - i](x)),
    "a layer of another's output": by_index(lambda m, i, layer, x: x + layer(m.layers[0](x))),
    "one layer twice": seeded(lambda: Shared("layer")),
    "one linear in all layers": seeded(lambda: Shared("linear")),
    "one weight in all layers": seeded(lambda: Shared("weight")),
    **{
        f"a number read as a {how}": seeded(lambda how=how: NumberedStack(how))
        for how in ("key", "text", "name", "list")
    },
}
