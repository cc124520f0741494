"""Adapters on experts by kernels, against float64; Triton's interpreter gets bf16 wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.expert_jobs import by_job_and_expert, case, error
from tlora_fx.ops import multi_lora_experts
from tlora_fx.ops.expert_lora import Call, served


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": (2, 0, 17), "biased": True},
        {"crossed": True, "turned": True, "shared": False, "adapters": torch.float32},
        {"lengths": (70, 3, 90), "skew": 0.8, "by_column": False, "sizes": (140, 72)},
        pytest.param({"ranks": (40,), "lengths": (90,)}, marks=pytest.mark.slow),  # SLOW
        pytest.param({"dtype": torch.float16}, marks=pytest.mark.slow),
        pytest.param({"experts": 1, "chosen": 1, "crossed": True}, marks=pytest.mark.slow),
        pytest.param({"lengths": (0, 0, 0)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_and_gradients_equal_the_reference(fields):
    """Ranks that are no multiple of a tile, jobs and experts without pairs, many pairs at one."""
    mine = case(**({"dtype": torch.float32} | fields))
    found, expected = mine.results(multi_lora_experts), mine.wide().results(by_job_and_expert)

    assert served(Call(*mine.arguments()))
    assert error(found, expected) < (1e-6 if mine.x.dtype == torch.float32 else 4e-3)


def test_no_bit_depends_on_neighbours():
    """Alone, and beside a job that is no number and sends all its tokens elsewhere."""
    # Ranks of one block: of other shapes a CPU may sum products in another order.
    both = case(lengths=(30, 19), ranks=(5, 12))
    alone = replace(
        both, x=both.x[:30], index=both.index[:30], dy=both.dy[:30], a=both.a[:1], b=both.b[:1],
        jobs=[0], scales=both.scales[:1], segments=both.segments[:2],
    )  # fmt: skip
    beside = replace(both, x=both.x.clone(), index=both.index.clone(), dy=both.dy.clone())
    beside.x[30:], beside.dy[30:], beside.index[30:] = torch.nan, torch.inf, 1
    beside.b[1].fill_(torch.inf)
    mine, found = alone.results(multi_lora_experts), beside.results(multi_lora_experts)

    assert found[0][30:].isnan().all()
    # The frozen product on a CPU depends on how many pairs an expert has: the adapters' do not.
    for one, other in ((mine[2], found[2]), (mine[3], found[4])):
        assert torch.equal(one, other)
    assert torch.equal(both.results(multi_lora_experts)[2], found[2])
    torch.testing.assert_close(mine[0], found[0][:30], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_backward_without_dx_gives_the_same_adapters():
    """A first layer needs none."""
    mine = case()
    leaves = [own.detach().requires_grad_() for own in (*mine.a, *mine.b)]
    given = replace(mine, a=leaves[:3], b=leaves[3:]).arguments()
    found = torch.autograd.grad(multi_lora_experts(*given), leaves, mine.dy)

    for own, right in zip(found, mine.results(multi_lora_experts)[2:], strict=True):
        assert torch.equal(own, right)
