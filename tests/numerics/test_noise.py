"""What the noise of a base lets pass."""

from __future__ import annotations

import pytest

from tlora_fx.numerics.noise import FACTOR, lifted


@pytest.mark.parametrize(
    ("noise", "passes"),
    [(0.0, 1e-6), (1e-8, 1e-6), (1e-6, FACTOR * 1e-6), (4e-5, 5e-5), (6e-5, 1e-6)],
    ids=["none", "little", "some", "much", "no-rounding"],
)
def test_noise_lifts_a_floor_up_to_a_ceiling_and_not_from_beyond_it(noise, passes):
    """A base that moves by more than the ceiling is not excused."""
    assert lifted(1e-6, noise, 5e-5) == passes


def test_noise_that_is_no_number_lifts_nothing():
    """A base that gives NaN is held to the floor."""
    assert lifted(1e-6, float("nan"), 5e-5) == 1e-6
