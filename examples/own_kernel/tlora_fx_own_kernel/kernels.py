"""Two kernels: the branches of all jobs, forward or backward, and the gradient of A or B.

A program works on the tokens of one job. Its tiles begin where the job begins, so that no bit of
a job depends on its neighbours, and it reads the job's own rows of A and B alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tlora_fx.ops.kernels import KernelTemplate, Tile, fill

_BRANCH = """
from tlora_fx.codegen.device_library import segment_tile

INNER = tl.constexpr($inner)
OUTER = tl.constexpr($outer)
RANK = tl.constexpr($rank)
JOBS = tl.constexpr($jobs)
ROWS = tl.constexpr($rows)
COLUMNS = tl.constexpr($columns)
DEPTH = tl.constexpr($depth)


@triton.jit(do_not_specialize=["jobs"])
def kernel(y, x, a, b, out, s, segments, ranks, scales, jobs):
    job, tile = segment_tile(tl.program_id(0), segments, jobs, ROWS, JOBS)
    if job < jobs:
        rows = tl.load(segments + job) + tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < tl.load(segments + job + 1))[:, None]
        rows = rows.to(tl.int64)[:, None]
        first = tl.load(ranks + job)
        lanes = tl.arange(0, RANK)
        held = lanes < tl.load(ranks + job + 1) - first
        own = (first + lanes).to(tl.int64)
        low = tl.zeros((ROWS, RANK), tl.$wide)
        for start in range(0, INNER, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            there = depth < INNER
            left = tl.load(x + rows * INNER + depth[None, :], inside & there[None, :], 0.0)
            place = own[None, :] * INNER + depth[:, None]
            right = tl.load(a + place, held[None, :] & there[:, None], 0.0)
            low += tl.dot(left, right.to(left.dtype), out_dtype=tl.$wide, input_precision="ieee")
        low = (low * tl.load(scales + job)).to(x.dtype.element_ty)
        tl.store(s + rows * RANK + lanes[None, :], low, inside)
        for start in range(0, OUTER, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            there = (columns < OUTER)[None, :]
            right = tl.load(
                b + own[:, None] * OUTER + columns[None, :], held[:, None] & there, 0.0
            )
            value = tl.dot(low, right.to(low.dtype), out_dtype=tl.$wide, input_precision="ieee")
            place = rows * OUTER + columns[None, :]
            value += tl.load(y + place, inside & there, 0.0)  #? adds
            tl.store(out + place, value.to(low.dtype), inside & there)


def launch(y, x, a, b, out, s, segments, ranks, scales):
    jobs = segments.shape[0] - 1
    tiles = triton.cdiv(x.shape[0], $rows) + jobs
    kernel[(tiles,)](y, x, a, b, out, s, segments, ranks, scales, jobs, **META)
"""

_GRADIENT = """
WIDTH = tl.constexpr($width)
RANK = tl.constexpr($rank)
ROWS = tl.constexpr($rows)
COLUMNS = tl.constexpr($columns)


@triton.jit
def kernel(s, x, out, segments, ranks):
    job = tl.program_id(0)
    first = tl.load(ranks + job)
    lanes = tl.arange(0, RANK)
    held = (lanes < tl.load(ranks + job + 1) - first)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(segments + job), tl.load(segments + job + 1)
    total = tl.zeros((RANK, COLUMNS), tl.$wide)
    for row in range(start, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        left = tl.load(
            s + rows.to(tl.int64)[None, :] * RANK + lanes[:, None], inside[None, :] & held, 0.0
        )
        right = tl.load(
            x + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :],
            inside[:, None] & (columns < WIDTH)[None, :],
            0.0,
        )
        total += tl.dot(left, right, out_dtype=tl.$wide, input_precision="ieee")
    place = (first + lanes).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), held & (columns < WIDTH)[None, :])


def launch(s, x, out, segments, ranks):
    grid = (segments.shape[0] - 1, triton.cdiv($width, $columns))
    kernel[grid](s, x, out, segments, ranks, **META)
"""


@dataclass(frozen=True, slots=True)
class Branch(KernelTemplate):
    """Each job's branch behind y: s = scale x Aᵀ, and y + s B; or the same without y.

    inner, outer   widths of x and y; without y, an outer of 0 gives s alone
    rank           the largest of a job, padded to a power of two from 16 on
    jobs           a power of two that the jobs of a row do not exceed
    dtype          of x and y
    adds           whether there is a y
    """

    name: ClassVar[str] = "own-branch"

    inner: int
    outer: int
    rank: int = 16
    jobs: int = 64
    dtype: str = "bfloat16"
    adds: int = 1

    def tiles(self) -> tuple[Tile, ...]:
        """The first is right for some thousand tokens."""
        return tuple(
            Tile(rows, columns, depth=64, warps=warps, stages=3)
            for rows, columns, warps in ((64, 128, 4), (32, 128, 4), (128, 128, 8), (64, 256, 8))
        )

    def source(self, tile: Tile) -> str:
        """For x and y of one dtype; A and B are cast to it."""
        wide = "float64" if self.dtype == "float64" else "float32"
        own = {name: getattr(self, name) for name in ("inner", "outer", "rank", "jobs", "adds")}
        cut = {"rows": tile.rows, "columns": tile.columns, "depth": tile.depth}
        return fill(_BRANCH, {**own, **cut, "wide": wide})

    def example(self, tokens: int, device: torch.device) -> Callable[[Any], object]:
        """Four jobs of equal lengths and the largest rank."""
        dtype = getattr(torch, self.dtype)
        y, x = (
            torch.randn(tokens, n, dtype=dtype, device=device) for n in (self.outer, self.inner)
        )
        a, b = (torch.randn(4 * self.rank, n, device=device) for n in (self.inner, self.outer))
        segments, ranks = (_shares(count, device) for count in (tokens, 4 * self.rank))
        out, s = torch.empty_like(y), x.new_empty(tokens, self.rank)
        scales = torch.ones(4, device=device)
        return lambda module: module.launch(y, x, a, b, out, s, segments, ranks, scales)


@dataclass(frozen=True, slots=True)
class Gradient(KernelTemplate):
    """The gradient of each job's A or B: sᵀ x over the job's tokens, in their order.

    width   of x
    rank    columns of s
    dtype   of s and x
    """

    name: ClassVar[str] = "own-gradient"

    width: int
    rank: int = 16
    dtype: str = "bfloat16"

    def tiles(self) -> tuple[Tile, ...]:
        """Narrow, because only columns and jobs are cut."""
        return tuple(
            Tile(rows, columns, depth=0, warps=4, stages=3)
            for rows, columns in ((64, 64), (128, 32), (64, 32), (128, 64))
        )

    def source(self, tile: Tile) -> str:
        """For s and x of one dtype."""
        wide = "float64" if self.dtype == "float64" else "float32"
        cut = {"rows": tile.rows, "columns": tile.columns}
        return fill(_GRADIENT, {**cut, "width": self.width, "rank": self.rank, "wide": wide})

    def example(self, tokens: int, device: torch.device) -> Callable[[Any], object]:
        """Four jobs of equal lengths and the largest rank."""
        dtype = getattr(torch, self.dtype)
        s, x = (torch.randn(tokens, n, dtype=dtype, device=device) for n in (self.rank, self.width))
        segments, ranks = (_shares(count, device) for count in (tokens, 4 * self.rank))
        out = torch.empty(4 * self.rank, self.width, device=device)
        return lambda module: module.launch(s, x, out, segments, ranks)


def _shares(count: int, device: torch.device) -> torch.Tensor:
    """Offsets of four equal shares."""
    return torch.tensor([count * job // 4 for job in range(5)], dtype=torch.int32, device=device)
