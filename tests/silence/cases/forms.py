"""Bases that are right, in forms that hand-written models have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.silence.modules import HIDDEN, Cases, Decoder, causal, decoder, seeded
from tests.silence.oracle import VOCABULARY


class Named(Decoder):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__(causal)

    def forward(self, input_ids: Tensor) -> Any:
        """Logits by name."""
        return {"logits": super().forward(input_ids)}


class TwoHeads(Decoder):
    """Logits of two heads, summed."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.other = nn.Linear(HIDDEN, VOCABULARY)

    def logits(self, x: Tensor) -> Tensor:
        """Both."""
        return self.head(x) + self.other(x)


FORMS: Cases = {
    "logits in a dict": seeded(Named),
    "two heads": seeded(TwoHeads),
    "a Fourier transform of features": decoder(
        lambda l, x: causal(l, x) + torch.fft.fft(x, dim=-1).real
    ),
    "the largest of features so far": decoder(lambda l, x: causal(l, x) + x.cummax(-1).values),
    "features multiplied up": decoder(lambda l, x: causal(l, x) + x.cumprod(-1)),
}
