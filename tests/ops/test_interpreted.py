"""The operators on generated kernels: the files in interpreted/, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import interpreted

PROCESSES = 2


@pytest.mark.parametrize("part", range(PROCESSES))
def test_interpreted(part):
    """All tests pass under Triton's interpreter."""
    interpreted.run(*interpreted.files(Path(__file__).parent)[part::PROCESSES])
