"""Strict mode for tests that ask for it."""

from __future__ import annotations

import pytest

from tlora_fx.ops.kernels.select import strict


@pytest.fixture
def strictly():
    """Equal work has equal bits; else they depend on how rows are made up."""
    with strict():
        yield
