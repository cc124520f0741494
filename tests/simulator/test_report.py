"""The report of replays: page, figures and numbers."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import groupby, pairwise

import pytest

from tests.simulator.replayed import base, outcome
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import ReportNotWritable
from tlora_fx.simulator.report import Report, gpus_csv, jobs_csv, page, write_report
from tlora_fx.simulator.sweep import SWEEPS, JobSource, plan_of, run

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
    assert tags.seen.count("figure") == len(report.figures) == 17


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
    """The mean over seeds is geometric."""
    first, second = reported().ratios

    assert (first.baseline, second.baseline) == ("mlora-fifo", "megatron")
    assert first.throughput.mean == pytest.approx(4 / 3)
    assert second.completion.mean == pytest.approx(4.0)


def test_a_report_of_one_policy_compares_nothing():
    """No ratios, no ablation."""
    report = reported(("megatron",), 1)

    assert report.ratios == []
    assert "Against the paper" not in page(report)


@pytest.fixture(scope="module")
def recorded():
    """The report of two short replays that say who ran where."""
    scenario = replace(base(), source=JobSource(jobs=60), cluster=Cluster(16))
    plan = plan_of(scenario, ("tlora", "megatron"), 1, recorded=True)
    return Report(plan, {one: run(one) for one in plan.scenarios()}, "")


def test_what_gpus_did_adds_up_to_what_jobs_did(recorded):
    """From the files alone: GPUs hold one group at a time, and every step was done on some."""
    jobs = list(csv.DictReader(jobs_csv(recorded).splitlines()))
    held = list(csv.DictReader(gpus_csv(recorded).splitlines()))

    for policy, outcomes in recorded.policies.items():
        mine = [row for row in held if row["policy"] == policy]
        steps = Counter()
        for _, rows in groupby(sorted(mine, key=_group), key=_group):
            first = next(rows)
            for name, count in zip(
                first["jobs"].split(";"), first["steps"].split(";"), strict=True
            ):
                steps[name] += float(count)
        for job in (row for row in jobs if row["policy"] == policy):
            assert job["outcome"] == "finished"
            assert steps[job["job"]] == pytest.approx(float(job["steps"]), rel=1e-9)
        spans = sorted(
            (int(r["gpu"]), float(r["begin seconds"]), float(r["end seconds"])) for r in mine
        )
        for before, after in pairwise(spans):
            assert before[0] != after[0] or before[2] <= after[1] + 1e-6
        seconds = sum(end - begin for _, begin, end in spans)
        whole = outcomes[0].summary.whole
        assert seconds == pytest.approx(whole.allocated_gpu_seconds, rel=1e-9)


def _group(row):
    return row["group"], float(row["begin seconds"])


def test_a_gantt_chart_shows_who_ran_where(recorded, tmp_path):
    """A rectangle a run of GPUs, and its numbers beside it; the page leads to all files."""
    text = write_report(recorded, tmp_path).read_text(encoding="utf-8")

    (chart,) = (one for one in recorded.figures if one.name == "gantt")
    assert chart.svg.count("<title>") > len(chart.rows) // 2
    assert all(first <= last < 16 for _, first, last, *_ in chart.rows)
    assert {"jobs.csv", "gpus.csv", "gantt.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert 'href="gpus.csv"' in text


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    """With its name."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(ReportNotWritable, match="file"):
        write_report(reported(("tlora",), 1), tmp_path / "file")
