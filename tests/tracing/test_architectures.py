"""Each architecture, fused, against its own transformers class wrapped by PEFT alone."""

from __future__ import annotations

from functools import cache

import pytest

from tests.models import (
    FAMILIES,
    OLD_TRANSFORMERS,
    assert_equals_peft,
    assert_same,
    base_of,
    job,
    mixed_jobs,
    peft_model,
    plain,
    ready,
    run_alone,
    run_fused,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.config.job import BaseSpec

# transformers' norms, rotary tables and eager softmax run in float32 in every model dtype, so a
# float64 model agrees to float32's rounding only; where nothing does, to float64's.
ROUNDED, WIDE = 3e-6, 1e-9
PACKED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "phi3-longrope", "gpt2", "gpt-neox",
    "olmo2", "opt", "stablelm", "lfm2",
)  # fmt: skip
LENGTHS = ([9, 7], [6], [8, 6, 9])


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A family's mixed jobs as one model, compiled once for all tests of this file."""
    folder = tmp_path_factory.mktemp("bases")

    @cache
    def make(family: str):
        return ready(mixed_jobs(base_of(folder, family), FAMILIES[family].targets))

    return make


@pytest.mark.parametrize("family", sampled(PACKED, 4))
def test_packed_jobs_get_the_losses_and_gradients_of_peft(fused, family):
    """Three different jobs on one row get what each gets alone on a padded batch."""
    if family == "opt" and OLD_TRANSFORMERS:
        pytest.skip("this transformers' OPT branches on random numbers and is refused by name")
    model = fused(family)
    parts = [tokens(lengths, seed=place) for place, lengths in enumerate(LENGTHS)]

    assert model.group.form == "packed"
    bound = WIDE if family == "gpt2" else ROUNDED
    assert_equals_peft(model, parts, bound)


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("llama", {3}),
        ("gemma2", {2}),
        ("gpt2", {3}),
        ("phi3", {3}),
    ],
)
def test_layers_of_one_structure_share_one_block(fused, family, blocks):
    """Equal layers are folded; Gemma 2 has two structures, every second layer."""
    layers = [b for b in fused(family).group.blocks.values() if b.name != "head"]

    assert {len(block.instances) for block in layers} == blocks


def test_a_hand_written_module_runs_as_padded_lines():
    """Any nn.Module from ids to logits compiles in batch form and equals PEFT."""
    base = BaseSpec(module=plain(), dtype="float64")
    jobs = [
        job("all", base, r=8, target_modules=["qkv", "out"]),
        job("few", base, r=4, target_modules=["out"], lora_alpha=3),
        job("head", base, r=2, target_modules=["qkv", "head"], use_rslora=True),
    ]
    model = ready(jobs)

    assert model.group.form == "batch"
    assert_equals_peft(model, [tokens(n, seed=s) for s, n in enumerate(LENGTHS)], WIDE)


def test_a_window_shorter_than_the_sequences_is_kept(fused):
    """Mistral's window of four: what lies further back does not move a token's loss."""
    model = fused("mistral")
    parts = [tokens(lengths, seed=place) for place, lengths in enumerate(([20], [17], [30]))]

    expected = [
        run_alone(peft_model(model, own.name), p) for own, p in zip(model.jobs, parts, strict=True)
    ]

    for outcome, alone in zip(run_fused(model, parts).values(), expected, strict=True):
        assert_same(outcome, alone, ROUNDED)
