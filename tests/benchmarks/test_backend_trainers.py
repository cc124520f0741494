"""`benchmarks.backend_trainers` says what does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backend_trainers import ARMS, OURS, Run, faults


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"graphs": 4}, "4 graphs, Inductor 3"),
        ({"breaks": 1}, "1 breaks, Inductor 0"),
        ({"losses": [2.0, 1.1]}, "losses are 0.1 from"),
        ({"losses": [2.0, float("nan")]}, "losses are nan from"),
        ({"graphs": 2}, ""),
    ],
)
def test_what_ours_does_worse_is_a_fault(change, told):
    """More graphs, more breaks, other losses; fewer graphs are none."""
    run = Run(losses=[2.0, 1.0], steps=[1.0, 0.1], graphs=3)
    runs = dict.fromkeys(ARMS, run) | {OURS: replace(run, **change)}

    assert told in "".join(faults("sft", runs))
    assert bool(faults("sft", runs)) == bool(told)


def test_steps_that_compile_are_not_timed():
    """Nor is what one long step takes."""
    assert Run().milliseconds([60.0, 30.0, 0.010, 0.012, 0.5]) == pytest.approx(12)
