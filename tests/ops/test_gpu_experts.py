"""`expert_linear` on CUDA: torch's grouped product, against float64."""

import pytest
import torch

from tlora_fx.ops import expert_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (64, 3), (5, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_results_and_gradients_are_those_of_float64(turned, inner, outer):
    """Also of matrices as narrow as a small rank, stored in an order of their own."""
    draw = torch.Generator("cuda").manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    x, index = drawn(70, inner), torch.randint(5, (70, 3), generator=draw, device="cuda")
    sides = (inner, outer) if turned else (outer, inner)
    weight, dy = drawn(*sides, 6).permute(2, 0, 1), drawn(70, 3, outer)
    given = [x, weight, None, index, turned]

    def results(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = expert_linear(*leaves, *given[2:])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for found, right in zip(results(torch.bfloat16), results(torch.float64), strict=True):
        assert float((found.double() - right).norm() / right.norm()) < 6e-3
