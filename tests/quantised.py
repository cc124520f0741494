"""Stored matrices decoded by the definition of their forms, without the libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Dettmers et al., "QLoRA" (2023), appendix E.
NF4 = (
    -1.0, -0.6961928010, -0.5250730515, -0.3949174881, -0.2844413817, -0.1847734302, -0.0910500363,
    0.0, 0.0795802996, 0.1609302014, 0.2461123019, 0.3379152417, 0.4407098293, 0.5626170039,
    0.7229568362, 1.0,
)  # fmt: skip


def decoded(form: str, stored: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The matrix [out, in] in float32."""
    values, scales = stored
    if form != "nf4":
        return values.float() * scales
    table, codes = torch.tensor(NF4, device=values.device), values.flatten().long()
    numbers = torch.stack((table[codes >> 4], table[codes & 15]), -1)
    return (numbers.view(-1, 64) * scales[:, None]).view(*shape)
