"""Paragraphs on why replays give other numbers than the paper."""

from __future__ import annotations

from benchmarks.reasons import place, reasons
from tests.simulator.replayed import base, outcome
from tests.simulator.test_report import reported


def test_a_number_stands_beside_the_papers_range():
    """Below it or above it."""
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
    assert "what its absence costs. fused kernels and graphs: throughput 1.60×" in text
    assert "for eight together with fused kernels" in text


def test_reasons_of_an_idle_cluster_say_so():
    """Where the jobs take less than there is."""
    span = outcome(base()).summary.loaded
    report = reported(whole=span.__class__(seconds=9.0, lone_gpu_seconds=1000.0))

    assert any("near what arrives" in text for text in reasons(report.policies, report.ratios))


def test_one_policy_has_no_reasons():
    """There is nothing to compare it with."""
    report = reported(("megatron",), 1)

    assert reasons(report.policies, report.ratios) == []
