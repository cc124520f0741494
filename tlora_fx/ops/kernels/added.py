"""How the adapters of a site run on generated kernels behind an operator of another library.

It is the sidecar plan without its frozen product: shrink, and expand into what is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_fx.ops.kernels.dispatch import Run, plain
from tlora_fx.ops.kernels.support import Served
from tlora_fx.ops.site_group import SiteGroup


def forward(y: Tensor, x: Tensor, group: SiteGroup, served: Served) -> list[Tensor]:
    """Add every job's branch to y [..., out], in place; returns S, and the dropout bits."""
    rows, (site,) = plain(x), served.sites
    run = Run.open(served, group, len(rows), x.device)
    s = run.empty(len(rows), site.width, dtype=x.dtype)
    octets = (len(rows), -(-group.inner // 8)) if site.drops else (0,)
    bits = run.empty(*octets, dtype=torch.uint8)
    with run.on_device():
        if len(rows):
            run.serve(_forward, rows, s, bits, y.view(len(rows), -1))
    return [s, bits]


def _forward(run: Run, rows: Tensor, s: Tensor, bits: Tensor, y: Tensor) -> None:
    packed = run.pack(0)
    run.shrink(rows, [packed], [s], [bits], None)
    run.expand([0], [s], [packed.b], None, y, accumulate=True)


def input_gradient(
    dy: Tensor, group: SiteGroup, s: Tensor, bits: Tensor, need_dx: bool
) -> list[Tensor]:
    """What the branches add to dx, or [0]; dS; the parts of dB."""
    served, rows = Served.of(dy, group), plain(dy)
    (site,) = served.sites
    run = Run.open(served, group, len(rows), dy.device)
    dx = run.empty(*((len(rows), group.inner) if need_dx else (0,)), dtype=dy.dtype)
    ds = run.empty(*s.shape, dtype=s.dtype)
    total = torch.promote_types(torch.float32, dy.dtype)
    chunks = site.chunks(len(rows), served.jobs)
    parts = run.empty(chunks, site.width, site.outer, dtype=total)
    with run.on_device():
        if len(rows):
            run.serve(_input_gradient, rows, s, bits, dx if need_dx else None, ds, parts)
    return [dx.view(*dy.shape[:-1], group.inner) if need_dx else dx, ds, parts]


def _input_gradient(
    run: Run, rows: Tensor, s: Tensor, bits: Tensor, dx: Tensor | None, ds: Tensor, parts: Tensor
) -> None:
    packed = run.packed(0)
    run.lora_b_backward(0, rows, s, packed, parts, ds, None)
    if dx is not None:
        mask = [bits] if run.served.sites[0].drops else None
        run.expand([0], [ds], [packed.a], None, dx, accumulate=False, bits=mask)
