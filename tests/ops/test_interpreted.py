"""The operators on generated kernels: the files in interpreted/, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

HERE = Path(__file__).parent


def test_interpreted():
    """All tests but slow ones pass under Triton's interpreter."""
    interpreted.run(*interpreted.files(HERE))


@pytest.mark.slow
def test_slow_ones_interpreted():
    """Every plan with and without dropout, where the quick tests take one of both."""
    files = [path for path in interpreted.files(HERE) if "SLOW" in path.read_text()]

    interpreted.run(*files, marked="slow")
