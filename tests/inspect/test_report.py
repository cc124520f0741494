"""`report.txt`: nothing silent."""

from __future__ import annotations

import dataclasses

import pytest

from tlora_fx.inspect.schema import NoteEntry
from tlora_fx.inspect.text import render_report


@pytest.mark.parametrize("name", ["quickstart", "odd", "many", "padded"])
def test_the_report_reads_as_accepted(name, request, golden):
    """The whole text, as somebody looked at it."""
    golden(f"inspect/{name}-report.txt", render_report(request.getfixturevalue(f"{name}_listing")))


def test_every_reason_of_a_branch_is_told(odd, odd_listing):
    """What lower-adapters could not lower stands in the report, with its reason."""
    report = " ".join(render_report(odd_listing).split())
    reasons = [
        text.partition("as it is: ")[2] for by, text in odd.group.notes if "as it is" in text
    ]

    assert reasons
    assert all(reason in report for reason in reasons)


def test_a_part_that_a_job_replaces_is_told_once(odd_listing):
    """The base's lm_head, of which one job trains a copy."""
    report = render_report(odd_listing)

    assert report.count("job 'extras' does not use the base's lm_head") == 1


def test_a_reason_for_padded_rows_is_told(quickstart_listing):
    """The driver's note on why rows are not packed, lines and all."""
    note = NoteEntry("trace", "rows are padded, not packed: attention mixes\n  node  bmm")
    listing = dataclasses.replace(quickstart_listing, form="batch", notes=[note])
    report = render_report(listing)

    assert "padded: each sequence has a line" in report
    assert "  rows are padded, not packed: attention mixes\n      node  bmm" in report


def test_notes_of_unknown_passes_are_told(quickstart_listing):
    """A pass that somebody adds is heard too."""
    listing = dataclasses.replace(quickstart_listing, notes=[NoteEntry("my-pass", "something odd")])

    assert "my-pass: something odd" in render_report(listing)
