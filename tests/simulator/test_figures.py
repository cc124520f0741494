"""Figures as inline SVG."""

from __future__ import annotations

import csv
import io
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_fx.simulator.figures import Figure, Series, axis_of, bars, lines, round_step, shown

values = st.floats(0, 1e12, allow_nan=False)
rows = st.lists(st.none() | values, min_size=3, max_size=3)


def parsed(svg):
    return ElementTree.fromstring(svg)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(rows, min_size=1, max_size=4), name=st.text("<&>\"' ab", max_size=9))
def test_any_values_make_a_figure_that_is_well_formed(rows, name):
    """None, zeros and large numbers, and names with marks; nothing leaves the frame."""
    series = [Series(name, row, row, row, x=[1.0, 2.0, 5.0], colour=9) for row in rows]

    for svg in (lines(name, name, name, series), bars(name, name, ["a", name, "c"], series)):
        page = parsed(svg)
        assert page.get("aria-label") == name
        for box in page.iter("rect"):
            assert float(box.get("height")) >= 0
            assert math.isfinite(float(box.get("y")))


@given(values=st.lists(values, max_size=9), log=st.booleans())
def test_an_axis_holds_its_values(values, log):
    """Between its ends, and its ticks too."""
    axis = axis_of(values, 10.0, 200.0, log=log)

    assert all(10.0 <= axis.at(value) <= 200.0 for value in values)
    assert all(10.0 <= axis.at(tick) <= 200.0 for tick in axis.ticks())
    assert len(axis.ticks()) <= 15


@pytest.mark.parametrize(("given", "step"), [(0.0, 1.0), (3.0, 5.0), (0.2, 0.2), (70.0, 100.0)])
def test_steps_are_round(given, step):
    """1, 2 or 5 times a power of ten."""
    assert round_step(given) == pytest.approx(step)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.5, "0.5"), (12.345, "12.3"), (1234.5, "1,234"), (45678, "45.7k"),
        (3.2e6, "3.2M"), (0.0001, "1.0e-04"), (None, "–"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_numbers_are_shown_short(value, text):
    """Three digits."""
    assert shown(value) == text


def test_a_figure_gives_its_numbers_as_csv():
    """With its columns."""
    figure = Figure("f", "F", "", "<svg/>", ("policy", "x"), (("a,b", 1.5), ("c", None)))

    assert list(csv.reader(io.StringIO(figure.csv()))) == [
        ["policy", "x"], ["a,b", "1.5"], ["c", ""],
    ]  # fmt: skip
