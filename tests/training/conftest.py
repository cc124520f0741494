"""Strict mode, and small micro-batches, for tests that ask for them."""

from __future__ import annotations

import pytest

from tests.training.clients import SMALL_MICRO_TOKENS
from tlora_fx.ops.kernels.select import strict
from tlora_fx.training import cycle, datums


@pytest.fixture
def strictly():
    """Equal work has equal bits; else they depend on how rows are made up."""
    with strict():
        yield


@pytest.fixture
def small_micro_batches(monkeypatch):
    """Long requests are cut, and small ones packed, at an eighth of the tokens."""
    ahead = cycle.AHEAD_BYTES * SMALL_MICRO_TOKENS // cycle.MICRO_TOKENS
    monkeypatch.setattr(cycle, "AHEAD_BYTES", ahead)
    for module in (cycle, datums):
        monkeypatch.setattr(module, "MICRO_TOKENS", SMALL_MICRO_TOKENS)
