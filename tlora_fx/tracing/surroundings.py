"""Work apart from what a caller's code has set in torch, and trace apart from its other threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

# torch.export replaces methods of nn.Module while it traces: two traces would restore each other's.
_TRACING = threading.RLock()
# A process that was forked has not the thread that traces.
os.register_at_fork(after_in_child=_TRACING._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def default_modes() -> Iterator[None]:
    """Be outside of inference mode, with tensors on the CPU by default."""
    device = torch.get_default_device()
    default = nullcontext() if device.type == "cpu" else torch.device("cpu")
    with torch.inference_mode(False), default:
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Trace one model at a time, in the default modes."""
    with _TRACING, default_modes():
        yield
