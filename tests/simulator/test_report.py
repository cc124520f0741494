"""The report of replays: page, figures, numbers and reasons."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from tests.simulator.replayed import base, outcome
from tlora_fx.errors import ReportNotWritable
from tlora_fx.simulator.report import Report, page, place, reasons, write_report
from tlora_fx.simulator.sweep import SWEEPS, plan_of

POLICIES = ("tlora", "mlora-fifo", "megatron", "no-scheduler", "no-kernel-fuser")


def reported(policies=POLICIES, seeds=3, sweeps=(), **others):
    plan = plan_of(base(), policies, seeds, sweeps)
    return Report(plan, {one: outcome(one, **others) for one in plan.scenarios()}, "tlora-fx <x>")


class Tags(HTMLParser):
    """Open tags, what they refer to, and their text."""

    VOID = ("meta", "path", "circle", "rect", "polyline", "br")

    def __init__(self):
        super().__init__()
        self.open, self.links, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in {"href", "src"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_a_report_is_a_page_with_the_numbers_beside_it(tmp_path):
    """Every link leads to a file of the folder; no script, no request."""
    report = reported(sweeps=SWEEPS)
    path = write_report(report, tmp_path / "report")

    tags = Tags()
    text = path.read_text(encoding="utf-8")
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert all((path.parent / link).exists() for link in tags.links)
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert tags.seen.count("figure") == len(report.figures) == 16


def test_the_numbers_of_each_figure_stand_in_its_csv(tmp_path):
    """Throughput of each policy, with the spread of the seeds."""
    folder = write_report(reported(), tmp_path).parent

    rows = list(csv.DictReader((folder / "throughput.csv").open(encoding="utf-8")))
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert float(rows[0]["mean"]) == pytest.approx(40.4)
    assert (float(rows[0]["least"]), float(rows[0]["most"])) == (40.0, pytest.approx(40.8))
    metrics = list(csv.DictReader((folder / "metrics.csv").open(encoding="utf-8")))
    assert len(metrics) == len(POLICIES) * 3
    told = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert len(told["replays"]) == len(POLICIES) * 3
    assert told["synthetic"] is True


def test_the_page_says_that_it_is_synthetic_and_what_was_left_out():
    """Reasons, counts, choices with their defaults; text is only text."""
    text = page(reported())

    assert ">SYNTHETIC<" in text
    assert "negative duration" in text
    assert "1,200" in text
    assert "max(1, round(duration / T_solo))" in text
    assert "&lt;b&gt;Poisson" in text
    assert "tlora-fx &lt;x&gt;" in text


def test_ratios_are_compared_seed_by_seed():
    """With the paper's range beside them."""
    first, second = reported().ratios

    assert (first.baseline, second.baseline) == ("mlora-fifo", "megatron")
    assert first.throughput.mean == pytest.approx(4 / 3)
    assert second.completion.mean == pytest.approx(4.0)
    assert (place(1.1, (1.2, 1.8)), place(2.0, (1.2, 1.8))) == (
        "below the paper's 1.2–1.8",
        "above the paper's 1.2–1.8",
    )


def test_reasons_are_numbers_of_the_replays():
    """Load, room, what the parts bring, broken bounds."""
    report = reported()
    text = "\n".join(reasons(report.policies, report.ratios))

    assert "2.34 times the GPU time" in text
    assert "20% of the jobs under mlora-fifo" in text
    assert "within 1.2–1.8" in text
    assert "The kernel fuser, by what its absence costs: throughput 1.60×" in text
    assert "for eight together with fused kernels" in text


def test_reasons_of_an_idle_cluster_say_so():
    """Where the jobs take less than there is."""
    span = outcome(base()).summary.loaded
    report = reported(whole=span.__class__(seconds=9.0, lone_gpu_seconds=1000.0))

    assert any("near what arrives" in text for text in reasons(report.policies, report.ratios))


def test_a_report_of_one_policy_compares_nothing():
    """No ratios, no reasons, no ablation."""
    report = reported(("megatron",), 1)

    assert report.ratios == []
    assert reasons(report.policies, report.ratios) == []
    assert "Against the paper" not in page(report)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    """With its name."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(ReportNotWritable, match="file"):
        write_report(reported(("tlora",), 1), tmp_path / "file")
