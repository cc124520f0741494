"""A small base is computed by one thread, where our command line may choose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tlora_fx.host.threads import thread_rules
from tlora_fx.runtime.launching.cpu_threads import (
    SMALL_MATRIX,
    few_threads,
    mean_matrix,
    on_few_threads,
    settle_threads,
)

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    """Two, and our command line may choose."""
    before = torch.get_num_threads(), thread_rules.adapts
    torch.set_num_threads(2)
    thread_rules.adapts = True
    yield
    torch.set_num_threads(before[0])
    thread_rules.adapts = before[1]


def base_of(width):
    """A base of two square matrices, on meta as a base before it is loaded."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(10**6, 8), nn.Linear(width, width), nn.Linear(width, width)
        )


def test_only_matrices_that_tokens_are_multiplied_with_count():
    """Tables of embeddings are looked up, vectors are added."""
    assert mean_matrix(base_of(16)) == 256
    assert mean_matrix(nn.LayerNorm(4)) == 0


@pytest.mark.parametrize(("width", "threads"), [(256, 1), (257, 2)])
def test_a_small_base_has_one_thread(two_threads, width, threads):
    """Up to a bound."""
    assert (width**2 <= SMALL_MATRIX) == (threads == 1)
    settle_threads(base_of(width), CPU)

    assert torch.get_num_threads() == threads


def test_a_base_on_a_gpu_changes_no_threads(two_threads):
    """The host's threads do other work there."""
    settle_threads(base_of(8), torch.device("cuda"))

    assert torch.get_num_threads() == 2


def test_where_the_user_has_said_how_many_nothing_is_changed(two_threads, monkeypatch):
    """By a variable, or by a number that torch does not take itself."""
    thread_rules.adapts = False
    settle_threads(base_of(8), CPU)
    assert torch.get_num_threads() == 2

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with few_threads(base_of(8), CPU):
        assert torch.get_num_threads() == 2

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    with few_threads(base_of(8), CPU):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("width", "threads"), [(256, 1), (257, 2)])
def test_programs_that_use_us_get_their_threads_back(two_threads, monkeypatch, width, threads):
    """One thread computes a small base, as under our command line: a job has the same numbers."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    thread_rules.adapts = False

    class Step:
        model = SimpleNamespace(backbone=SimpleNamespace(model=base_of(width)))
        mesh = SimpleNamespace(device=CPU)

        @on_few_threads
        def compute(self):
            return torch.get_num_threads()

    assert Step().compute() == threads
    assert torch.get_num_threads() == 2
