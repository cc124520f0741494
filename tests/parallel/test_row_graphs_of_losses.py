"""Rows whose tokens have other losses than cross entropy run as graphs, and give the same."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.groups import draw_samples, make_job, tiny_base
from tests.runtime.test_step_losses import job_of, scored
from tlora_fx.compiler import compile
from tlora_fx.parallel import cuda_graphs
from tlora_fx.parallel.cuda_graphs import RowGraph, RowGraphs
from tlora_fx.runtime.group_step import Batch, GroupStep, StepOptions

LOSSES = ("ppo", "cross_entropy", "importance_sampling")


class Emulated(RowGraph):
    """A graph on a CPU: it launches anew what it holds, into the tensors of its capture."""

    def capture(self, pool, stream):
        leaves = [leaf for leaf in self.model.parameters() if leaf.grad is not None]
        before = [leaf.grad.clone() for leaf in leaves]
        self._launch()
        torch._foreach_copy_([leaf.grad for leaf in leaves], before)  # a capture runs nothing
        losses, logprobs = self._losses, self._logprobs

        def replay():
            self._launch()
            losses.copy_(self._losses)
            if logprobs is not None:
                logprobs.copy_(self._logprobs)
            self._losses, self._logprobs = losses, logprobs

        self._graph = SimpleNamespace(replay=replay)


@pytest.fixture
def emulated(monkeypatch):
    """Gives a step graphs on the CPU."""
    monkeypatch.setattr(cuda_graphs, "RowGraph", Emulated)
    for name, value in {
        "graph_pool_handle": lambda: 0, "current_stream": lambda device: None,
        "device": lambda device: nullcontext(), "Stream": object,
        "memory_allocated": lambda device: 0, "synchronize": lambda device: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(RowGraphs, "_fits_memory", lambda self, *_: True)

    def with_graphs(step):
        step.prepare()
        step.runner.graphs = RowGraphs(step.model, torch.device("cpu"), 4096)
        return step

    return with_graphs


def batch_of(name, loss, number, smoothing):
    """Batches whose rows have the same sizes, of other tokens and numbers."""
    draw = random.Random(f"{name} {number}")
    samples = scored(draw_samples(f"{name}", 9, 3), draw)
    samples = [
        type(each)(tuple(draw.randrange(1, 53) for _ in each.input_ids), each.labels,
                   each.weights, each.logprobs, each.advantages)
        for each in samples
    ]  # fmt: skip
    options = {"label_smoothing": smoothing} if loss == "cross_entropy" and smoothing else {}
    return Batch([samples], loss=loss, loss_options=options)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_captured_rows_of_named_losses_are_those_that_run(tmp_path, emulated, smoothing):
    """Losses, log-probabilities and adapters of six steps, three of which are replayed."""
    base = tiny_base(tmp_path)
    jobs = [job_of(base, loss, learning_rate=0.1) for loss in LOSSES]
    jobs.append(make_job(base, "plain"))
    plain, captured = (
        GroupStep(compile(jobs), device="cpu", options=StepOptions(max_row_tokens=512))
        for _ in range(2)
    )
    emulated(captured)
    for number in range(6):
        batches = {loss: batch_of(loss, loss, number, smoothing) for loss in LOSSES}
        batches["plain"] = Batch([draw_samples("plain", 9, 2)])
        told = [step.accumulate(batches) for step in (plain, captured)]
        for step in (plain, captured):
            step.apply({key: {} for key in batches})
        for name, expected in told[0].items():
            found = told[1][name]
            assert found.error is None
            assert found.loss == pytest.approx(expected.loss, abs=1e-12)
            for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert captured.graphs.captured == 1
    assert captured.graphs.rows_replayed == 4
    for name in (*LOSSES, "plain"):
        mine, theirs = (step.member(name).final_adapter() for step in (captured, plain))
        assert all(torch.allclose(mine[key], theirs[key], rtol=0, atol=1e-12) for key in mine)


def test_rows_of_other_kinds_have_graphs_of_their_own(tmp_path, emulated):
    """Plain, by terms, and smoothed rows of one size; a row with a loss by sequence has none."""
    step = emulated(GroupStep(compile([job_of(tiny_base(tmp_path), "a")]), device="cpu"))
    kinds = {
        "plain": lambda at: Batch([draw_samples("a", 9, 3)]),
        "terms": lambda at: batch_of("a", "ppo", at, 0.0),
        "smooth": lambda at: batch_of("a", "cross_entropy", at, 0.1),
        "sequence": lambda at: batch_of("a", "gspo", at, 0.0),
    }
    for make in kinds.values():
        for number in range(3):
            assert step.accumulate({"a": make(number)})["a"].error is None

    assert step.graphs.captured == 3
    assert sorted(position.kind for position in step.graphs._graphs) == [0, 1, 2]
