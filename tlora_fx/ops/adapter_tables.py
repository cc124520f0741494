"""Read the tables of `multi_lora_linear`: who has which ranks, tokens, scale and mask."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.errors import AdapterTableError
from tlora_fx.ops.masks import JobMasks
from tlora_fx.ops.philox import threshold_of
from tlora_fx.ops.tables import check_table


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
    def read(
        cls,
        a: Tensor,
        b: Tensor,
        ranks: Tensor,
        scales: Tensor,
        rates: Tensor,
        segments: Tensor,
        keys: Tensor,
        token_index: Tensor,
        site: Tensor,
        tokens: int,
    ) -> "AdapterTables":
        """Check all tables; raises AdapterTableError, SegmentError, MaskKeyError."""
        masks = JobMasks.read(rates, segments, keys, token_index, site, tokens)
        jobs = len(masks.rates)
        rows = rank_bounds(ranks, jobs, a.shape[0])
        factors = check_scales(scales, jobs)
        return cls(tuple(_branches(masks.bounds, rows, factors)), masks)

    def fit(self, max_rank: int, drops: bool) -> None:
        """Refuse jobs that are more than the graph was made for; raises AdapterTableError."""
        largest = max((one.ranks.stop - one.ranks.start for one in self.branches), default=0)
        check_fit(largest, any(map(threshold_of, self.masks.rates)), max_rank, drops)

    def draw(self, branch: Branch, columns: int) -> Tensor | None:
        """The branch's keep mask, or None where it drops nothing."""
        return self.masks.keep(branch.job, columns) if self.masks.drops(branch.job) else None


def _branches(bounds: list[int], rows: list[int], scales: list[float]) -> Iterator[Branch]:
    for job, scale in enumerate(scales):
        tokens, ranks = slice(*bounds[job : job + 2]), slice(*rows[job : job + 2])
        if tokens.start < tokens.stop and ranks.start < ranks.stop:
            yield Branch(job, tokens, ranks, scale)


def rank_bounds(ranks: Tensor, jobs: int, total: int) -> list[int]:
    """Where each job's rows of a and b begin, of `total`; raises AdapterTableError."""
    check_table(ranks, "ranks")
    rows: list[int] = ranks.tolist()
    # Rows behind the last job's belong to nobody: banks of equal layers have one size.
    if len(rows) != jobs + 1 or rows[0] != 0 or rows[-1] > total:
        raise AdapterTableError(
            "rank offsets must lead from 0 into the rows of a and b, one step a job",
            expected=f"{jobs + 1} offsets from 0 to {total} at most",
            found=rows,
        )
    if any(first > second for first, second in itertools.pairwise(rows)):
        raise AdapterTableError("rank offsets must rise", found=rows)
    return rows


def check_scales(scales: Tensor, jobs: int) -> list[float]:
    """What each of `jobs` jobs' branches is multiplied with; raises AdapterTableError."""
    if scales.shape != (jobs,) or scales.device.type != "cpu":
        raise AdapterTableError(
            "scales must be one number a job, on the CPU",
            expected=f"[{jobs}] on cpu",
            found=f"{list(scales.shape)} on {scales.device}",
        )
    values: list[float] = scales.tolist()
    return values


def check_fit(largest: int, drop: bool, max_rank: int, drops: bool) -> None:
    """Refuse jobs that are more than the graph was made for; raises AdapterTableError.

    largest, drop     the jobs' largest rank, and whether any drops
    max_rank, drops   what the graph says; max_rank 0: any rank
    """
    if max_rank and largest > max_rank:
        raise AdapterTableError(
            "a job's rank is above what the graph was compiled for",
            expected=f"{max_rank} at most",
            found=largest,
            help="compile the jobs again, with this one among them",
        )
    if drop and not drops:
        raise AdapterTableError(
            "a job drops, but the graph was compiled for jobs that do not",
            help="compile the jobs again, with this one among them",
        )


def check_adapters(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> None:
    """Refuse shapes and types that do not fit the layer; raises AdapterTableError."""
    if weight.dim() != 2 or a.dim() != 2 or b.dim() != 2 or x.dim() < 1:
        raise AdapterTableError(
            "weight, a and b must be matrices",
            found=f"weight {list(weight.shape)}, a {list(a.shape)}, b {list(b.shape)}",
        )
    out_features, in_features = weight.shape
    fits = x.shape[-1] == in_features == a.shape[1] and out_features == b.shape[1]
    if not fits or a.shape[0] != b.shape[0]:
        raise AdapterTableError(
            "adapters must fit their layer",
            expected=f"x [..., {in_features}], a [R, {in_features}], b [R, {out_features}]",
            found=f"x {list(x.shape)}, a {list(a.shape)}, b {list(b.shape)}",
        )
    if bias is not None and bias.shape != (out_features,):
        raise AdapterTableError(
            "bias must fit its layer", expected=[out_features], found=list(bias.shape)
        )
    if x.dtype != weight.dtype or a.dtype != b.dtype or not a.dtype.is_floating_point:
        raise AdapterTableError(
            "x and weight need one dtype, a and b too",
            found=f"x {x.dtype}, weight {weight.dtype}, a {a.dtype}, b {b.dtype}",
        )


def sum_dtype(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """The type in which a layer's output and an adapter's meet."""
    return torch.promote_types(left, right)
