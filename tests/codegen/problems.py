"""Random sites with all their tables, and what every kernel should give, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.ops.dropout import keep_rows, keep_scale, threshold_of


@dataclass
class Problem:
    """One site, M tokens of J jobs. What ends in `64` is the float64 reference.

    lengths, ranks_of, rates  of each job: tokens, rank, dropout rate
    x, dy, weight, bias, a, b the site's tensors; weight is [O, I] or, for in_out, [I, O]
    weight64                  [O, I], whatever the layout
    segments, keys, token_index, ranks, slots, scales, thresholds, site, jobs   the device tables
    """

    lengths: tuple[int, ...]
    ranks_of: tuple[int, ...]
    rates: tuple[float, ...]
    inner: int
    outer: int
    dtype: torch.dtype
    rank_block: int
    x: Tensor
    dy: Tensor
    weight: Tensor
    weight64: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    segments: Tensor
    keys: Tensor
    token_index: Tensor
    ranks: Tensor
    slots: Tensor
    scales: Tensor
    thresholds: Tensor
    site: int
    spec_fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        lengths: tuple[int, ...] = (5, 0, 40),
        ranks: tuple[int, ...] = (4, 8, 16),
        rates: tuple[float, ...] | None = None,
        inner: int = 32,
        outer: int = 48,
        dtype: torch.dtype = torch.float16,
        adapter_dtype: torch.dtype = torch.float32,
        rank_block: int = 16,
        bias: bool = False,
        weight_layout: str = "out_in",
        spare_rows: int = 0,
        site: int = 1234567,
        seed: int = 0,
    ) -> Problem:
        """Draw a site; rates None: no dropout. spare_rows of a and b belong to nobody."""
        rates = rates or (0.0,) * len(lengths)
        assert len(lengths) == len(ranks) == len(rates)
        drawn = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=drawn, dtype=torch.float64) * scale

        tokens, rows = sum(lengths), sum(ranks) + spare_rows
        weight = normal(outer, inner, scale=inner**-0.5).to(dtype)
        padded = [-(-rank // rank_block) * rank_block for rank in ranks]
        scales = [0.5 + 0.25 * job for job in range(len(lengths))]
        kept = [keep_scale(rate) for rate in rates]
        given = {"inner": inner, "outer": outer, "rank_block": rank_block}
        return cls(
            **given,
            lengths=lengths,
            ranks_of=ranks,
            rates=rates,
            dtype=dtype,
            x=normal(tokens, inner).to(dtype),
            dy=normal(tokens, outer).to(dtype),
            weight=weight if weight_layout == "out_in" else weight.t().contiguous(),
            weight64=weight.double(),
            bias=normal(outer).to(dtype) if bias else None,
            a=normal(rows, inner, scale=inner**-0.5).to(adapter_dtype),
            b=normal(rows, outer, scale=0.3).to(adapter_dtype),
            segments=_offsets(lengths),
            keys=torch.tensor([[7 + job, 3] for job in range(len(lengths))], dtype=torch.int32),
            token_index=torch.cat(
                [torch.arange(n, dtype=torch.int32) + 3 * n for n in lengths]
                or [torch.zeros(0, dtype=torch.int32)]
            ),
            ranks=_offsets(ranks),
            slots=_offsets(padded),
            scales=torch.tensor([s * k for s, k in zip(scales, kept, strict=True)]).float(),
            thresholds=torch.tensor([threshold_of(r) for r in rates], dtype=torch.int32),
            site=site,
            spec_fields=given
            | _spec_fields(dtype, adapter_dtype)
            | {"dropout": any(rates), "bias": bias, "weight_layout": weight_layout},
        )

    @property
    def tokens(self) -> int:
        """M."""
        return sum(self.lengths)

    @property
    def jobs(self) -> int:
        """J."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """W: the widest job's padded rank."""
        return max(int(self.slots.diff().max()), self.rank_block)

    def parts(self) -> list[tuple[int, slice, slice, slice]]:
        """Of each job its number, rows (tokens), rows of a and b, and packed rows."""
        bounds = (self.segments.tolist(), self.ranks.tolist(), self.slots.tolist())
        cuts = [[slice(*pair) for pair in itertools.pairwise(bound)] for bound in bounds]
        return [(job, *(cut[job] for cut in cuts)) for job in range(self.jobs)]

    @cached_property
    def keep(self) -> Tensor:
        """bool [M, I]: what dropout keeps."""
        keep = torch.ones(self.tokens, self.inner, dtype=torch.bool)
        for job, own, _, _ in self.parts():
            if threshold := int(self.thresholds[job]):
                key = tuple(self.keys[job].tolist())
                index = self.token_index[own].long()
                keep[own] = keep_rows(index, self.inner, threshold, key, self.site)
        return keep

    @cached_property
    def bits(self) -> Tensor:
        """uint8 [M, ceil(I / 8)]: `keep`, eight columns a byte; bits behind column I are set."""
        blocks = -(-self.inner // 8)
        keep = torch.ones(self.tokens, blocks * 8, dtype=torch.int32)
        keep[:, : self.inner] = self.keep
        shifts = torch.arange(8, dtype=torch.int32)
        return (keep.view(self.tokens, blocks, 8) << shifts).sum(-1).to(torch.uint8)

    @cached_property
    def dropped64(self) -> Tensor:
        """[M, I]: x where it is kept, not scaled."""
        return torch.where(self.keep, self.x.double(), 0.0)

    @cached_property
    def packed_rows(self) -> int:
        """P: one block more than the jobs need."""
        return int(self.slots[-1]) + self.rank_block

    def pack(self, rows: Tensor) -> Tensor:
        """[R, n] to [P, n] in the compute type, each job's rows at its slots; float64 stays."""
        packed = rows.new_zeros(self.packed_rows, rows.shape[1])
        for _, _, ranks, slots in self.parts():
            packed[slots.start : slots.start + ranks.stop - ranks.start] = rows[ranks]
        return packed

    @cached_property
    def a_packed(self) -> Tensor:
        """[P, I] in the compute type."""
        return self.pack(self.a.to(self.dtype))

    @cached_property
    def b_packed(self) -> Tensor:
        """[P, O] in the compute type."""
        return self.pack(self.b.to(self.dtype))

    @cached_property
    def flags(self) -> Tensor:
        """float32 [P / BR, strips]: all 0, for a and b are finite."""
        strips = -(-self.inner // STRIP) - (-self.outer // STRIP)
        return torch.zeros(self.packed_rows // self.rank_block, strips)

    def own(self, left: Tensor, packed: Tensor) -> Tensor:
        """sc_j * left_j packed_jᵀ in the own layout, float64 [M, W]."""
        result = torch.zeros(self.tokens, self.width, dtype=torch.float64)
        for job, own, _, slots in self.parts():
            product = left[own].double() @ packed[slots].double().t()
            result[own, : product.shape[1]] = self.scales[job].double() * product
        return result

    def expand(self, hidden: Tensor, packed: Tensor) -> Tensor:
        """hidden_j packed_j, float64 [M, n], of a hidden in the own layout."""
        result = torch.zeros(self.tokens, packed.shape[1], dtype=torch.float64)
        for _, own, _, slots in self.parts():
            width = slots.stop - slots.start
            result[own] = hidden[own, :width].double() @ packed[slots].double()
        return result

    def gradient(self, hidden: Tensor, right: Tensor) -> Tensor:
        """hidden_jᵀ right_j of every job, float64 [R, n], 0 in rows of nobody."""
        result = torch.zeros(len(self.a), right.shape[1], dtype=torch.float64)
        for _, own, ranks, _ in self.parts():
            product = hidden[own].double().t() @ right[own].double()
            result[ranks] = product[: ranks.stop - ranks.start]
        return result

    @cached_property
    def s64(self) -> Tensor:
        """S [M, W]."""
        return self.own(self.dropped64, self.a_packed)

    @cached_property
    def s(self) -> Tensor:
        """S in the compute type: what `forward`, `expand` and `lora_b_backward` are given."""
        return self.s64.to(self.dtype)

    @cached_property
    def ds64(self) -> Tensor:
        """dS [M, W]."""
        return self.own(self.dy, self.b_packed)

    @cached_property
    def ds(self) -> Tensor:
        """dS in the compute type: what `input_gradient` and `lora_a_backward` are given."""
        return self.ds64.to(self.dtype)

    @cached_property
    def y64(self) -> Tensor:
        """y [M, O] from the rounded S."""
        y = self.x.double() @ self.weight64.t() + self.expand(self.s, self.b_packed)
        return y if self.bias is None else y + self.bias.double()

    @cached_property
    def dx64(self) -> Tensor:
        """dx [M, I] from the rounded dS."""
        branch = self.expand(self.ds, self.a_packed)
        return self.dy.double() @ self.weight64 + torch.where(self.keep, branch, 0.0)

    @cached_property
    def da64(self) -> Tensor:
        """da [R, I] from the rounded dS."""
        return self.gradient(self.ds, self.dropped64)

    @cached_property
    def db64(self) -> Tensor:
        """db [R, O] from the rounded S."""
        return self.gradient(self.s, self.dy)


def _spec_fields(dtype: torch.dtype, adapter_dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "adapter_dtype": str(adapter_dtype).removeprefix("torch."),
    }


def _offsets(sizes: Any) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)


def error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖; NaN where found holds one."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


#: What `error` may be, by compute type: rounding of inputs and results, sums in float32.
BOUNDS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    """A poisoned output: what a kernel does not write stays NaN (255 in bytes)."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 255, dtype=dtype)
