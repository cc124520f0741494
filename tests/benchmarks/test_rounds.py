"""The arms of `benchmarks.rounds` are whole rounds of trainers on the same samples."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.rounds import EXACT, FEW, LONGEST, SHORTEST, arms_of, measured
from benchmarks.step_mixes import Shape
from tlora_fx.model.row_ladder import repeating_length
from tlora_fx.runtime.run_folder import read_metrics

SHAPE = Shape(
    layers=2, hidden=32, intermediate=48, heads=4, key_value_heads=2, vocabulary=97, dtype="float32"
)
GIVEN = Namespace(warm_up=1, rounds=2, batch=1, jobs=3, device="cpu", eager=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    arms = arms_of(SHAPE, GIVEN, folder)
    return folder, arms, measured(arms, GIVEN)


def test_every_arm_trains_every_round_of_every_job(trained):
    """Warm-up and measured rounds are in each arm's metrics, with the same samples behind them."""
    folder, arms, _ = trained

    assert list(arms) == [EXACT, FEW]
    for run in arms[EXACT].runs:
        told = [read_metrics(folder / name / run.job.name / "metrics.jsonl") for name in arms]
        assert [row["step"] for row in told[0]] == [1, 2, 3]
        assert [row["tokens"] for row in told[0]] == [row["tokens"] for row in told[1]]
        assert told[0][0]["loss"] == pytest.approx(told[1][0]["loss"], rel=0.02)


def test_tokens_a_second_count_no_padding(trained):
    """They are the samples' tokens over the time of the rounds that count."""
    _, arms, found = trained

    for name, trainer in arms.items():
        tokens = [
            sum(len(s.input_ids) for run in trainer.runs for b in run.data.step(n) for s in b)
            for n in (1, 2)
        ]
        assert all(3 * SHORTEST <= count <= 3 * LONGEST for count in tokens)
        figures = found["arms"][name]
        ms, per_second = figures["ms"], figures["tokens_per_second"]
        low, high = min(tokens) / ms["most"] * 1e3, max(tokens) / ms["least"] * 1e3
        assert low * 0.999 <= per_second["least"] <= per_second["most"] <= high * 1.001


def test_rows_of_few_lengths_are_padded_to_them(trained):
    """And rows of exact ones are not."""
    _, arms, found = trained
    every = [
        sum(len(s.input_ids) for run in arms[FEW].runs for b in run.data.step(n) for s in b)
        for n in range(3)
    ]

    assert found["arms"][EXACT]["padding"] == 0
    expected = sum(map(repeating_length, every)) / sum(every) - 1
    assert found["arms"][FEW]["padding"] == pytest.approx(expected)
