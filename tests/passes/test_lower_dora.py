"""`lower-adapters` on DoRA: on kernels beside plain jobs, and equal to PEFT and torch.optim."""

from __future__ import annotations

import pytest
import torch

from tests.models import (
    assert_equals_peft,
    base_of,
    hand_written,
    job,
    peft_model,
    plain,
    ready,
    row_of,
    run_alone,
    run_fused,
    tokens,
)
from tests.traced import KINDS
from tlora_fx.ir.graph import is_call
from tlora_fx.ir.lora_sites import SCALE, lowered_sites
from tlora_fx.passes.lower_adapters import DROPPED

LENGTHS = ([4, 6], [5], [7, 3], [8])
TWO = ["c_attn", "c_fc"]


def jobs_on(base, *targets):
    """Plain LoRA, and DoRA of three ranks: one with rslora, one on a single linear."""
    return [
        job("dora", base, r=3, target_modules=list(targets), use_dora=True),
        job("plain", base, r=4, lora_alpha=9, target_modules=list(targets)),
        job("rooted", base, r=6, target_modules=list(targets), use_dora=True, use_rslora=True),
        job("single", base, r=2, target_modules=[targets[0]], use_dora=True),
    ]


def parts(step=0):
    """What the four jobs have in a row."""
    return [tokens(own, seed=10 * step + place) for place, own in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Four jobs on Conv1Ds with biases, in float64."""
    return ready(jobs_on(base_of(tmp_path_factory.mktemp("base"), "gpt2", n_layer=2), *TWO))


def scales(model):
    """The operators that scale columns."""
    return [node for graph in model.group.graphs() for node in graph.nodes if is_call(node, SCALE)]


def test_doras_branches_share_the_sites_operator(gpt2):
    """One operator a site for all four, one behind it for the three; nothing runs as it is."""
    (block,) = (b for b in gpt2.group.blocks.values() if b.name != "head")
    sites = list(lowered_sites(block.graph))
    every = ("dora", "plain", "rooted", "single")

    assert [site.jobs for site in sites] == [every, every[:3]]
    assert [node.args[-2:] for node in scales(gpt2)] == [([0, 2, 3], 6), ([0, 2], 6)]
    assert not [text for name, text in gpt2.group.notes if name == "lower-adapters"]
    assert not [node for node in block.graph.nodes if "segment_" in str(node.target)]


def test_steps_equal_peft_and_torch_optim(gpt2):
    """Losses, gradients, A, B and magnitudes of three steps of AdamW, of every job."""
    alone = {own.name: peft_model(gpt2, own.name) for own in gpt2.jobs}
    mine = {own.name: gpt2.job_parameters(own.name) for own in gpt2.jobs}
    theirs = {
        name: {key: p for key, p in model.named_parameters() if p.requires_grad}
        for name, model in alone.items()
    }
    optimizers = [
        torch.optim.AdamW(given[name].values(), lr=1e-2)
        for given in (mine, theirs)
        for name in mine
    ]
    for step in range(3):
        fused = run_fused(gpt2, parts(step))
        for own, part in zip(gpt2.jobs, parts(step), strict=True):
            for parameter in theirs[own.name].values():
                parameter.grad = None
            wanted = run_alone(alone[own.name], part)
            found = fused[own.name]
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-9, atol=0)
            assert found.gradients.keys() == wanted.gradients.keys()
            for name, gradient in wanted.gradients.items():
                difference = (found.gradients[name] - gradient).norm()
                assert difference <= 1e-7 * gradient.norm().clamp(min=1e-9), name
        for optimizer in optimizers:
            optimizer.step()
    for name, parameters in theirs.items():
        for key, parameter in parameters.items():
            torch.testing.assert_close(mine[name][key], parameter, rtol=1e-7, atol=1e-9)
    assert any("magnitude" in key for key in theirs["dora"])


@pytest.mark.parametrize("what", ["magnitude", "lora_A", "lora_B"])
def test_a_nan_reaches_no_neighbour(gpt2, what):
    """Losses and gradients of the others keep their bits."""
    before = run_fused(gpt2, parts())
    own = gpt2.job_parameters("rooted")
    name = next(key for key in own if what in key)
    kept = own[name].detach().clone()
    with torch.no_grad():
        own[name].fill_(float("nan"))
    after = run_fused(gpt2, parts())
    with torch.no_grad():
        own[name].copy_(kept)

    assert after["rooted"].loss.isnan()
    for other in ("dora", "plain", "single"):
        assert torch.equal(before[other].loss, after[other].loss)
        for key, gradient in before[other].gradients.items():
            assert torch.equal(gradient, after[other].gradients[key])


def test_padded_batches_are_lowered_too():
    """Batch form: lines in place of tokens, linears with a bias, the head among them."""
    base = hand_written(plain(), "batch")[0].base
    model = ready(jobs_on(base, "out", "qkv", "head"))

    assert scales(model)
    assert row_of(model, parts()).input_ids.shape[0] == sum(map(len, LENGTHS))
    assert_equals_peft(model, parts(), 1e-9)


def test_with_dropout_it_runs_as_it_is(tmp_path):
    """PEFT multiplies the dropped input by the frozen weight again; that is told."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=1)
    model = ready([job("drops", base, **KINDS["dora"])])

    told = [text for name, text in model.group.notes if name == "lower-adapters"]
    assert told
    assert all(text.endswith(f"runs as it is: {DROPPED}") for text in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "phi3", "gemma2", "gpt-neox", "opt", "stablelm", "falcon"]
)
def test_families_equal_peft(tmp_path, family):
    """Every site of these is lowered, with and without biases; softmax is in float32 in most."""
    from tests.models import FAMILIES

    targets = FAMILIES[family].targets[:2]
    model = ready(jobs_on(base_of(tmp_path, family), *targets))

    assert not [text for name, text in model.group.notes if name == "lower-adapters"]
    # Where a window leaves a padded line empty, transformers' own eager attention is NaN.
    rows = (
        [tokens([5 + place], seed=place) for place in range(4)] if family == "gemma2" else parts()
    )
    assert_equals_peft(model, rows, 1e-6)
