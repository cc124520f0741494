"""Nano-batches over several processes: numbers, and what lies between a start and its wait."""

from __future__ import annotations

import pytest

from tests.parallel.nano_cases import compiled_in_nano_batches, cut_in_nano_batches
from tests.parallel.processes import run_processes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What two processes found that hold pieces of each matrix, with compiled layers."""
    return run_processes(2, compiled_in_nano_batches, tmp_path_factory.mktemp("compiled"))


def test_losses_and_gradients_are_those_of_one_nano_batch(tmp_path):
    """In float64, for 2, 3 and more nano-batches than sequences."""
    for errors in run_processes(2, cut_in_nano_batches, tmp_path):
        assert len(errors) == 3
        assert max(errors) <= 1e-12


def test_compiled_losses_and_gradients_are_those_of_one_nano_batch(compiled):
    """The same bound."""
    assert max(found["error"] for found in compiled) <= 1e-12


def test_all_processes_have_one_schedule(compiled):
    """Collectives of one group must start in one order."""
    assert compiled[0]["orders"] == compiled[1]["orders"]


@pytest.mark.parametrize("graph", [0, 1], ids=["forward", "backward"])
def test_collectives_run_behind_the_other_nano_batch_s_computation(compiled, graph):
    """Something heavy stands between each start and its wait, but where the region's layers end."""
    order = compiled[0]["orders"][graph]
    starts = [place for place, letter in enumerate(order) if letter == "s"]
    waits = [place for place, letter in enumerate(order) if letter == "w"]

    hidden = ["c" in order[a:b] for a, b in zip(starts, waits, strict=True)]
    assert len(starts) == (8 if graph == 0 else 6)
    assert all(hidden[:-1])
    assert hidden[-1] == (graph == 1)
