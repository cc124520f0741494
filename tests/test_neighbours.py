"""A job's result is its own, whoever shares the row, in whatever order, dropout included."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models import (
    GPT2,
    Outcome,
    assert_close,
    assert_same,
    base_of,
    job,
    ready,
    restart,
    run_fused,
    tokens,
)
from tlora_fx.runtime.adapters.files import adapter_tensors

BOUND = 1e-9
ADAPTERS = 1e-7
TARGETS = ("c_attn", "c_proj", "c_fc", "lm_head")
NOTHING = tokens([])
# GPT-2 as its config has it drops a tenth of embeddings, attention and residuals.
DROPPING = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
KINDS = {
    "one": {"r": 1, "target_modules": ["c_attn"], "lora_dropout": 0.3},
    "wide": {"r": 64, "target_modules": ["c_fc", "c_proj", "lm_head"], "lora_alpha": 7},
    "mid": {"r": 7, "target_modules": ["c_attn", "c_fc"], "lora_dropout": 0.1, "use_rslora": True},
    "dora": {"r": 3, "target_modules": ["c_attn"], "lora_dropout": 0.2, "use_dora": True},
}

lengths = st.lists(st.integers(1, 9), max_size=3)
mixes = st.fixed_dictionaries(dict.fromkeys(KINDS, lengths))
lora = st.fixed_dictionaries(
    {
        "r": st.integers(1, 64),
        "lora_alpha": st.integers(1, 64),
        "lora_dropout": st.sampled_from([0.0, 0.1, 0.5]),
        "target_modules": st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
        "use_rslora": st.booleans(),
    }
)
few = settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A GPT-2 of two layers with its own dropout."""
    sizes = {**GPT2, **DROPPING, "n_layer": 2, "n_embd": 16, "n_head": 2}
    return base_of(tmp_path_factory.mktemp("gpt2"), "gpt2", **sizes)


@pytest.fixture(scope="module")
def model_of(base):
    """Models of named jobs in this order, compiled once."""

    @cache
    def make(*names: str):
        return ready([job(name, base, **KINDS[name]) for name in names])

    return make


def part_of(name: str, drawn: list[int], step: int = 3):
    """What a job brings; tokens and mask keys are the job's own."""
    return tokens(drawn, seed=list(KINDS).index(name), step=step)


def outcome_of(model, mix, name: str) -> Outcome:
    """What one job gets in a row of a mix."""
    parts = [part_of(own.name, mix.get(own.name, [])) for own in model.jobs]
    return run_fused(model, parts)[name]


@settings(max_examples=8, deadline=None)
@given(mix=mixes)
def test_neighbours_do_not_change_a_job(model_of, mix):
    """Any segments, from none to several tokens: each job gets what it gets by itself."""
    model = model_of(*KINDS)
    together = run_fused(model, [part_of(name, mix[name]) for name in KINDS])

    for name in KINDS:
        alone = outcome_of(model, {name: mix[name]}, name)
        assert_same(together[name], alone, BOUND, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_job_compiled_alone_gets_the_same(model_of, name):
    """A group of one: the same loss and gradients as among others, dropout included."""
    mix = {"one": [4, 1], "wide": [6], "mid": [2, 3], "dora": [5, 2]}
    together = outcome_of(model_of(*KINDS), mix, name)

    assert_same(outcome_of(model_of(name), mix, name), together, BOUND, name)


def test_order_does_not_matter(model_of):
    """The same jobs the other way round."""
    mix = {"one": [4, 1], "wide": [6], "mid": [2, 3], "dora": [5, 2]}
    forwards, backwards = model_of(*KINDS), model_of(*reversed(KINDS))

    for name in KINDS:
        expected = outcome_of(forwards, mix, name)
        assert_same(outcome_of(backwards, mix, name), expected, BOUND, name)


def test_a_job_without_tokens_has_no_loss_and_no_gradient(model_of):
    """A job that brings nothing to a row gets exact zeros."""
    outcome = outcome_of(model_of(*KINDS), {"one": [4, 1], "mid": [3]}, "wide")

    assert outcome.loss == 0
    assert not any(gradient.any() for gradient in outcome.gradients.values())


def test_a_row_of_nothing_has_no_loss(model_of):
    """An empty row runs, for ranks that have nothing to do."""
    outcomes = run_fused(model_of(*KINDS), [NOTHING] * len(KINDS))

    assert all(outcome.loss == 0 for outcome in outcomes.values())


def test_masks_change_with_the_step_and_with_the_seed(model_of):
    """Dropout is on: another step or seed draws other masks, the same ones draw the same."""
    model = model_of("one")

    def loss(step: int, key: int) -> float:
        return float(run_fused(model, [tokens([6, 5], seed=1, step=step, key=key)])["one"].loss)

    assert loss(0, 5) == loss(0, 5)
    assert len({loss(0, 5), loss(1, 5), loss(0, 6)}) == 3


def test_adapters_after_several_steps_do_not_depend_on_neighbours(model_of):
    """Four AdamW steps of each job, together and alone."""
    mix = {"one": [4, 1], "wide": [6], "mid": [2, 3], "dora": [5, 2]}
    together = trained(model_of(*KINDS), mix)

    for name in KINDS:
        for key, adapter in trained(model_of(name), mix)[name].items():
            assert_close(together[name][key], adapter, ADAPTERS, key)


def trained(model, mix):
    """Adapters after four steps of all jobs, each with an optimizer of its own."""
    optimizers = [
        torch.optim.AdamW(list(model.job_parameters(own.name).values()), lr=1e-2)
        for own in model.jobs
    ]
    for step in range(4):
        run_fused(model, [part_of(own.name, mix[own.name], step) for own in model.jobs])
        for optimizer in optimizers:
            optimizer.step()
    adapters = {own.name: adapter_tensors(model.job_parameters(own.name)) for own in model.jobs}
    restart(model)
    return adapters


@few
@given(kinds=st.lists(lora, min_size=2, max_size=3), drawn=st.lists(lengths, min_size=3))
def test_any_mix_of_jobs_trains_each_as_alone(base, kinds, drawn):
    """Random ranks, scalings, rates, targets and segments; the first job against itself alone."""
    jobs = [job(f"job-{place}", base, **kind) for place, kind in enumerate(kinds)]
    parts = [tokens(drawn[place], seed=place, step=1) for place in range(len(jobs))]

    together = run_fused(ready(jobs), parts)["job-0"]
    alone = run_fused(ready(jobs[:1]), parts[:1])["job-0"]

    assert_same(together, alone, BOUND)
