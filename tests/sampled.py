"""Of many cases of one claim, some are tried in each run of the tests; `make slow` tries all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], one_of: int = 3) -> list[Any]:
    """Parameters of a test: one of so many is quick, the others are marked `slow`.

    cases   names, or tuples of several parameters
    """
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.slow] if number % one_of else []
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
