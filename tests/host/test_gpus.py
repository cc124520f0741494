"""GPUs of this machine, before torch is imported."""

from __future__ import annotations

import pytest

from tlora_fx.host import gpus
from tlora_fx.host.gpus import largest_gpu_bytes, visible_gpus


@pytest.mark.parametrize(
    ("listed", "count"),
    [(None, 4), ("0,2", 2), ("", 0), ("1,-1,2", 1), ("GPU-8d2a,GPU-77", 2), ("0,7", 1)],
)
def test_gpus_are_counted_as_cuda_counts_them(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int
) -> None:
    """What stands behind a wrong entry is not seen."""
    monkeypatch.setattr(gpus, "_memory_sizes", lambda: [80, 80, 40, 80])

    assert visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == count


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not there."""
    monkeypatch.setattr(gpus, "NVML", "libno-such-library.so.1")

    assert visible_gpus({}) == largest_gpu_bytes() == 0
