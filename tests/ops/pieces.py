"""A site whose input is cut into pieces, as processes of a tensor-parallel group hold it."""

import torch

from tests.ops.batches import run

COUNT = 2


def assert_pieces_sum_to_the_whole(made, dy, bound, **other):
    """Pieces of x, W and A give parts of y that sum to it; dx and dA are its pieces, dB sums."""
    made.bias = None
    whole = run(made, dy, **other)
    inner, site = made.x.shape[-1], made.row.site
    parts = []
    for index in range(COUNT):
        own = slice(index * inner // COUNT, (index + 1) * inner // COUNT)
        piece = torch.tensor(site | (own.start // 8) << 32)
        parts.append(_run_piece(made, dy, own, piece, other))
    made.row.site_tensor = torch.tensor(site)
    y, dx, da, db = zip(*parts, strict=True)
    joined = sum(y), torch.cat(dx, -1), torch.cat(da, -1), sum(db)
    for one, expected in zip(joined, whole, strict=True):
        torch.testing.assert_close(one, expected, rtol=bound, atol=bound)


def _run_piece(made, dy, own, site, other):
    weight, made.row.site_tensor = made.weight, site
    made.weight = weight[:, own].contiguous()
    try:
        return run(made, dy, x=made.x[..., own], a=made.a[:, own], **other)
    finally:
        made.weight = weight
