"""`benchmarks.recompute`: which arm the bound asks for, and that its code runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.recompute import Measured, arms_of, bound_of, main


def found(**arms):
    """Arms by their peak and seconds of a step."""
    return {name: Measured([seconds], peak) for name, (peak, seconds) in arms.items()}


def test_the_fastest_arm_with_a_low_peak_is_asked_for():
    """One that saves too little is faster, and does not count."""
    arms = arms_of(found(none=(100, 1.0), layers=(40, 1.4), much=(71, 1.01), less=(69, 1.05)))

    assert bound_of(arms)["arm"] == "less"
    assert bound_of(arms)["holds"]
    assert arms["less"]["time_ratio"]["median"] == pytest.approx(1.05)
    assert arms["less"]["peak_ratio"] == 0.69


def test_a_bound_that_nothing_reaches_does_not_hold():
    """No arm saves enough, or the one that does is too slow."""
    assert bound_of(arms_of(found(none=(100, 1.0), much=(90, 1.0)))) == {
        "peak_ratio": 0.7, "time_ratio": 1.08, "arm": None, "holds": False,
    }  # fmt: skip
    assert not bound_of(arms_of(found(none=(100, 1.0), slow=(50, 1.2))))["holds"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_it_runs_on_a_cpu(tmp_path):
    """Gradients of all arms are compared before any is timed; those that recompute keep less."""
    words = "--device cpu --layers 3 --hidden 64 --vocabulary 64 --length 8 --rounds 1"
    status = main(
        [*words.split(), "--dtype", "float32", "--budgets", "0.3", "--out", str(tmp_path)]
    )

    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert (status, result["cannot"]) == (0, {})
    assert list(result["arms"]) == ["none", "layers", "budget 0.3"]
    assert all(arm["gradients_apart"] < 1e-4 for arm in result["arms"].values())
    assert result["arms"]["layers"]["peak_ratio"] < result["arms"]["budget 0.3"]["peak_ratio"] < 0.5
