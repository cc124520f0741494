"""NEFTune: a job's noise is that of transformers' hook with the job's own numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.runtime.groups import draw_samples, losses_of, make_data, make_job, tiny_base
from tests.runtime.test_step_losses import by_peft, job_of
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import JobError, NotAdmitted, PlanNotRunnable
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.batch import JobTokens, pack, pad
from tlora_fx.ops import without_dropout
from tlora_fx.ops.noise import embedding_noise, noise_rows
from tlora_fx.ops.philox import philox
from tlora_fx.parallel.apply import require_whole_pairs
from tlora_fx.runtime.group_step import Batch, GroupStep
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import bounds_of, verify

HIDDEN = 10


@pytest.mark.parametrize(("form", "dropout"), [("packed", 0.0), ("batch", 0.1)])
def test_jobs_with_noise_train_as_they_would_alone(tmp_path, form, dropout):
    """Against PEFT with a hook on its embedding, which one job adapts; in padded rows too."""
    base = tiny_base(tmp_path).model_copy(update={"attention": form})
    embedding = {"target_modules": ["embed_tokens", "q_proj"]}
    jobs = [
        make_job(base, "noisy", neftune_noise_alpha=5.0, lora={"lora_dropout": dropout}),
        make_job(base, "quiet", seed=2),
        make_job(base, "own", seed=3, neftune_noise_alpha=15.0, lora=embedding),
    ]
    found = list(verify(jobs, steps=1, device="cpu", data=make_data(jobs)))

    beyond = [row for row in found if not row.within(bounds_of("float64", "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))


def test_one_step_with_noise_is_that_of_peft_with_a_hook(tmp_path):
    """Loss and adapter of a job beside another one, which has none."""
    base = tiny_base(tmp_path)
    jobs = [job_of(base, "a", neftune_noise_alpha=5.0, seed=9), job_of(base, "b")]
    step = GroupStep(compile(jobs), device="cpu")
    step.prepare()
    start = {name: step.member(name).final_adapter() for name in "ab"}
    batches = {name: Batch([draw_samples(name, 9, 1)]) for name in "ab"}
    out = step.accumulate(batches)
    step.apply({"a": {}, "b": {}})
    length = len(batches["a"].micro_batches[0][0].input_ids)

    def add(module, inputs, output):
        size = 5.0 / math.sqrt(length * output.shape[-1])
        return output + size * noise_rows(torch.arange(length), output.shape[-1], (9, 0))[None]

    still, _, _ = by_peft(step.model.backbone, jobs[1], start["b"], [batches["b"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", hooked(nn.Embedding.forward, add))
        loss, _, after = by_peft(step.model.backbone, jobs[0], start["a"], [batches["a"]])

    assert out["b"].loss == pytest.approx(still, abs=1e-9)
    assert out["a"].loss == pytest.approx(loss, abs=1e-7)
    adapter = step.member("a").final_adapter()
    assert all(torch.allclose(adapter[key], after[key], rtol=0, atol=1e-7) for key in after)


def hooked(forward, add):
    """An embedding's forward with noise behind it."""
    return lambda self, ids: add(self, (ids,), forward(self, ids))


def rows_of(form):
    """Three jobs, the second without noise; sequences of several lengths, and dropout keys."""
    lengths = {0: [4, 7], 1: [5], 2: [3, 3, 2]}
    jobs = [
        JobTokens([[1] * n for n in own], [[1] * n for n in own], seed=job + 5, step=3, offset=job)
        for job, own in lengths.items()
    ]
    return lengths, (pack if form == "packed" else pad)(jobs)


@pytest.mark.parametrize("form", ["packed", "batch"])
def test_noise_is_that_of_transformers_hook(monkeypatch, form):
    """Its bounds by alpha, the longest sequence and the width; the numbers are the job's."""
    lengths, row = rows_of(form)
    alphas = [5.0, 0.0, 2.0]
    x = torch.zeros(*row.input_ids.shape, HIDDEN, dtype=torch.float64)
    tables = row.segments, row.keys, row.token_index, row.cu_seqlens
    found = embedding_noise(x, alphas, *tables)
    line = 0
    for job, own in lengths.items():
        first, place = job, row.segments[job].item()
        padded = torch.zeros(len(own), max(own), HIDDEN, dtype=torch.float64)
        for number, length in enumerate(own):
            drawn = noise_rows(torch.arange(first, first + length), HIDDEN, (job + 5, 3))
            monkeypatch.setattr(
                Tensor, "uniform_", lambda like, low, high, d=drawn: as_drawn(like, low, high, d)
            )
            module = nn.Identity().train()
            module.neftune_noise_alpha = torch.tensor(alphas[job])
            expected = neftune_post_forward_hook(module, (), padded.clone())[number, :length]
            mine = found[0, place : place + length] if form == "packed" else found[line, :length]
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)
            assert bool((mine != 0).any()) == bool(alphas[job])
            first, place, line = first + length, place + length, line + 1
    with without_dropout():
        assert torch.equal(embedding_noise(x, alphas, *tables), x)


def as_drawn(like, low, high, drawn):
    """What `uniform_` would give for these numbers between -1 and 1, in the first tokens."""
    filled = torch.zeros_like(like)
    filled[:, : len(drawn)] = low + (high - low) * (drawn + 1) / 2
    return filled


def test_numbers_are_uniform_and_of_one_job_step_and_token():
    """Each has a counter of its own: the definition, digit by digit, and the moments."""
    drawn = noise_rows(torch.arange(4000), 6, (11, 2)).double()
    words = philox(*(torch.tensor(x) for x in (17, 1, 1, 0xFFFFFFFF)), (11, 2))
    expected = [((int(word) >> 8) + 0.5) / 2**23 - 1 for word in words[:2]]

    assert drawn[17, 4:6].tolist() == pytest.approx(expected, abs=1e-7)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.var()) == pytest.approx(1 / 3, rel=0.02)
    assert float(drawn.abs().max()) < 1
    for other in ((12, 2), (11, 3)):
        assert not torch.equal(noise_rows(torch.arange(4000), 6, other).double(), drawn)


def test_noise_touches_no_neighbour_and_no_evaluation(tmp_path):
    """The quiet job's losses are bit for bit those beside a job without noise."""
    base = tiny_base(tmp_path / "base")
    noisy = make_job(base, "a", neftune_noise_alpha=5.0)
    still, quiet = noisy.model_copy(update={"neftune_noise_alpha": 0.0}), make_job(base, "b")
    losses = {}
    for name, first in (("noisy", noisy), ("still", still)):
        jobs = [first, quiet]
        Trainer(compile(jobs), output=tmp_path / name, device="cpu", data=make_data(jobs)).run()
        losses[name] = losses_of(tmp_path / name, jobs)

    assert losses["noisy"]["b"] == losses["still"]["b"]
    assert losses["noisy"]["a"] != losses["still"]["a"]


def test_where_noise_is_not_it_is_refused(tmp_path):
    """By other methods, by plans that cut a micro-batch, and by models that jobs join."""
    base = tiny_base(tmp_path)
    noisy = make_job(base, "a", neftune_noise_alpha=5.0)
    with pytest.raises(JobError, match="'neftune_noise_alpha' needs method sft"):
        make_job(base, "b", method="dpo", neftune_noise_alpha=5.0)
    with pytest.raises(PlanNotRunnable, match="need rows that run whole"):
        require_whole_pairs([noisy], Plan(planner="single"), cuts=True)
    with pytest.raises(NotAdmitted, match="neftune_noise_alpha"):
        compile([noisy], open=OpenSlots(jobs=2))
