"""The adapters of a site in plain PyTorch, job by job.

Serves the CPU, and on CUDA what the kernels do not. Each job's branch runs on its own segment,
never on masked rows of others: a NaN of one job has no way into another's sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.ops.dropout import JobMasks, keep_scale, threshold_of
from tlora_fx.ops.tables import SiteGroup, check_fit, check_scales, named, rank_bounds


@dataclass(frozen=True, slots=True)
class Branch:
    """One job's adapter on this layer, with the tokens and ranks that it owns."""

    job: int
    tokens: slice
    ranks: slice
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """The adapters of a row on one layer: only jobs with a rank and tokens."""

    branches: tuple[Branch, ...]
    masks: JobMasks

    @classmethod
    def read(cls, group: SiteGroup, index: int, tokens: int) -> AdapterTables:
        """Check all tables of a site of a group.

        raises   AdapterTableError, SegmentError, MaskKeyError, naming the site
        """
        site = group.sites[index]
        with named(site):
            masks = JobMasks.read(
                group.rates[index], group.segments, group.keys, group.token_index, site, tokens
            )
            jobs = len(masks.rates)
            rows = rank_bounds(group.ranks[index], jobs, group.a[index].shape[0])
            scales = check_scales(group.scales[index], jobs)
            branches = tuple(_branches(masks.bounds, rows, scales))
            largest = max(
                (branch.ranks.stop - branch.ranks.start for branch in branches), default=0
            )
            drops = any(map(threshold_of, masks.rates))
            check_fit(largest, drops, group.max_rank, group.drops)
        return cls(branches, masks)

    def draw(self, branch: Branch, columns: int) -> Tensor | None:
        """The branch's keep mask, or None where it drops nothing."""
        return self.masks.keep(branch.job, columns) if self.masks.drops(branch.job) else None


def _branches(bounds: list[int], rows: list[int], scales: list[float]) -> Iterator[Branch]:
    for job, scale in enumerate(scales):
        tokens, ranks = slice(*bounds[job : job + 2]), slice(*rows[job : job + 2])
        if tokens.start < tokens.stop and ranks.start < ranks.stop:
            yield Branch(job, tokens, ranks, scale)


def forward(x: Tensor, biases: list[Tensor | None], group: SiteGroup) -> list[Tensor]:
    """y [..., out] of each site."""
    rows = x.reshape(-1, x.shape[-1])
    return [
        _site_forward(rows, bias, group, site).view(*x.shape[:-1], -1)
        if rows.numel()
        else x.new_empty(*x.shape[:-1], group.weights[site].shape[0])
        for site, bias in enumerate(biases)
    ]


def _site_forward(rows: Tensor, bias: Tensor | None, group: SiteGroup, site: int) -> Tensor:
    tables = AdapterTables.read(group, site, len(rows))
    y = torch.nn.functional.linear(rows, group.weights[site], bias)
    return add_branches(y, rows, tables, group, site)


def add_branches(
    y: Tensor, rows: Tensor, tables: AdapterTables, group: SiteGroup, site: int
) -> Tensor:
    """Add every job's branch to its rows of y [tokens, out], in place; returns y."""
    a, b, compute = group.a[site], group.b[site], group.compute_dtype
    for branch in tables.branches:
        keep = tables.draw(branch, rows.shape[1])
        dropped = _drop(rows[branch.tokens].to(compute), keep, tables, branch.job)
        hidden = dropped @ a[branch.ranks].to(compute).t()
        _add_product(y[branch.tokens], hidden, b[branch.ranks].to(compute), branch.scale)
    return y


def input_gradient(
    dys: list[Tensor], group: SiteGroup, need_dx: bool
) -> tuple[Tensor, list[Tensor]]:
    """dx, or [0] unless needed; dS of each site in the compute dtype, zero where nobody's."""
    first = dys[0]
    total = first.new_empty(0)
    all_ds = []
    for site, dy in enumerate(dys):
        dx, ds = _site_input_gradient(dy.reshape(-1, dy.shape[-1]), group, site, need_dx)
        all_ds.append(ds)
        if dx is not None:
            total = total.add_(dx) if site else dx
    return total.view(*first.shape[:-1], group.inner) if need_dx else total, all_ds


def _site_input_gradient(
    grads: Tensor, group: SiteGroup, site: int, need_dx: bool
) -> tuple[Tensor | None, Tensor]:
    tables = AdapterTables.read(group, site, len(grads))
    dx = grads @ group.weights[site] if need_dx else None
    return dx, add_branch_gradients(dx, grads, tables, group, site)


def add_branch_gradients(
    dx: Tensor | None, grads: Tensor, tables: AdapterTables, group: SiteGroup, site: int
) -> Tensor:
    """Add to dx [tokens, in], in place, what comes through the branches; returns dS.

    dx   None where it is not wanted
    """
    a, b, compute = group.a[site], group.b[site], group.compute_dtype
    ds = grads.new_zeros(len(grads), group.capacity(site), dtype=compute)
    for branch in tables.branches:
        own_a, own_b = a[branch.ranks].to(compute), b[branch.ranks].to(compute)
        inner = (grads[branch.tokens].to(compute) @ own_b.t()).mul_(branch.scale)
        ds[branch.tokens, : len(own_a)] = inner
        if dx is None:
            continue
        keep = tables.draw(branch, group.inner)
        if keep is None:
            _add_product(dx[branch.tokens], inner, own_a, 1.0)
        else:
            _add(dx[branch.tokens], _drop(inner @ own_a, keep, tables, branch.job))
    return ds


def adapter_gradients(
    dys: list[Tensor], x: Tensor, group: SiteGroup, ds: list[Tensor]
) -> list[Tensor]:
    """da of each site, then db; masks and the low-rank rows are computed again."""
    rows, compute = x.reshape(-1, x.shape[-1]), group.compute_dtype
    all_da, all_db = [], []
    for site, dy in enumerate(dys):
        grads = dy.reshape(-1, dy.shape[-1])
        tables = AdapterTables.read(group, site, len(rows))
        da, db = _zeros(group.a[site]), _zeros(group.b[site])
        for branch in tables.branches:
            own_a = group.a[site][branch.ranks].to(compute)
            keep = tables.draw(branch, rows.shape[1])
            dropped = _drop(rows[branch.tokens].to(compute), keep, tables, branch.job)
            da[branch.ranks] = ds[site][branch.tokens, : len(own_a)].t() @ dropped
            low = (dropped @ own_a.t()).t() @ grads[branch.tokens].to(compute)
            db[branch.ranks] = low.mul_(branch.scale)
        all_da.append(da)
        all_db.append(db)
    return [*all_da, *all_db]


def _drop(part: Tensor, keep: Tensor | None, tables: AdapterTables, job: int) -> Tensor:
    if keep is None:
        return part
    return torch.where(keep, part * keep_scale(tables.masks.rates[job]), 0)


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target += scale * (left @ right), in place, summed in the wider of the two types."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
        return
    wide = torch.promote_types(target.dtype, left.dtype)
    target.copy_(target.to(wide) + (left @ right).to(wide) * scale)


def _add(target: Tensor, value: Tensor) -> None:
    wide = torch.promote_types(target.dtype, value.dtype)
    target.copy_(target.to(wide) + value.to(wide))


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)
