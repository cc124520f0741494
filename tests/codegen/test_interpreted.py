"""Kernels give the right numbers: the files in interpreted/, in a process of their own."""

from __future__ import annotations

from pathlib import Path

from tests import interpreted


def test_interpreted():
    """All tests pass under Triton's interpreter."""
    interpreted.run(*interpreted.files(Path(__file__).parent))
