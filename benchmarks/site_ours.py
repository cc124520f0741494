"""Our operator as arms: as it chooses by itself, with a plan forced on it, and strict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.site_arms import Arm
from benchmarks.site_inputs import Built, Inputs
from tlora_fx.ops import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.select import Direction, Plan
from tlora_fx.ops.kernels.support import Site

SEED, STEP = 11, 3  # of the jobs' dropout masks


def ours(
    inputs: Inputs,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    weights: Sequence[Tensor] | None = None,
) -> Built:
    """Our operator; sites that read one input are one call.

    weights   in place of the inputs' own, with the same numbers
    """
    load, count = inputs.load, len(inputs.weights)
    given = inputs.weights if weights is None else weights
    wide = torch.promote_types(inputs.xs[0].dtype, torch.float32)
    a = [value.to(wide, copy=True).requires_grad_() for value in inputs.a]
    b = [value.to(wide, copy=True).requires_grad_() for value in inputs.b]
    tables = Tables(inputs)

    def forward() -> list[Tensor]:
        ys: list[Tensor] = []
        for x, (_, outers) in zip(inputs.xs, load.groups, strict=True):
            own = slice(len(ys), len(ys) + len(outers))
            ys += _apply(x, given[own], a[own], b[own], tables, tables.sites[own])
        return ys

    def gradients(grads: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(grads[:count], grads[count:], strict=True))

    return Built(inputs, forward, [*a, *b], gradients, context, given)


class Tables:
    """The job mix as the operator takes it: small tables on the CPU, token indices beside x."""

    def __init__(self, inputs: Inputs) -> None:
        load, jobs = inputs.load, len(inputs.load.ranks)
        self.ranks = torch.tensor([0, *accumulate(load.ranks)], dtype=torch.int32)
        self.scales = torch.tensor(load.scales, dtype=torch.float64)
        self.rates = torch.full((jobs,), load.rate, dtype=torch.float64)
        self.segments = torch.tensor([0, *accumulate(load.lengths)], dtype=torch.int32)
        self.keys = torch.tensor([[SEED + job, STEP] for job in range(jobs)], dtype=torch.int64)
        index = torch.cat([torch.arange(length, dtype=torch.int32) for length in load.lengths])
        self.token_index = index.to(inputs.xs[0].device)
        self.sites = [torch.tensor(site) for site in range(len(load.sites))]
        self.row = self.segments, self.keys, self.token_index
        self.settings = max(load.ranks), load.rate > 0

    def of_site(self, a: Tensor, b: Tensor, site: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """What an operator of one site takes behind its weight and bias."""
        own = self.ranks, self.scales, self.rates
        return (a, b, *own, *self.row, site, dtype, *self.settings)

    def of_sites(
        self, a: Sequence[Tensor], b: Sequence[Tensor], sites: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Any, ...]:
        """The same of an operator of several sites."""
        own = ([table] * len(a) for table in (self.ranks, self.scales, self.rates))
        return (a, b, *own, *self.row, sites, dtype, *self.settings)


def _apply(
    x: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    tables: Tables,
    sites: Sequence[Tensor],
) -> list[Tensor]:
    """The y of some linears that read one x."""
    if len(weights) > 1:
        shared = tables.of_sites(a, b, sites, x.dtype)
        return multi_lora_linears(x, weights, [None] * len(weights), *shared)
    shared = tables.of_site(a[0], b[0], sites[0], x.dtype)
    return [multi_lora_linear(x, weights[0], None, *shared)]


def forced(plan: Plan) -> Arm:
    """Our operator with one plan for every site and direction."""
    return lambda inputs: ours(inputs, lambda: select.force_plan(plan))


@contextmanager
def choices() -> Iterator[dict[str, str]]:
    """Gathers which plan each site and direction takes while it is open, and where that is from."""
    found: dict[str, str] = {}
    choose = select.choose

    def noting(direction: Direction, site: Site, *rest: Any, **named: Any) -> Any:
        choice = choose(direction, site, *rest, **named)
        where = f"{direction} {site.inner}→{site.outer}"
        found[where] = f"{choice.plan} ({Path(choice.source).name})"
        return choice

    with mock.patch.object(select, "choose", noting):
        yield found


def strict(inputs: Inputs) -> Built:
    """Our operator in its strict mode: one plan and one tile for every number of tokens."""
    return ours(inputs, lambda: select.strict(True))


OURS: dict[str, Arm] = {"ours": ours}
VARIANTS: dict[str, Arm] = {f"ours-{plan}": forced(plan) for plan in select.PLANS} | {
    "ours-strict": strict,
}
