"""Pieces of a site's input, as tensor-parallel processes hold them."""

import torch

from tests.ops.pieces import assert_pieces_sum_to_the_whole


def test_pieces_of_a_site_sum_to_the_whole(lora):
    """With dropout, ranks of all sizes and a job without tokens; masks are the whole site's."""
    made = lora((5, 0, 4), (3, 2, 4), (0.3, 0.3, 0.0), features=(32, 12))
    dy = torch.randn(1, 9, 12, dtype=torch.float64)

    assert_pieces_sum_to_the_whole(made, dy, 1e-12)
