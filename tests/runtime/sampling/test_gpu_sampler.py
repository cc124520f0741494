"""Sampling on a GPU, where a kernel reads the pages of half precision."""

from __future__ import annotations

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

    drawn = Sampler(group).sample(prompts, n=2, max_new_tokens=20, stop=(), seed=1)

    samples = {
        name: [[completion.to_sample(0.0) for each in of for completion in each]]
        for name, of in drawn.items()
    }
    scored = group.score(samples)
    for name, of in drawn.items():
        mine = torch.tensor([completion.logprobs for each in of for completion in each])
        theirs = torch.stack(scored[name]).cpu()
        assert (mine - theirs).abs().mean() < within


@pytest.mark.parametrize("window", [-1, 1, 100])
def test_the_kernel_and_the_gathered_pages_agree(window):
    """In bfloat16, within its rounding of float32."""
    torch.manual_seed(0)
    lengths = torch.tensor([1, 255, 256, 257, 700], dtype=torch.int32, device="cuda")
    tables = torch.randperm(15, device="cuda").to(torch.int32).view(5, 3)
    q = torch.randn(5, 8, 64, device="cuda", dtype=torch.bfloat16)
    keys, values = (
        torch.randn(15, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    row = RowPages(torch.zeros(5, dtype=torch.int64, device="cuda"), tables, lengths, 700)
    rule = AttentionRule(0.2, True, window, 0.0, 0.0)

    by_kernel = attend_pages(q, keys, values, row, rule, None)
    exact = attend_pages(q.float(), keys.float(), values.float(), row, rule, None)

    torch.testing.assert_close(by_kernel.float(), exact, rtol=1e-2, atol=1e-2)
