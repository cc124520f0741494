"""Adapters on experts by kernels on CUDA, in bfloat16, against float64."""

from dataclasses import replace

import pytest
import torch

from tests.ops.expert_jobs import by_job_and_expert, case, error
from tlora_fx.ops import multi_lora_experts
from tlora_fx.ops.expert_lora import Call, served
from tlora_fx.ops.kernels import strict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = {"dtype": torch.bfloat16, "adapters": torch.float32, "device": "cuda"}


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": (64, 96)},
        {"sizes": (64, 96), "crossed": True, "turned": True, "shared": False, "biased": True},
        {"sizes": (256, 192), "lengths": (300, 1, 0, 900), "ranks": (16, 4, 8, 33), "skew": 0.7},
        {"sizes": (136, 72), "lengths": (500, 40), "ranks": (128, 2), "experts": 32, "chosen": 4},
    ],
    ids=str,
)
def test_results_and_gradients_are_those_of_float64(fields, adapters):
    """Every one is rounded as often as torch rounds the plain computation in bfloat16."""
    mine = case(**(BF16 | {"adapters": adapters} | fields))
    found, expected = mine.results(multi_lora_experts), mine.wide().results(by_job_and_expert)

    assert served(Call(*mine.arguments()))
    assert error(found, expected) < 1e-2


def test_eight_jobs_on_many_experts_are_more_groups_than_torch_takes():
    """1,024 of them; and ten runs give the same bits."""
    mine = case(
        (90, 200, 10, 60, 120, 0, 300, 20), (2, 4, 8, 16, 2, 4, 8, 16), experts=128, chosen=8,
        sizes=(256, 128), **BF16,
    )  # fmt: skip
    first = mine.results(multi_lora_experts)

    assert error(first, mine.wide().results(by_job_and_expert)) < 1e-2
    for _ in range(9):
        again = mine.results(multi_lora_experts)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("is_strict", [False, True])
def test_no_bit_depends_on_neighbours(is_strict):
    """Beside a job that is no number; in strict mode also alone."""
    both = case((130, 70), (5, 20), sizes=(128, 96), **BF16)
    alone = replace(
        both, x=both.x[:130], index=both.index[:130], dy=both.dy[:130], a=both.a[:1],
        b=both.b[:1], jobs=[0], scales=both.scales[:1], segments=both.segments[:2],
    )  # fmt: skip
    beside = replace(both, x=both.x.clone(), dy=both.dy.clone(), b=[own.clone() for own in both.b])
    beside.x[130:], beside.dy[130:] = torch.nan, torch.inf
    beside.b[1].fill_(torch.inf)
    with strict(is_strict):
        mine, found, poisoned = (one.results(multi_lora_experts) for one in (alone, both, beside))

    assert poisoned[0][130:].isnan().all()
    others = [(found, poisoned), (poisoned, [mine[0], mine[1], mine[2], None, mine[3]])]
    for one, other in others[: 1 + is_strict]:
        assert torch.equal(one[0][:130], other[0][:130])
        assert torch.equal(one[1][:130], other[1][:130])
        assert torch.equal(one[2], other[2])
        assert torch.equal(one[4], other[4])


def test_a_captured_graph_is_replayed_with_other_segments():
    """Tables of the row are refreshed; the jobs' adapters stay where they are."""
    from tlora_fx.ops.kernels import refresh, release

    mine = case((60, 40), (4, 8), sizes=(64, 96), **BF16)
    leaves = [own.detach().requires_grad_() for own in (mine.x, *mine.a, *mine.b)]
    given = replace(mine, x=leaves[0], a=leaves[1:3], b=leaves[3:]).arguments()

    def step():
        y = multi_lora_experts(*given)
        return [y, *torch.autograd.grad(y, leaves, mine.dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    mine.segments[1] = 25
    refresh(mine.segments)
    graph.replay()

    try:
        assert error(found, mine.wide().results(by_job_and_expert)) < 1e-2
    finally:
        release(mine.segments)
