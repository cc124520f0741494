"""Kernels, and the operators on them: the folders `interpreted`, in a process of their own."""

from __future__ import annotations

import pytest

from tests import interpreted, sampled
from tests.conftest import HERE, SLOW

FILES = sorted(HERE.glob("*/interpreted/test_*.py"))


def test_interpreted():
    """All tests but slow ones pass under Triton's interpreter."""
    interpreted.run(*FILES)


@pytest.mark.slow
def test_slow_ones_interpreted():
    """Every plan with and without dropout, where quick tests take some; the other thirds, too."""
    words = ("SLOW", "sampled(")
    named = {HERE / line.partition("::")[0] for line in SLOW}
    if sampled.THIRD != sampled.ALL:
        named |= {HERE / name for name in sampled.LARGE}
    files = [path for path in FILES if path in named or any(w in path.read_text() for w in words)]

    interpreted.run(*files, marked="slow")
