"""Trace apart from what a caller's code has set in torch, and from its other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

# torch.export replaces methods of nn.Module while it traces: two traces would restore each other's.
_TRACING = threading.RLock()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Trace one model at a time, outside of inference mode, with tensors on the CPU by default."""
    device = torch.get_default_device()
    default = nullcontext() if device.type == "cpu" else torch.device("cpu")
    with _TRACING, torch.inference_mode(False), default:
        yield
