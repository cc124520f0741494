"""Measure how far a base's own numbers move when the same tokens stand in another batch.

A sum rounds otherwise in another shape, so a base without adapters gives the same tokens other last
bits alone than in a padded batch. How far they move depends on the base: on its depth, its scales,
and on what it computes in a narrower dtype than its weights have. `verify` and the probe measure
this noise by disturbing the embeddings. `verify` widens its bound by the noise, up to a ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


@contextmanager
def disturbed_embeddings(model: nn.Module, draw: int = 0) -> Iterator[None]:
    """Move what every embedding of a model gives by about a rounding, within this context.

    draw   the number of the disturbance, which decides it
    """
    generator = torch.Generator().manual_seed(draw)

    def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        unit = 2 * torch.finfo(output.dtype).eps
        noise = torch.randn(output.shape, generator=generator).to(output.device, torch.float64)
        return output + (output.double() * unit * noise).to(output.dtype)

    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.register_forward_hook(disturb))
        yield
