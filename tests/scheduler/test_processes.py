"""What a server of workers leaves behind before it forks."""

from __future__ import annotations

from torch.utils import _triton

from tlora_fx.scheduler.local.processes import forget_no_device


def test_workers_ask_anew_whether_triton_has_a_device():
    """A library asked while devices were hidden, and torch kept the answer."""
    _triton.has_triton()
    assert _triton.has_triton.cache_info().currsize

    forget_no_device()

    assert not _triton.has_triton.cache_info().currsize
