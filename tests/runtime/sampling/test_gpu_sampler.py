"""Sampling on a GPU, where a kernel reads the pages of half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.groups import VOCABULARY, make_job, tiny_base
from tlora_fx import GroupStep, Sampler, StepOptions
from tlora_fx.compiler import compile
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.paged_attention import RowPages, attend_pages

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-5), ("bfloat16", 1e-2)])
def test_log_probabilities_are_those_of_the_trainer(tmp_path, dtype, within, compiled):
    """Mean absolute difference; prompts and completions of several pages."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 1024}
    base = tiny_base(tmp_path, dtype, num_attention_heads=4, initializer_range=0.05, **sizes)
    jobs = [make_job(base, name, lora={"r": 8, "target_modules": "all-linear"}) for name in "abc"]
    options = StepOptions(compiled=compiled)
    group = GroupStep(compile(jobs), device="cuda", options=options)
    group.prepare()
    torch.manual_seed(0)
    for member in group.members.values():
        for parameter in member.parameters.values():
            parameter.data.normal_(std=0.05)
    prompts = {
        name: [torch.randint(0, VOCABULARY, (n,)).tolist() for n in (1, 40, 250, 300)]
        for name in "abc"
    }

    sampler = Sampler(group)
    drawn = sampler.sample(prompts, n=2, max_new_tokens=20, stop=(), seed=1)

    assert (sampler.graphs.replayed > 10) == (dtype == "bfloat16"), sampler.graphs.refused
    samples = {
        name: [[completion.to_sample(0.0) for each in of for completion in each]]
        for name, of in drawn.items()
    }
    scored = group.score(samples)
    for name, of in drawn.items():
        mine = torch.tensor([completion.logprobs for each in of for completion in each])
        theirs = torch.stack(scored[name]).cpu()
        assert (mine - theirs).abs().mean() < within


def test_graphs_draw_by_adapters_that_have_trained_meanwhile(tmp_path):
    """The second call replays what the first captured, and gives what launches give."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
    base = tiny_base(tmp_path, "bfloat16", num_attention_heads=4, **sizes)
    jobs = [make_job(base, name, lora={"r": 8, "target_modules": "all-linear"}) for name in "ab"]
    group = GroupStep(compile(jobs), device="cuda")
    group.prepare()
    prompts = {"a": [[3, 4], [5]], "b": [[6] * 9]}
    settled = {"n": 4, "max_new_tokens": 24, "temperature": 0.0, "stop": (), "seed": 1}
    captured, launched = Sampler(group), Sampler(group)
    launched.refused = "it is compared with"
    for seed in range(3):
        torch.manual_seed(seed)
        for member in group.members.values():
            for parameter in member.parameters.values():
                parameter.data.normal_(std=0.1)
        found, expected = (each.sample(prompts, **settled) for each in (captured, launched))
        for name in prompts:
            for mine, theirs in zip(found[name], expected[name], strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    same = next(
                        (at for at in range(24) if one.tokens[at] != other.tokens[at]), 24
                    )  # fmt: skip
                    assert same >= 1
                    assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=5e-2)
    assert captured.graphs.replayed >= 60


@pytest.mark.parametrize("longest", [700, 4000])
@pytest.mark.parametrize("window", [-1, 1, 100])
@pytest.mark.parametrize(("dtype", "within"), [("bfloat16", 1e-2), ("float32", 1e-5)])
def test_the_kernel_and_the_gathered_pages_agree(window, longest, dtype, within):
    """Within rounding of float64, by one share of a sequence's keys and by several."""
    torch.manual_seed(longest)
    lengths = torch.tensor([1, 255, 256, 257, 700], dtype=torch.int32, device="cuda")
    tables = torch.randperm(55, device="cuda").to(torch.int32).view(5, 11)
    q = torch.randn(5, 8, 64, device="cuda").to(getattr(torch, dtype))
    keys, values = (torch.randn(55, 64, 2, 64, device="cuda").to(q.dtype) for _ in range(2))
    row = RowPages(torch.zeros(5, dtype=torch.int64, device="cuda"), tables, lengths, longest)
    rule = AttentionRule(0.2, True, window, 0.0, 0.0)

    by_kernel = attend_pages(q, keys, values, row, rule, None)
    row = replace(row, longest=700)
    exact = attend_pages(q.double(), keys.double(), values.double(), row, rule, None)

    torch.testing.assert_close(by_kernel.double(), exact, rtol=within, atol=within)
