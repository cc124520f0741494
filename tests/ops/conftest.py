"""Rows of several jobs, and plain references that share no code with the operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

torch.set_num_threads(2)

WORD = 0xFFFFFFFF


def philox_word(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-7 on Python integers, after the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(7):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def sixteen(token: int, column: int, site: int, last: int, key: Sequence[int]) -> int:
    """The 16-bit value that decides one element."""
    word = philox_word([token, column // 8, site, last], key)[column % 8 // 2]
    return word >> 16 if column % 2 else word & 0xFFFF


@dataclass
class Row:
    """The tables of one row: jobs of some lengths, each with a seed, a rate and a scale."""

    lengths: tuple[int, ...]
    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    step: int = 3
    site: int = 77
    tokens_per_unit: int = 1
    device: str = "cpu"
    start: tuple[int, ...] = ()
    segments: Tensor = field(init=False)
    rate_table: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    token_index: Tensor = field(init=False)
    site_tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        jobs = len(self.lengths)
        self.rates = self.rates or (0.0,) * jobs
        self.seeds = self.seeds or tuple(range(11, 11 + jobs))
        starts = self.start or (0,) * jobs
        self.segments = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32)
        self.rate_table = torch.tensor(self.rates, dtype=torch.float64)
        self.keys = torch.tensor([[seed, self.step] for seed in self.seeds])
        index = [
            first + i
            for first, n in zip(starts, self.lengths, strict=True)
            for i in range(n * self.tokens_per_unit)
        ]
        self.token_index = torch.tensor(index, dtype=torch.int32, device=self.device)
        self.site_tensor = torch.tensor(self.site)

    @property
    def tokens(self) -> int:
        """All tokens of the row."""
        return sum(self.lengths) * self.tokens_per_unit

    def span(self, job: int) -> slice:
        """The tokens of one job."""
        first, last = self.segments[job : job + 2].tolist()
        return slice(first * self.tokens_per_unit, last * self.tokens_per_unit)

    def mask_tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """rates, segments, keys, token_index, site: the tail of `keyed_dropout`."""
        return self.rate_table, self.segments, self.keys, self.token_index, self.site_tensor

    def multiplier(self, columns: int) -> Tensor:
        """What dropout multiplies with, float64 [tokens, columns], by Python integers."""
        out = torch.ones(self.tokens, columns, dtype=torch.float64)
        for job, rate in enumerate(self.rates):
            threshold = min(round(rate * 65536), 65535)
            for row in range(*self.span(job).indices(self.tokens)):
                token = int(self.token_index.reshape(-1)[row])
                for column in range(columns):
                    key = self.keys[job].tolist()
                    kept = sixteen(token, column, self.site, 0, key) >= threshold
                    out[row, column] = kept * 65536 / (65536 - threshold)
        return out


@dataclass
class Lora:
    """Inputs of `multi_lora_linear` for a row, and the plain reference on them."""

    row: Row
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    compute: torch.dtype

    def arguments(self, **other: Tensor | None) -> tuple[object, ...]:
        """All arguments in the operator's order, some replaced by name."""
        given = {name: getattr(self, name) for name in ("x", "weight", "bias", "a", "b")} | other
        offsets = torch.tensor([0, *itertools.accumulate(self.ranks)], dtype=torch.int32)
        scales = torch.tensor(self.scales, dtype=torch.float64)
        return (*given.values(), offsets, scales, *self.row.mask_tables(), self.compute)

    def leaves(self) -> tuple[Tensor, ...]:
        """x, a and b, copied, asking for gradients."""
        return tuple(t.detach().clone().requires_grad_() for t in (self.x, self.a, self.b))

    def reference(self, x: Tensor, a: Tensor, b: Tensor, drop: Tensor | None = None) -> Tensor:
        """Each job alone, in float64, then put together."""
        drop = self.row.multiplier(x.shape[-1]).to(x.device) if drop is None else drop
        rows = x.double().reshape(-1, x.shape[-1])
        out = rows @ self.weight.double().t()
        if self.bias is not None:
            out = out + self.bias.double()
        parts, first = [], 0
        for job, (rank, scale) in enumerate(zip(self.ranks, self.scales, strict=True)):
            own, ranks = self.row.span(job), slice(first, first + rank)
            branch = (rows[own] * drop[own]) @ a.double()[ranks].t() @ b.double()[ranks]
            parts.append(out[own] + scale * branch)
            first += rank
        return torch.cat(parts).reshape(*x.shape[:-1], out.shape[1])


def make_lora(
    lengths: tuple[int, ...],
    ranks: tuple[int, ...],
    rates: tuple[float, ...] = (),
    *,
    features: tuple[int, int] = (6, 5),
    dtype: torch.dtype = torch.float64,
    adapter_dtype: torch.dtype | None = None,
    compute: torch.dtype | None = None,
    device: str = "cpu",
    bias: bool = True,
    batch: int = 0,
) -> Lora:
    """Random inputs; `batch` tokens a unit gives the batch form x [B, S, I]."""
    row = Row(lengths, rates, tokens_per_unit=batch or 1, device=device)
    draw = torch.Generator().manual_seed(sum(lengths) + 7 * sum(ranks))
    adapter = adapter_dtype or dtype

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, to)

    inner, outer = features
    shape = (sum(lengths), batch) if batch else (1, row.tokens)
    scales = tuple(0.5 + j for j in range(len(lengths)))
    return Lora(
        row,
        ranks,
        scales,
        normal(*shape, inner),
        normal(outer, inner) / inner**0.5,
        normal(outer) if bias else None,
        normal(sum(ranks), inner, to=adapter),
        normal(sum(ranks), outer, to=adapter),
        compute or adapter,
    )


@pytest.fixture(scope="session")
def row() -> Callable[..., Row]:
    """Make the tables of a row."""
    return Row


@pytest.fixture(scope="session")
def lora() -> Callable[..., Lora]:
    """Make inputs of `multi_lora_linear` with their reference."""
    return make_lora


@dataclass
class Attention:
    """Inputs of `packed_attention` for a row of sequences, and the plain reference on them."""

    row: Row
    sequences: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout: float = 0.0
    scale: float = 0.4

    def arguments(self, **other: Tensor | None) -> tuple[object, ...]:
        """All arguments in the operator's order, some replaced by name."""
        given = {name: getattr(self, name) for name in ("q", "k", "v", "sinks")} | other
        q, k, v, sinks = given.values()
        bounds = [0, *itertools.accumulate(self.sequences)]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self.q.device)
        longest = torch.tensor(max(self.sequences), dtype=torch.int32)
        _, *tables = self.row.mask_tables()
        rule = self.scale, self.causal, self.window, self.softcap, sinks, self.dropout
        return (q, k, v, cu_seqlens, longest, *tables, *rule)

    def leaves(self) -> tuple[Tensor, ...]:
        """q, k and v, copied, asking for gradients."""
        return tuple(t.detach().clone().requires_grad_() for t in (self.q, self.k, self.v))

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One dense score matrix over the whole row, in float64: out and lse."""
        tokens, heads, _ = q.shape
        q, k, v = q.double(), k.double(), v.double()
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self._visible(tokens).to(q.device), -torch.inf)
        sinks = self.sinks if sinks is None else sinks
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(heads, tokens, 1)
            scores = torch.cat([scores, column], -1)
        weights = torch.softmax(scores, -1)[..., :tokens]
        if self.dropout:
            weights = weights * self._multiplier(heads, tokens).to(q.device)
        return torch.einsum("hij,jhd->ihd", weights, v), torch.logsumexp(scores, -1)

    def _visible(self, tokens: int) -> Tensor:
        owner = torch.repeat_interleave(torch.tensor(self.sequences))
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        visible = owner[:, None] == owner
        if self.causal:
            visible &= distance >= 0
        if self.window > 0:
            visible &= distance.abs() < self.window
        return visible

    def _multiplier(self, heads: int, tokens: int) -> Tensor:
        out = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
        threshold = round(self.dropout * 65536)
        index = self.row.token_index.reshape(-1).tolist()
        for job, pair in enumerate(self.row.keys.tolist()):
            own = range(*self.row.span(job).indices(tokens))
            for head, i, j in itertools.product(range(heads), own, own):
                value = sixteen(index[i], index[j], self.row.site, head + 1, pair)
                out[head, i, j] = (value >= threshold) * 65536 / (65536 - threshold)
        return out


def make_attention(
    jobs: tuple[tuple[int, ...], ...],
    heads: tuple[int, int] = (4, 2),
    width: int = 8,
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sinks: bool = False,
    **rule: Any,
) -> Attention:
    """Random inputs; `jobs` holds the sequence lengths of each job."""
    row = Row(tuple(map(sum, jobs)), device=device)
    draw = torch.Generator().manual_seed(row.tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)

    many, few = heads
    q, k, v = (normal(row.tokens, count, width) for count in (many, few, few))
    sequences = tuple(itertools.chain.from_iterable(jobs))
    extra = normal(many) if sinks else None
    return Attention(row, sequences, q, k, v, sinks=extra, **rule)


@pytest.fixture(scope="session")
def attention() -> Callable[..., Attention]:
    """Make inputs of `packed_attention` with their reference."""
    return make_attention


@pytest.fixture(scope="session")
def compiles() -> Callable[..., int]:
    """Run a function compiled with dynamic shapes; hand back how often it was compiled."""

    def run(function: Callable[..., object], calls: Sequence[tuple[object, ...]]) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
        for arguments in calls:
            expected = function(*arguments)
            torch.testing.assert_close(compiled(*arguments), expected, rtol=0, atol=0)
        return counter.frame_count

    return run
