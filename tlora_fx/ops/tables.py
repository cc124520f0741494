"""The small tables that operators take beside their tensors, and what they must be.

A row brings segments, keys and token_index; a site brings ranks, scales, rates and its number. They
lie on the CPU, so that operators check them before any work without waiting for a device.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_fx.errors import (
    AdapterTableError,
    MaskKeyError,
    SegmentError,
    TableNotOnDevice,
    TloraError,
)

INTEGERS = (torch.int32, torch.int64)

_is_initialized: Callable[[], bool] = torch.cuda.is_initialized


def token_bounds(segments: Tensor, tokens: int) -> list[int]:
    """Offsets where each job's tokens begin, and where the last job's end.

    segments  int [J + 1] on the CPU, job j owns units segments[j]:segments[j + 1]
    tokens    how many tokens the tensor has, a whole multiple of the units
    returns   J + 1 token offsets from 0 to `tokens`
    raises    SegmentError
    """
    check_table(segments, "segments")
    bounds: list[int] = segments.tolist()
    if bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise SegmentError(
            "segments must rise from 0",
            expected="0 <= segments[1] <= ... <= segments[J]",
            found=bounds,
            help="job j owns units segments[j]:segments[j + 1]",
        )
    units = bounds[-1]
    if units == tokens:
        return bounds
    if units == 0 or tokens % units:
        raise SegmentError(
            f"segments of {units} units cannot cover {tokens} tokens",
            expected="a whole number of tokens a unit",
            found=bounds,
            help="segments and tensor must come from the same row",
        )
    return [bound * (tokens // units) for bound in bounds]


def covering(segments: Tensor, rows: int) -> list[int]:
    """Offsets where each job's rows begin; unlike tokens of a unit, every row counts for itself.

    raises    SegmentError where the last offset is not the number of rows
    """
    bounds = token_bounds(segments, rows)
    if segments[-1] != rows:
        raise SegmentError(
            f"segments do not cover the {rows} rows that they are summed over",
            expected=f"a last offset of {rows}",
            found=segments.tolist(),
        )
    return bounds


def check_table(table: Tensor, name: str) -> None:
    """Refuse what cannot be a table of offsets: wrong rank, type, or device.

    Whoever checks a table goes on to read it on the host. While a CUDA graph is captured that is
    an error: the graph would keep what the table says now.
    """
    # Without a driver, a build with CUDA raises where it is asked for its stream.
    if _is_initialized() and torch.cuda.is_current_stream_capturing():
        raise TableNotOnDevice(
            f"an operator reads {name} on the host while a CUDA graph is captured",
            help="run this model without CUDA graphs",
        )
    if table.dim() != 1 or table.numel() < 1 or table.dtype not in INTEGERS:
        raise SegmentError(
            f"{name} must be integers of shape [J + 1]",
            found=f"{table.dtype}{list(table.shape)}",
        )
    if table.device.type != "cpu":
        raise SegmentError(
            f"{name} must lie on the CPU",
            found=table.device,
            help="an operator reads it without waiting for the device",
        )


def check_rates(rates: Tensor, jobs: int) -> list[float]:
    """The dropout rate of each of `jobs` jobs, each in [0, 1); raises MaskKeyError."""
    return [check_rate(rate) for rate in _numbers(rates, jobs, "dropout rates", MaskKeyError)]


def _numbers(table: Tensor, jobs: int, what: str, error: type[TloraError]) -> list[float]:
    """One number a job; raises the error where they are not so many, or lie on a device."""
    if table.shape != (jobs,) or table.device.type != "cpu":
        raise error(
            f"{what} must be one number a job, on the CPU",
            expected=f"[{jobs}] on cpu",
            found=f"{list(table.shape)} on {table.device}",
        )
    values: list[float] = table.tolist()
    return values


def check_rate(rate: float) -> float:
    """A dropout rate in [0, 1), as it came, 0 in `without_dropout`; raises MaskKeyError."""
    if not 0.0 <= rate < 1.0:
        raise MaskKeyError("a dropout rate must lie in [0, 1)", found=rate)
    return rate if _dropping else 0.0


# Tables and graphs hold the rates of training, and captured graphs read them where they are.
_dropping = True


def is_dropping() -> bool:
    """Whether dropout rates count."""
    return _dropping


@contextmanager
def without_dropout() -> Iterator[None]:
    """Inside, each dropout rate that an operator is given counts as 0: a model is evaluated."""
    global _dropping  # noqa: PLW0603  (operators have no argument that could tell them)
    before, _dropping = _dropping, False
    try:
        yield
    finally:
        _dropping = before


def check_keys(keys: Tensor, jobs: int) -> list[tuple[int, int]]:
    """The pair (seed, step) of each of `jobs` jobs, 32 bits each; raises MaskKeyError."""
    if keys.shape != (jobs, 2) or keys.dtype not in INTEGERS or keys.device.type != "cpu":
        raise MaskKeyError(
            "keys must be a pair (seed, step) a job, int64 on the CPU",
            expected=f"int64[{jobs}, 2] on cpu",
            found=f"{keys.dtype}{list(keys.shape)} on {keys.device}",
        )
    pairs: list[Sequence[int]] = keys.tolist()
    for job, pair in enumerate(pairs):
        if not all(0 <= word < 2**32 for word in pair):
            raise MaskKeyError("seed and step must lie in [0, 2**32)", job=job, found=tuple(pair))
    return [(pair[0], pair[1]) for pair in pairs]


def check_token_index(token_index: Tensor, tokens: int) -> Tensor:
    """The token indices as int64 [tokens]; raises MaskKeyError."""
    if token_index.numel() != tokens or token_index.dtype not in INTEGERS:
        raise MaskKeyError(
            "token_index must name each token of the tensor",
            expected=f"{tokens} integers",
            found=f"{token_index.dtype}{list(token_index.shape)}",
            help="dropout masks belong to tokens: hand on the row's token_index",
        )
    return token_index.reshape(-1).to(torch.int64)


def rank_bounds(ranks: Tensor, jobs: int, total: int) -> list[int]:
    """Offsets where each job's rows of a and b begin, of `total`; raises AdapterTableError."""
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
    """Factor of each of `jobs` jobs' branches; raises AdapterTableError."""
    return _numbers(scales, jobs, "scales", AdapterTableError)


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


_SCHEMA = (
    "Tensor{0} a, Tensor{0} b, Tensor{0} ranks, Tensor{0} scales, Tensor{0} rates, "
    "Tensor segments, Tensor keys, Tensor token_index, Tensor{0} {1}, "
    "ScalarType compute_dtype, int max_rank{2}, bool drops{3}"
)
#: Of operators that graphs hold, on one site and on several; and of those that they are made of.
SITE_SCHEMA = _SCHEMA.format("", "site", "=0", "=True")
SITES_SCHEMA = _SCHEMA.format("[]", "sites", "=0", "=True")
PART_SCHEMA = _SCHEMA.format("[]", "sites", "", "")


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """n sites on one x, as the schemas have them; see `multi_lora_linear`."""

    weights: list[Tensor]
    a: list[Tensor]
    b: list[Tensor]
    ranks: list[Tensor]
    scales: list[Tensor]
    rates: list[Tensor]
    segments: Tensor
    keys: Tensor
    token_index: Tensor
    sites: list[Tensor]
    compute_dtype: torch.dtype
    max_rank: int = 0
    drops: bool = True

    @classmethod
    def single(cls, weights: list[Tensor], *tables: Any) -> SiteGroup:
        """One site, of tables as `SITE_SCHEMA` has them.

        weights   its weight; none of an operator that does not multiply with it
        """
        a, b, ranks, scales, rates, segments, keys, token_index, site, *settings = tables
        lists = [a], [b], [ranks], [scales], [rates]
        return cls(weights, *lists, segments, keys, token_index, [site], *settings)

    @property
    def inner(self) -> int:
        """Columns of x."""
        return self.a[0].shape[1]

    @property
    def jobs(self) -> int:
        """J, of the row."""
        return self.segments.shape[0] - 1

    def capacity(self, site: int) -> int:
        """The largest rank that a job may have at a site."""
        return self.max_rank or self.a[site].shape[0]

    def arguments(self) -> tuple[Any, ...]:
        """Arguments that `PART_SCHEMA` names, in its order."""
        return (
            self.a, self.b, self.ranks, self.scales, self.rates, self.segments, self.keys,
            self.token_index, self.sites, self.compute_dtype, self.max_rank, self.drops,
        )  # fmt: skip

    def check(self, x: Tensor, biases: list[Tensor | None] | None = None) -> None:
        """Refuse what metadata alone shows to be wrong; raises AdapterTableError."""
        count = len(self.weights)
        lists = (self.a, self.b, self.ranks, self.scales, self.rates, self.sites)
        if not count or any(len(items) != count for items in lists):
            raise AdapterTableError(
                "every site needs a weight and tables of its own",
                expected=f"{count} of each",
                found=[count, *map(len, lists)],
            )
        for site, weight in enumerate(self.weights):
            bias = biases[site] if biases else None
            check_adapters(x, weight, bias, self.a[site], self.b[site])


# What `PART_SCHEMA` names.
_PART_TABLES = 12


class ForwardCall(NamedTuple):
    """Arguments of the operators of a forward, behind their weights and biases.

    joined   all y are one tensor
    """

    group: SiteGroup
    tail_columns: int = 0
    joined: bool = False

    @classmethod
    def of(cls, weights: list[Tensor], rest: Sequence[Any]) -> ForwardCall:
        """From arguments as the schemas have them; torch leaves out what is as by default."""
        return cls(SiteGroup(weights, *rest[:_PART_TABLES]), *rest[_PART_TABLES:])

    def arguments(self) -> tuple[Any, ...]:
        """As the schemas have them."""
        return (*self.group.arguments(), self.tail_columns, self.joined)


class InputGradientCall(NamedTuple):
    """Arguments of the operators of dx and dS, behind their weights.

    s, bits   of each site, as the forward gave them
    """

    group: SiteGroup
    s: list[Tensor]
    bits: list[Tensor]
    need_dx: bool
    tail_columns: int = 0

    @classmethod
    def of(cls, weights: list[Tensor], rest: Sequence[Any]) -> InputGradientCall:
        """From arguments as the schemas have them."""
        return cls(SiteGroup(weights, *rest[:_PART_TABLES]), *rest[_PART_TABLES:])


class AdapterGradientsCall(NamedTuple):
    """Arguments of the operator of dA and dB, behind its weights.

    s, bits        of each site, as the forward gave them
    ds, db_parts   of each site, as the operator of dx gave them
    """

    group: SiteGroup
    s: list[Tensor]
    bits: list[Tensor]
    ds: list[Tensor]
    db_parts: list[Tensor]

    @classmethod
    def of(cls, weights: list[Tensor], rest: Sequence[Any]) -> AdapterGradientsCall:
        """From arguments as the schemas have them."""
        return cls(SiteGroup(weights, *rest[:_PART_TABLES]), *rest[_PART_TABLES:])


# The module paths that numbers were made of in this process.
_names: dict[int, str] = {}


def site_id(path: str) -> int:
    """The 31-bit number of a module path, the third counter word of its masks."""
    digest = hashlib.blake2s(path.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little") & 0x7FFFFFFF
    _names[number] = path
    return number


def site_name(number: int) -> str:
    """The module path that a number was made of in this process, else the number."""
    number &= 0xFFFFFFFF
    return _names.get(number, str(number))


@contextmanager
def named(site: Tensor) -> Iterator[None]:
    """Name the site in errors that are raised within this context."""
    try:
        yield
    except TloraError as error:
        where = site_name(int(site))
        raise type(error)(error.what, help=error.help, site=where, **error.facts) from None


def tokens_of(x: Tensor) -> int:
    """The tokens that all but the last dimension enumerate."""
    return prod(x.shape[:-1])
