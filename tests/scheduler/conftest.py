"""A local executor for each test that asks for one."""

from __future__ import annotations

import pytest

from tests.scheduler.local_bench import Bench


@pytest.fixture
def bench(tmp_path):
    """Made when called, closed at the end."""
    made = []

    def make(**specs):
        made.append(Bench(tmp_path, **specs))
        return made[-1]

    yield make
    for one in made:
        one.close()
