"""The head stands behind a hidden state of all jobs, whatever a job changed of it last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import (
    VOCABULARY,
    assert_equals_peft,
    assert_same,
    base_of,
    error_of,
    hand_written,
    job,
    ready,
    run_fused,
    tokens,
)
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import BaseRefused
from tlora_fx.ir.graph import placeholders
from tlora_fx.runtime.trainer import Trainer

ROUNDED, EXACT = 3e-6, 1e-9
UP = {"r": 3, "target_modules": ["up_proj"]}
NORM = {**UP, "modules_to_save": ["norm"]}
JOBS = {
    "beside": {"plain": {"r": 4, "target_modules": ["q_proj"]}, "norm": NORM},
    "between": {"norm": NORM, "again": NORM, "plain": {"r": 2, "target_modules": ["lm_head"]}},
    "head-too": {"plain": UP, "norm": {**UP, "modules_to_save": ["norm", "lm_head"]}},
}


def made(folder, kinds, **changes):
    """The jobs of these kinds on a Llama of one layer."""
    base = base_of(folder, "llama", num_hidden_layers=1, **changes)
    return [job(name, base, seed=5, **JOBS[kinds][name]) for name in JOBS[kinds]]


def parts_of(jobs):
    """Sequences of another length for each job."""
    return [tokens((5 + place, 4), seed=place) for place in range(len(jobs))]


@pytest.mark.parametrize("kinds", list(JOBS))
@pytest.mark.parametrize("form", ["packed", "batch"])
def test_a_trained_copy_of_the_last_norm(tmp_path, kinds, form):
    """Each job computes what PEFT computes, and what the job alone does."""
    jobs = made(tmp_path, kinds, attention=form)
    model, parts = ready(jobs), parts_of(jobs)

    assert_equals_peft(model, parts, ROUNDED)
    fused = run_fused(model, parts)
    (place,) = (place for place, own in enumerate(jobs) if own.name == "norm")
    alone = run_fused(ready([jobs[place]]), [parts[place]])
    assert_same(fused["norm"], alone["norm"], EXACT)
    assert any("model.norm.modules_to_save" in name for name in fused["norm"].gradients)


def test_a_job_that_trains_the_last_norm_trains_as_it_does_alone(tmp_path):
    """Losses and weights of its whole run, the copy of the norm among them."""
    base = tiny_base(tmp_path / "base")
    norm = make_job(base, "norm", lora={"modules_to_save": ["norm"]})
    group = [make_job(base, "plain", per_device_train_batch_size=3), norm]
    runs = {}
    for name, jobs in (("group", group), ("alone", [norm])):
        trainer = Trainer(compile(jobs), output=tmp_path / name, data=make_data(jobs), device="cpu")
        runs[name] = next(run for run in trainer.run() if run.job.name == "norm").parameters
    losses = [losses_of(tmp_path / name, [norm])["norm"] for name in ("group", "alone")]

    assert len(losses[0]) == norm.max_steps
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert set(runs["group"]) == set(runs["alone"])
    for name, weight in runs["alone"].items():
        torch.testing.assert_close(runs["group"][name], weight, rtol=0, atol=1e-7)
    copied = next(weight for name, weight in runs["group"].items() if "norm" in name)
    assert (copied.detach() - 1).abs().max() > 1e-3


def test_the_head_s_input_is_every_jobs(tmp_path):
    """Though one job's norm wrote into it last."""
    model = compile(made(tmp_path, "beside"))

    hidden = placeholders(model.group.blocks["head"].graph)["hidden_states"]
    assert (hidden.meta["role"], hidden.meta["jobs"]) == ("shared", ("plain", "norm"))
    assert "site" not in hidden.meta
    assert any("norm of job 'norm' runs as it is" in note for _, note in model.group.notes)


class ReadingAnothersBias(nn.Module):
    """A causal model whose attention reads the tensors of a linear that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.out = nn.Linear(32, 32)
        self.up = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        hidden = self.embed(ids)
        x = F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        hidden = hidden + F.linear(x, self.out.weight, self.out.bias)
        return self.head(hidden + torch.tanh(self.up(hidden)))


def test_a_head_that_would_mix_tokens_is_refused():
    """A job that trains the bias computes attention's result anew from the embedding on."""
    jobs = hand_written(ReadingAnothersBias(), targets=("up",))
    plain, biased = (
        jobs[0].model_copy(
            update={"name": name, "lora": {"r": 4, "target_modules": ["up"], "bias": bias}}
        )
        for name, bias in (("plain", "none"), ("biased", "all"))
    )
    assert_equals_peft(ready([plain]), [tokens([5, 3])], 1e-12)

    text = error_of(lambda: compile([plain, biased]), BaseRefused)

    assert "jobs    biased\n" in text
    assert "scaled_dot_product_attention" in text
    assert "every token attends to every other" in text
