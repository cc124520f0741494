"""What is computed while kernels are compiled ahead leaves nothing that later calls rely on."""

import pytest
import torch

from tests.ops.interpreted.test_packed import assert_close
from tlora_fx.codegen import launching
from tlora_fx.codegen.ahead import ahead
from tlora_fx.ops import multi_lora_linear
from tlora_fx.ops.kernels import extend_weight, select


@pytest.mark.parametrize("plan", select.PLANS)
def test_calls_after_some_that_started_nothing_start_all(lora, plan):
    """As layers of one shape do it: a later call is served from what one before had started."""
    made = lora((17, 0, 1), (3, 2, 18), (0.3, 0.0, 0.2), features=(48, 80), dtype=torch.float32)
    made.weight = extend_weight(made.weight, 64)
    x, a, b = made.leaves()
    dy = torch.randn(1, 18, 80, generator=torch.Generator().manual_seed(1))

    def gradients():
        y = multi_lora_linear(*made.arguments(x=x, a=a, b=b), max_rank=18, drops=True)
        return y.detach(), *torch.autograd.grad(y, (x, a, b), dy)

    with select.force_plan(plan):
        with ahead.compiling():
            launching.tape.started = started = []
            try:
                nothing = [gradients() for _ in range(3)][-1]
            finally:
                launching.tape.started = None
        found = [gradients() for _ in range(3)]
    expected = made.reference(x, a, b)
    wanted = expected.detach(), *torch.autograd.grad(expected, (x, a, b), dy.double())

    assert all(torch.isfinite(value).all() for value in nothing)
    assert not [launch for launch in started if not launch.by_address]
    for values in found:
        assert_close(values, wanted)
