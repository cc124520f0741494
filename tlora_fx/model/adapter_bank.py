"""Storage of all adapters of a site.

Each job's A and B, and their gradients, are views of one leaf a site, so that one operator serves
all jobs while each job's optimizer sees parameters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tlora_fx.ir.graph import AdapterSite, Pieces

Cut = Pieces | None
# Columns that one draw of a mask decides, and the bits of a site's id.
COLUMNS = 8
MASK = (1 << 32) - 1


class AdapterBank(nn.Module):
    """The adapters of J jobs on one frozen linear.

    a        [R, in], rows ranks[j]:ranks[j+1] are job j's A; rows behind the last belong to nobody
    b        [R, out], the same rows are job j's B transposed
    ranks    int32 [J + 1] on the CPU; a job without an adapter has no rows
    scales   float64 [J] on the CPU, what the job's branch is multiplied with
    rates    float64 [J] on the CPU, dropout
    site     int64 [] on the CPU, the site's id in dropout masks; its upper 32 bits are the first
             column block of x where x is a piece of the site's input
    shards   how a and b are cut where processes hold pieces of them
    """

    ranks: Tensor
    scales: Tensor
    rates: Tensor
    site: Tensor

    def __init__(
        self,
        sites: Sequence[AdapterSite | None],
        shape: tuple[int, int],
        dtype: torch.dtype,
        site_id: int,
        rows: int | None = None,
        shards: tuple[Cut, Cut] = (None, None),
    ) -> None:
        """Make an empty bank on the meta device.

        sites    each job's adapter here, None for jobs without one
        shape    (in, out) of the frozen linear, of this process's piece
        rows     R, at least the sum of all ranks, which is the default
        shards   which of a and b are pieces
        """
        super().__init__()
        self.shards = shards
        sizes = [0 if site is None else site.rank for site in sites]
        offsets = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
        scales = [0.0 if site is None else site.scaling for site in sites]
        rates = [0.0 if site is None else site.dropout for site in sites]
        rows = offsets[-1] if rows is None else rows
        assert rows >= offsets[-1]
        self.a = nn.Parameter(torch.empty(rows, shape[0], dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(rows, shape[1], dtype=dtype, device="meta"))
        self.register_buffer("ranks", torch.tensor(offsets, dtype=torch.int32), persistent=False)
        self.register_buffer("scales", torch.tensor(scales, dtype=torch.float64), persistent=False)
        self.register_buffer("rates", torch.tensor(rates, dtype=torch.float64), persistent=False)
        self.register_buffer("site", torch.tensor(site_id, dtype=torch.int64), persistent=False)

    def materialize(self, device: torch.device) -> None:
        """Give A, B and their gradients zeroed memory on a device."""
        for name in ("a", "b"):
            empty = getattr(self, name)
            leaf = nn.Parameter(torch.zeros_like(empty, device=device))
            leaf.grad = torch.zeros_like(leaf)
            setattr(self, name, leaf)

    def rehome(self, grad_a: Tensor, grad_b: Tensor) -> None:
        """Let gradients lie elsewhere, such as in one buffer for all banks; nothing is copied.

        grad_a, grad_b   like a and b
        """
        self.a.grad, self.b.grad = grad_a, grad_b

    def offset_columns(self, piece: int) -> None:
        """Count dropout's columns from where this process's piece of x begins.

        piece    its index; pieces are multiples of 8 columns, which are one block of a mask
        """
        first = piece * self.a.shape[1] // COLUMNS
        self.site = (self.site & MASK) | (first << 32)

    def serves(self, job: int) -> bool:
        """Whether a job has an adapter here."""
        start, stop = self.ranks[job : job + 2].tolist()
        return bool(stop > start)

    def job_parameters(self, job: int) -> tuple[nn.Parameter, nn.Parameter]:
        """One job's A [r, in] and B [out, r] with their gradients, all views of the bank."""
        start, stop = self.ranks[job : job + 2].tolist()
        views = []
        for leaf, turned in ((self.a, False), (self.b, True)):
            assert leaf.grad is not None
            value, grad = leaf.data[start:stop], leaf.grad[start:stop]
            view = nn.Parameter(value.t() if turned else value)
            view.grad = grad.t() if turned else grad
            views.append(view)
        return views[0], views[1]
