"""Rows whose tokens have other losses than cross entropy run as graphs, and give the same."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.groups import draw_samples, make_job, scored, tiny_base
from tests.runtime.test_step_losses import job_of, own_loss
from tlora_fx.compiler import compile
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.parallel import cuda_graphs
from tlora_fx.parallel.apply import each_structure_once
from tlora_fx.parallel.cuda_graphs import ComparingRowGraph, RowGraph, RowGraphs, ScoringGraph
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.group_step import Batch, GroupStep, StepOptions


class Emulated(ComparingRowGraph):
    """Graphs on a CPU: they launch anew what they hold, into the tensors of their capture."""

    def _noted(self, launch, pool, stream, packed):
        leaves = [leaf for leaf in self.model.parameters() if leaf.grad is not None]
        before = [leaf.grad.clone() for leaf in leaves]
        with packed:
            launch()
        torch._foreach_copy_([leaf.grad for leaf in leaves], before)  # a capture runs nothing
        names = ("_losses", "_logprobs", "_token_losses")
        kept = {name: getattr(self, name, None) for name in names}

        def replay():
            launch()
            for name, tensor in kept.items():
                if tensor is not None and getattr(self, name) is not tensor:
                    tensor.copy_(getattr(self, name))
                    setattr(self, name, tensor)

        return SimpleNamespace(replay=replay)


class EmulatedPlain(Emulated):
    """Likewise of a row whose losses are sums over tokens."""

    capture, replay = RowGraph.capture, RowGraph.replay
    _launch = RowGraph._launch


class EmulatedScoring(ScoringGraph):
    """Likewise of a row that is scored."""

    _noted = Emulated._noted


@pytest.fixture
def emulated(monkeypatch):
    """Gives a step graphs on the CPU."""
    monkeypatch.setattr(cuda_graphs, "RowGraph", EmulatedPlain)
    monkeypatch.setattr(cuda_graphs, "ComparingRowGraph", Emulated)
    monkeypatch.setattr(cuda_graphs, "ScoringGraph", EmulatedScoring)
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


def of_others(name, number):
    """Batches with losses of whole sequences, whose rows have the same sizes."""
    draw = random.Random(f"{name} {number}")
    if name == "dpo":
        labels = (-100, -100, *(draw.randrange(1, 53) for _ in range(5)))
        pair = [Sample((4, 5, *labels[2:end]), labels[:end]) for end in (5, 7)]
        return Batch([[*pair, *pair]])
    batch = batch_of(name, name, number, 0.0)
    [samples] = batch.micro_batches
    if name == "kto":
        plain = [Sample(each.input_ids, each.labels) for each in samples]
        judged = [replace(each, desirable=draw.random() < 0.5) for each in plain]
        return Batch([judged], loss="kto")
    return replace(batch, loss=own_loss) if name == "own" else batch


def of_tokens(smoothing):
    return lambda name, number: batch_of(name, name, number, smoothing)


@pytest.mark.parametrize(
    ("names", "make"),
    [
        (("ppo", "cross_entropy", "importance_sampling"), of_tokens(0.0)),
        (("ppo", "cross_entropy", "importance_sampling"), of_tokens(0.2)),
        (("ppo", "gspo", "own", "kto", "dpo"), of_others),
    ],
    ids=["by token", "smoothed", "by sequence"],
)
def test_captured_rows_of_losses_are_those_that_run(tmp_path, emulated, names, make):
    """Losses, what is told of tokens, and adapters of six steps, four of which are replayed."""
    base = tiny_base(tmp_path)
    method = {"dpo": {"method": "dpo"}}
    jobs = [job_of(base, name, learning_rate=0.1, **method.get(name, {})) for name in names]
    jobs.append(make_job(base, "plain"))
    plain, captured = (
        GroupStep(compile(jobs), device="cpu", options=StepOptions(max_row_tokens=512))
        for _ in range(2)
    )
    emulated(captured)
    for number in range(6):
        batches = {name: make(name, number) for name in names}
        batches["plain"] = Batch([draw_samples("plain", 9, 2)])
        told = [step.accumulate(batches) for step in (plain, captured)]
        for step in (plain, captured):
            step.apply({key: {} for key in batches})
        for name, expected in told[0].items():
            found = told[1][name]
            assert found.error is None, name
            assert found.loss == pytest.approx(expected.loss, abs=1e-12)
            for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-12)
            for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    # A second one scores what is compared.
    assert captured.graphs.captured == 1 + ("dpo" in names)
    assert captured.graphs.rows_replayed == 4
    for name in (*names, "plain"):
        mine, theirs = (step.member(name).final_adapter() for step in (captured, plain))
        assert all(torch.allclose(mine[key], theirs[key], rtol=0, atol=1e-12) for key in mine)


def test_rows_of_other_kinds_have_graphs_of_their_own(tmp_path, emulated):
    """Plain, by terms, and smoothed rows of one size, and those with a loss by sequence."""
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

    assert step.graphs.captured == 4
    assert sorted(position.kind for position in step.graphs._graphs) == [0, 1, 2, 3]


def test_what_a_function_keeps_is_not_overwritten_by_the_next_row(tmp_path, emulated):
    """It gets tensors of its own, whatever the graph's are; its errors are the job's alone."""
    step = emulated(GroupStep(compile([job_of(tiny_base(tmp_path), "a")]), device="cpu"))
    kept = []

    def loss(logprobs, given):
        kept.append(logprobs[0].detach())
        if len(kept) == 5:
            raise ValueError("a mistake")
        return -torch.cat(logprobs).sum(), {"first": logprobs[0][0]}

    found = []
    for number in range(6):
        batch = replace(batch_of("a", "gspo", number, 0.0), loss=loss)
        found.append(step.accumulate({"a": batch})["a"])

    assert step.graphs.rows_replayed >= 3
    assert isinstance(found[4].error, ValueError)
    sound = [place for place in range(6) if place != 4]
    for place in sound:
        torch.testing.assert_close(kept[place], found[place].logprobs[0])
        assert found[place].metrics[0]["first"] == float(kept[place][0])


def test_layers_of_two_rows_are_asked_for_apart(tmp_path):
    """A row beside what it is compared with, which is shorter."""
    model = GroupStep(compile([job_of(tiny_base(tmp_path), "a")]), device="cpu")
    model.prepare()
    short, long = (
        pack([JobTokens([[3] * length], [[4] * length])]) for length in (5, 30)
    )  # fmt: skip
    with each_structure_once(model.model), torch.no_grad():
        assert len(model.model.score(short)) == 4
        assert len(model.model.score(long)) == 29
