"""The arguments that the operators of a group of sites share, and the shapes that follow from them.

A group is the sites of one `multi_lora_linear`, or of several that read the same x.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import AdapterTableError, TloraError
from tlora_fx.ops.adapter_tables import AdapterTables, check_adapters
from tlora_fx.ops.philox import site_name

SCHEMA = (
    "Tensor[] a, Tensor[] b, Tensor[] ranks, Tensor[] scales, Tensor[] rates, Tensor segments, "
    "Tensor keys, Tensor token_index, Tensor[] sites, ScalarType compute_dtype, int max_rank, "
    "bool drops"
)


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """n sites on one x, as the schema has them; see `multi_lora_linear`."""

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
    max_rank: int
    drops: bool

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
        """What `SCHEMA` names, in its order."""
        return (
            self.a, self.b, self.ranks, self.scales, self.rates, self.segments, self.keys,
            self.token_index, self.sites, self.compute_dtype, self.max_rank, self.drops,
        )  # fmt: skip

    def check(self, x: Tensor, biases: list[Tensor | None] | None = None) -> None:
        """Refuse what metadata alone shows to be wrong; raises AdapterTableError."""
        count = len(self.weights)
        lists = (self.a, self.b, self.ranks, self.scales, self.rates, self.sites)
        if not count or any(len(one) != count for one in lists):
            raise AdapterTableError(
                "every site needs a weight and tables of its own",
                expected=f"{count} of each",
                found=[count, *map(len, lists)],
            )
        for site, weight in enumerate(self.weights):
            bias = biases[site] if biases else None
            check_adapters(x, weight, bias, self.a[site], self.b[site])

    def tables(self, site: int, tokens: int) -> AdapterTables:
        """Who has which tokens and ranks at a site; raises as `multi_lora_linear`."""
        with named(self.sites[site]):
            found = AdapterTables.read(
                self.a[site], self.b[site], self.ranks[site], self.scales[site], self.rates[site],
                self.segments, self.keys, self.token_index, self.sites[site], tokens,
            )  # fmt: skip
            found.fit(self.max_rank, self.drops)
            return found


@contextmanager
def named(site: Tensor) -> Iterator[None]:
    """Let an error say at which site it happened."""
    try:
        yield
    except TloraError as error:
        where = site_name(int(site))
        raise type(error)(error.what, help=error.help, site=where, **error.facts) from None


def tokens_of(x: Tensor) -> int:
    """The tokens that all but the last dimension enumerate."""
    return prod(x.shape[:-1])
