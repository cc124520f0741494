"""Numbers and paths as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.inspect.marks import letters
from tlora_fx.inspect.wording import counted, layers_label, listed, scaled, spans


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (64, "64"), (0.5, "0.5"), (999, "999"), (999.7, "1.00 k"), (16386, "16.4 k"),
        (33_792_704, "33.8 M"), (999_960, "1.00 M"), (1_050_673_152, "1.05 G"), (2e12, "2.00 T"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_prefix(value, text):
    """Never 1000 of a smaller unit."""
    assert scaled(value) == text


def test_bytes_and_parameters_have_their_own_words():
    """GB for bytes, B for a billion parameters."""
    assert scaled(1_050_673_152, "B") == "1.05 GB"
    assert scaled(64, "B") == "64 B"
    assert counted(8_030_261_248) == "8.03 B"


@pytest.mark.parametrize(
    ("numbers", "label"),
    [
        ([0], "layers.0"),
        (range(32), "layers.0-31 ×32"),
        ([0, 2, 3], "layers.{0,2-3} ×3"),
        (range(0, 42, 2), "layers.{0,2,…,40} ×21"),
    ],
)
def test_layers_are_told_in_short(numbers, label):
    """Runs, and the ends of long lists."""
    assert layers_label([f"model.layers.{number}" for number in numbers]) == label


@given(st.sets(st.integers(0, 200), min_size=1))
def test_runs_hold_the_same_numbers(numbers):
    """No layer is lost in a range."""
    found: list[int] = []
    for first, last in spans(sorted(numbers)):
        found.extend(range(first, last + 1))

    assert found == sorted(numbers)


def test_many_values_are_a_range():
    """Ranks 2 to 128."""
    assert listed([2, 4, 8, 128]) == "2-128"
    assert listed([8, 16]) == "8, 16"
    assert listed([]) == "–"


def test_letters_never_run_out():
    """A to Z, then two of them."""
    marks = [letters(place) for place in range(64)]

    assert marks[0] == "A"
    assert marks[26] == "AA"
    assert len(set(marks)) == 64
