"""On kernels, pieces of a site's input draw their part of its masks."""

import pytest
import torch

from tests.ops.pieces import assert_pieces_sum_to_the_whole
from tests.sampled import sampled
from tlora_fx.ops.kernels import force_plan, select


@pytest.mark.parametrize("plan", sampled(select.PLANS))
def test_pieces_of_a_site_sum_to_the_whole(lora, plan):
    """As the loop over jobs does; a second call is served by what the first one noted."""
    made = lora((5, 0, 4), (3, 2, 4), (0.3, 0.3, 0.0), dtype=torch.float32, features=(64, 48))
    dy = torch.randn(1, 9, 48)
    with force_plan(plan):
        for _ in range(3):
            assert_pieces_sum_to_the_whole(made, dy, 1e-5, max_rank=16)
