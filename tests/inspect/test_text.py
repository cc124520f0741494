"""`ssm.txt` and `report.txt`: what a person reads of a fused model."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tlora_fx.inspect.schema import Listing, NoteEntry
from tlora_fx.inspect.text import WIDTH, listing_lines, render_report, render_text


@pytest.mark.parametrize("name", ["quickstart", "odd", "many"])
def test_the_listing_reads_as_accepted(name, request, golden):
    """The whole text, as somebody looked at it."""
    golden(f"inspect/{name}.txt", render_text(request.getfixturevalue(f"{name}_listing")))


@pytest.mark.parametrize("name", ["quickstart", "odd", "many", "padded"])
def test_no_line_is_wider_than_the_listing(name, request):
    """Every line fits, whatever the jobs are."""
    text = render_text(request.getfixturevalue(f"{name}_listing"))

    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.slow
def test_thirty_two_jobs_on_a_long_base_fit_400_lines(many_listing):
    """Layers are folded and jobs grouped."""
    assert len(render_text(many_listing).splitlines()) <= 400


def test_sixty_four_jobs_of_different_targets_stay_readable(narrow_listing):
    """Jobs without any in common have letters of their own, and no line overflows."""
    first = narrow_listing.jobs[0]
    jobs = [dataclasses.replace(first, name=f"{'x' * 90}-{n:02d}") for n in range(64)]
    blocks = []
    for block in narrow_listing.blocks:
        rows = []
        for place, row in enumerate(block.rows):
            one = row.branches[:1]
            mine = [job for n, job in enumerate(jobs) if (n >> (place % 6)) & 1]
            branches = [dataclasses.replace(b, job=job.name) for b in one for job in mine]
            rows.append(dataclasses.replace(row, branches=branches))
        blocks.append(dataclasses.replace(block, rows=rows))
    text = render_text(dataclasses.replace(narrow_listing, jobs=jobs, blocks=blocks))

    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(text.splitlines()) <= 400


def test_interleaved_layers_are_told_apart(odd_listing):
    """Gemma 2's two kinds of layers have a headline each."""
    text = render_text(odd_listing)

    assert "layers.{0,2} ×2" in text
    assert "soft cap" in text


def test_a_branch_that_runs_as_it_is_says_so(odd_listing):
    """The job's glyph stands beside the reason."""
    line = next(
        line for line in render_text(odd_listing).splitlines() if "(as it is: DoRA)" in line
    )

    assert "●dora (as it is: DoRA)" in line


def test_layers_that_are_not_folded_but_alike_are_shown_once(quickstart_listing):
    """A listing does not repeat itself where only the code is repeated."""
    folded = next(block for block in quickstart_listing.blocks if block.layers)
    alone = [
        dataclasses.replace(folded, name="Root", layers=[layer], folded=False)
        for layer in folded.layers
    ]
    before = [block for block in quickstart_listing.blocks if not block.layers]
    blocks = [before[0], *alone, *before[1:]]
    text = render_text(dataclasses.replace(quickstart_listing, blocks=blocks))

    assert "layers.0-3 ×4   alike in this listing, but not folded" in text
    assert text.count("mlp.down_proj") == 1


@pytest.mark.parametrize("width", [72, 80, 100, 120])
def test_a_narrow_listing_leaves_columns_out(odd_listing, width):
    """What matters least goes, and every line fits."""
    lines = ["".join(text for text, _ in line) for line in listing_lines(odd_listing, width)]

    assert max(map(len, lines)) <= width
    assert any("self_attn.q_proj" in line and "■" in line for line in lines)


def test_an_unknown_cost_is_a_question_mark(quickstart_listing):
    """No number is better than a wrong one."""
    first = quickstart_listing.blocks[0]
    rows = [dataclasses.replace(row, flop_per_token=None) for row in first.rows]
    blocks = [dataclasses.replace(first, rows=rows), *quickstart_listing.blocks[1:]]
    text = render_text(dataclasses.replace(quickstart_listing, blocks=blocks))

    assert any("embed_tokens" in line and " ? " in line for line in text.splitlines())


def test_a_listing_of_an_older_version_has_no_training_cost(quickstart_listing):
    """It says so by a question mark."""
    data = json.loads(quickstart_listing.to_json())
    for name in ("training_flop_per_token", "training_flop_per_length"):
        del data["totals"][name]
    text = render_text(Listing.from_json(json.dumps(data)))

    assert text.splitlines()[1].endswith("training ?")


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
