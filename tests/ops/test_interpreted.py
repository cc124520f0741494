"""The operators on generated kernels: the files in interpreted/, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted
from tests.conftest import SLOW

HERE = Path(__file__).parent


def test_interpreted():
    """All tests but slow ones pass under Triton's interpreter."""
    interpreted.run(*interpreted.files(HERE))


@pytest.mark.slow
def test_slow_ones_interpreted():
    """Every plan with and without dropout, where the quick tests take some."""
    words = ("SLOW", "sampled(")
    named = {HERE.parent / line.partition("::")[0] for line in SLOW}
    files = [
        path
        for path in interpreted.files(HERE)
        if path in named or any(word in path.read_text() for word in words)
    ]

    interpreted.run(*files, marked="slow")
