"""What users do wrong is told: what, where, what was expected, what to do."""

from __future__ import annotations

import pytest

from tests.cli.mistakes import Mistake, mistakes, told_here, wrong

MISTAKES = list(mistakes())


def test_there_are_two_hundred_of_them() -> None:
    """Each once."""
    assert len(MISTAKES) >= 200
    assert len({(each.name, each.told, *each.files) for each in MISTAKES}) == len(MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told(mistake: Mistake) -> None:
    """With the words that lead out of it, and no traceback."""
    assert not wrong(mistake, *told_here(mistake))
