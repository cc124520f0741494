"""Kernels give the right numbers: each file in interpreted/ in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted


@pytest.mark.parametrize("file", interpreted.files(Path(__file__).parent), ids=lambda p: p.stem)
def test_interpreted(file):
    """All its tests pass under Triton's interpreter."""
    interpreted.run(file)
