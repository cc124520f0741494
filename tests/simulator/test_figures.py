"""Figures as inline SVG."""

from __future__ import annotations

import csv
import io
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.simulator.figures import (
    Block,
    Figure,
    Series,
    axis_of,
    bars,
    gantt,
    lines,
    round_step,
    rows_labelled,
    shortened,
    shown,
)

values = st.floats(0, 1e12, allow_nan=False)
rows = st.lists(st.none() | values, min_size=3, max_size=3)


def parsed(svg):
    return ElementTree.fromstring(svg)


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


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((5.38, 5.28), ["5.28", "5.3", "5.32", "5.34", "5.36", "5.38"]),
        ((5.3812, 5.3804), ["5.3804", "5.3806", "5.3808", "5.3810", "5.3812"]),
        ((2.5, 2.5), ["2.4", "2.45", "2.5", "2.55", "2.6"]),
        ((-0.5, 0.5), ["-0.5", "0", "0.5"]),
    ],
)
def test_an_axis_that_need_not_begin_at_zero_fits_its_values(values, texts):
    """It ends at round numbers near the values, and no two ticks read the same."""
    axis = axis_of(values, 0.0, 100.0, zero=False)

    assert [text for _, text in axis.labels()] == texts
    assert axis.low <= min(values) + 1e-9
    assert axis.high >= max(values) - 1e-9


@given(rows=st.integers(1, 5000))
def test_labels_of_rows_are_whole_and_do_not_overlap(rows):
    """Each is the number of a row, and no two are nearer than a label is high."""
    labelled = rows_labelled(rows, 228.0)

    assert labelled[0] == 0
    assert all(row < rows for row in labelled)
    assert labelled.step * 228.0 / rows >= 13 or labelled.step == 1
    assert len(labelled) <= 18


@given(name=st.text("abc-", min_size=1, max_size=40), length=st.integers(3, 30))
def test_a_long_name_keeps_its_beginning_and_its_end(name, length):
    """What stands for its middle is one mark; a name that fits stays as it is."""
    short = shortened(name, length)

    assert len(short) <= length
    if short != name:
        first, last = short.split("…")
        assert name.startswith(first)
        assert name.endswith(last)
        assert len(short) == length


def test_names_in_a_legend_stay_in_the_frame_however_long_they_are():
    """A long name is shortened; the whole is its title."""
    name = "x" * 300
    drawn = parsed(lines("t", "step", "", [Series(name, [1.0], x=[1])]))
    text = drawn.findall("text")[-1]

    assert float(text.get("x")) + 8 * len(text.text) <= 560
    assert text.find("title").text == name


def test_a_chart_of_many_names_has_a_label_for_each():
    """It grows, and the first stands at the top."""
    names = [f"job-{n:02}" for n in range(40)]
    blocks = [Block(row, row, 0.0, 60.0, row, "") for row in range(40)]
    drawn = parsed(gantt("t", "s", "", 40, blocks, [], names=names))
    labels = {text.text: text.get("y") for text in drawn.iter("text")}
    heights = [float(labels[name]) for name in names]

    assert heights == sorted(heights)
    assert heights[1] - heights[0] >= 13


@pytest.mark.parametrize("steps", [[1.0], [1.0, 2.0], [1.0, 3000.0]])
def test_steps_are_marked_by_whole_numbers(steps):
    """A run of one step has no step 1.05."""
    axis = axis_of(steps, 0.0, 100.0, zero=False, whole=True)

    assert all(tick == int(tick) for tick in axis.ticks())
    assert 0.0 <= axis.at(1.0) < 100.0


def test_each_row_of_a_chart_has_one_label():
    """Its number, or its name as far as there is room, in the middle of the row."""
    blocks = [Block(row, row, 0.0, 60.0, row, "") for row in (0, 1)]
    numbered = gantt("t", "s", "GPU", 2, blocks, [])
    named = gantt("t", "s", "", 2, blocks, [], names=["a", "a-name-that-is-much-too-long-7"])

    assert [text.text for text in parsed(numbered).iter("text")][-2:] == ["0", "1"]
    assert [text.text for text in parsed(named).iter("text")][-2:] == [
        "a",
        "a-name-that-…-too-long-7",
    ]


@pytest.mark.parametrize(("given", "step"), [(0.0, 1.0), (3.0, 5.0), (0.2, 0.2), (70.0, 100.0)])
def test_steps_are_round(given, step):
    """1, 2 or 5 times a power of ten."""
    assert round_step(given) == pytest.approx(step)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.5, "0.5"), (12.345, "12.3"), (1234.5, "1,234"), (45678, "45.7k"),
        (3.2e6, "3.2M"), (0.0001, "0.0001"), (0.00123, "0.0012"), (1e-5, "1e-5"), (1e30, "1e30"),
        (None, "–"), (float("nan"), "–"),
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
