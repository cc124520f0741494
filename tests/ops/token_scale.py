"""What dropout multiplies the kept values of each token by."""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_fx.ops import keep_scale


def token_scale(rates: Tensor, segments: Tensor, tokens: int) -> Tensor:
    """Float64 [tokens] on the CPU, from a row's tables of rates [J] and segments [J + 1]."""
    scales = torch.tensor([keep_scale(rate) for rate in rates.tolist()], dtype=torch.float64)
    lengths = segments.cpu().clamp(max=tokens).diff()
    return scales.repeat_interleave(lengths, output_size=tokens)
