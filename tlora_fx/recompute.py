"""Layers whose inner values are computed again in the backward instead of being kept.

Dropout masks are keyed, so what is computed again is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def recomputed(forward: Forward) -> Forward:
    """Decorate a layer's forward: only its inputs are kept for the backward.

    forward   `forward(self, *tensors)`; what it is decorated of stays at `.inner`
    """

    @wraps(forward)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    run.inner = forward  # type: ignore[attr-defined]
    return run
