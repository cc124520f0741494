"""A loop of one's own on a GPU, where kernels update all jobs at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.parallel import cuda_graphs
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.group_step import Batch, GroupStep, StepOptions
from tlora_fx.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def jobs(tmp_path):
    base = tiny_base(tmp_path / "base", dtype="float32", hidden_size=64, intermediate_size=128)
    fields = {"lora": {"r": 8, "lora_dropout": 0.1}, "max_steps": 6}
    jobs = [make_job(base, name, seed=seed, **fields) for seed, name in enumerate("ab")]
    return {job.name: job for job in jobs}


@pytest.fixture
def data(jobs):
    return make_data(list(jobs.values()))


def step(group, batches, rates=None):
    outputs = group.accumulate(batches)
    updates = group.apply({name: (rates or {}).get(name, {}) for name in batches})
    return {name: output.loss for name, output in outputs.items()}, updates


def test_a_loop_of_steps_is_what_the_trainer_does(jobs, data, tmp_path):
    """Losses of every step, with one update for all jobs."""
    run = tmp_path / "run"
    Trainer(compile(list(jobs.values())), output=run, device="cuda", data=data).run()
    group = GroupStep(compile(list(jobs.values())), device="cuda")

    losses = [step(group, {name: data[name].step(n) for name in jobs})[0] for n in range(6)]

    assert len(group.updater.split(list(group.members.values())).together) == 2
    expected = losses_of(run, list(jobs.values()))
    for name in jobs:
        assert [each[name] for each in losses] == pytest.approx(expected[name], rel=1e-5)


def test_a_step_that_failed_is_not_counted_and_the_next_one_is(jobs, data):
    """Kernels leave a job out whose gradients were not finite, for this step alone."""
    group, sound = (GroupStep(compile(list(jobs.values())), device="cuda") for _ in range(2))
    batches = {name: data[name].step(0) for name in jobs}
    group.accumulate(batches)
    for parameter in group.member("a").optimizer.trained.values():
        parameter.grad.fill_(math.nan)

    updates = group.apply({"a": {"lr": 0.5}, "b": {}})

    assert (updates["a"].updated, updates["a"].step) == (False, 0)
    assert (updates["b"].updated, updates["b"].step) == (True, 1)
    step(group, {"a": batches["a"]})
    step(sound, batches)
    for name in jobs:
        found, expected = (each.member(name).final_adapter() for each in (group, sound))
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-6)


def test_a_rate_holds_for_one_step(jobs, data):
    """By the kernels that update all jobs, too."""
    group = GroupStep(compile(list(jobs.values())), device="cuda")
    step(group, {name: data[name].step(0) for name in jobs}, {"a": {"lr": 3e-3}})
    fields = {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    other = jobs["a"].model_copy(update=fields)
    alone = GroupStep(compile([other]), device="cuda")
    step(alone, {"a": data["a"].step(0)})

    found, expected = (each.member("a").final_adapter() for each in (group, alone))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-6)


def test_losses_with_names_are_those_of_a_cpu(jobs, data):
    """By token, by sequence and by a function, after rows that ran as graphs and before others."""

    def widest(logprobs, given):
        return torch.stack([own.std(correction=0) for own in logprobs]).sum(), {}

    outputs = {}
    for device in ("cpu", "cuda"):
        group = GroupStep(compile([without_dropout(job) for job in jobs.values()]), device=device)
        plain = {name: data[name].step(0) for name in jobs}
        for _ in range(3):
            step(group, plain)
        rows = {name: scored(data[name].step(1)) for name in jobs}
        outputs[device] = []
        for one, two in (("ppo", "cispo"), ("gspo", "importance_sampling"), ("dro", widest)):
            out = group.accumulate(
                {"a": Batch(rows["a"], loss=one), "b": Batch(rows["b"], loss=two)}
            )
            group.apply({"a": {}, "b": {}})
            outputs[device] += [*out.values()]
        outputs[device] += group.accumulate(plain).values()

    for found, expected in zip(outputs["cuda"], outputs["cpu"], strict=True):
        assert found.error is None
        assert found.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-4)
        for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("largest", [None, 16384])
def test_small_rows_are_captured_where_the_longest_row_would_not_fit(
    tmp_path, monkeypatch, largest
):
    """A longer one than those that came frees the graphs; told before, its memory stays free."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = tiny_base(tmp_path / "base", "bfloat16", hidden_size=128, **heads)
    jobs = [make_job(base, name, seed=seed, max_steps=9) for seed, name in enumerate("ab")]
    data = make_data(jobs)
    group = GroupStep(compile(jobs), device="cuda")
    group.prepare(largest_row=largest)
    free = cuda_graphs.RESERVED_BYTES + 2**25
    monkeypatch.setattr(cuda_graphs, "free_gpu_bytes", lambda device: free)

    for number in (0, 0, 0, 0):
        step(group, {job.name: data[job.name].step(number) for job in jobs})

    assert (group.graphs.rows_replayed, group.graphs.skipped_no_memory) == (
        (2, 0) if largest is None else (0, 2)
    )


def without_dropout(job):
    return job.model_copy(update={"lora": {**job.lora, "lora_dropout": 0.0}})


def scored(batch):
    """Samples that say what their tokens cost when they were sampled, and were worth."""
    return [
        [
            replace(
                sample,
                logprobs=tuple(-3.5 - 0.1 * (at % 7) for at in range(len(sample.labels))),
                advantages=tuple(math.cos(at) for at in range(len(sample.labels))),
            )
            for sample in samples
        ]
        for samples in batch
    ]


def spread(logprobs, given):
    """A loss that mixes the sequences of a micro-batch."""
    means = torch.stack([own.mean() for own in logprobs])
    return torch.logsumexp(-means, 0), {"mean": means.mean()}


@pytest.mark.parametrize("kind", ["by token", "smoothed", "by sequence"])
def test_captured_rows_of_losses_are_those_that_run(tmp_path, kind):
    """Losses and log-probabilities of eight steps, most of which are replayed."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = tiny_base(tmp_path / "base", "bfloat16", hidden_size=128, **heads)
    jobs = [make_job(base, name, seed=seed, max_steps=9) for seed, name in enumerate("abcd")]
    jobs[-1] = jobs[-1].model_copy(update={"method": "dpo"})
    data = make_data(jobs)
    options = {"label_smoothing": 0.1} if kind == "smoothed" else {}
    captured, plain = (
        GroupStep(compile(jobs), device="cuda", options=StepOptions(cuda_graphs=graphs))
        for graphs in (True, False)
    )
    pair = [Sample((4, 5, 6, *rest), (-100,) * 3 + rest) for rest in ((7, 8, 9), (1, 2))]
    for _ in range(8):
        own = {name: data[name].step(0) for name in "abc"}
        batches = {"a": Batch(own["a"], loss="cross_entropy", loss_options=options)}
        batches["b"] = Batch(scored(own["b"]), loss="ppo")
        if kind == "by sequence":
            batches |= {"c": Batch(own["c"], loss=spread), "d": Batch([[*pair, *pair]])}
        told = [group.accumulate(batches) for group in (captured, plain)]
        for group in (captured, plain):
            group.apply({name: {} for name in batches})
        for name, expected in told[1].items():
            found = told[0][name]
            assert found.error is None
            assert found.loss == pytest.approx(expected.loss, rel=2e-3)
            for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-2)
    assert captured.graphs.refused == ""
    assert captured.graphs.rows_replayed >= 5
