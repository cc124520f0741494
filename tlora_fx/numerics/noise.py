"""Measure how far a base's own numbers move when the same tokens stand in another batch.

A sum rounds otherwise in another shape, so a base without adapters gives the same tokens other last
bits alone than in a padded batch. How far they move depends on the base: on its depth, its scales,
and on what it computes in a narrower dtype than its weights have. `verify` and the probe measure
this noise by disturbing the embeddings. `verify` widens its bound by the noise, up to a ceiling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Two layouts are two draws of the rounding error. Fused against alone is a third one, which may
# well be some times larger than the two happened to lie apart.
FACTOR = 8.0


def lifted(floor: float, noise: float, ceiling: float) -> float:
    """The largest difference that passes where the base itself moves by `noise`.

    floor     passes whatever the noise
    ceiling   never passed; noise beyond it is no rounding but another result, and lifts nothing
    """
    if not noise <= ceiling:
        return floor
    return max(floor, min(FACTOR * noise, ceiling))


def disturb_embeddings(model: nn.Module, draw: int = 0) -> list[RemovableHandle]:
    """Move what every embedding of a model gives by about a rounding, until the hooks are removed.

    draw   the number of the disturbance, which decides it
    """
    generator = torch.Generator().manual_seed(draw)

    def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        unit = 2 * torch.finfo(output.dtype).eps
        noise = torch.randn(output.shape, generator=generator).to(output.device, torch.float64)
        return output + (output.double() * unit * noise).to(output.dtype)

    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return [table.register_forward_hook(disturb) for table in tables]
