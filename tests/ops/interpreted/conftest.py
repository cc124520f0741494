"""Tests of the operators on kernels, under Triton's interpreter; see tests/codegen/interpreted."""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    """CPU tensors go through kernels, whose files lie in this test run's own cache folder."""
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN, or all ones."""
    from tlora_fx.ops.kernels import launch

    def empty(shape, *, dtype, device):
        value = float("nan") if dtype.is_floating_point else 255
        return torch.full(shape, value, dtype=dtype, device=device)

    monkeypatch.setattr(launch, "empty", empty)
