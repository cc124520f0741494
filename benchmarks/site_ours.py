"""Our operator as arms: as it chooses by itself, with a plan forced on it, and strict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tlora_fx.ops  # noqa: F401  (registers the operators)
from benchmarks.site_arms import Arm, CannotError
from benchmarks.site_inputs import Built, Inputs

SEED, STEP = 11, 3  # of the jobs' dropout masks
KERNELS = "tlora_fx.ops.kernels"
PLANS = ("fused", "sidecar", "concat")

ops = torch.ops.tlora_fx


def ours(
    inputs: Inputs,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    weights: Sequence[Tensor] | None = None,
) -> Built:
    """Our operator; sites that read one input are one call where the operator for that exists.

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
        self.drops = load.rate > 0
        self.max_rank = max(load.ranks)


def _apply(
    x: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    tables: Tables,
    sites: Sequence[Tensor],
) -> list[Tensor]:
    """The y of some linears that read one x."""
    row = tables.segments, tables.keys, tables.token_index
    if len(weights) > 1 and hasattr(ops, "multi_lora_linears"):
        many: Any = ops.multi_lora_linears
        per_site = [[table] * len(weights) for table in (tables.ranks, tables.scales, tables.rates)]
        nothing = [None] * len(weights)
        last = (*row, sites, x.dtype)
        return list(many(x, weights, nothing, a, b, *per_site, *last, **_extra(many, tables)))
    one: Any = ops.multi_lora_linear
    own = tables.ranks, tables.scales, tables.rates
    return [
        one(x, weight, None, a[i], b[i], *own, *row, sites[i], x.dtype, **_extra(one, tables))
        for i, weight in enumerate(weights)
    ]


def _extra(operator: Any, tables: Tables) -> dict[str, Any]:
    """The capacity arguments, where this version of the operator has them."""
    known = _arguments(operator)
    given = {"max_rank": tables.max_rank, "drops": tables.drops}
    return {name: value for name, value in given.items() if name in known}


_KNOWN: dict[str, frozenset[str]] = {}


def _arguments(operator: Any) -> frozenset[str]:
    name = str(operator)
    if name not in _KNOWN:
        schema = operator.default._schema
        _KNOWN[name] = frozenset(argument.name for argument in schema.arguments)
    return _KNOWN[name]


def forced(plan: str) -> Arm:
    """Our operator with one plan for every site and direction."""

    def arm(inputs: Inputs) -> Built:
        force: Any = _kernels("select", "force_plan")
        return ours(inputs, lambda: force(plan))

    return arm


@contextmanager
def choices() -> Iterator[dict[str, str]]:
    """Gathers which plan each site and direction takes while it is open, and where that is from."""
    found: dict[str, str] = {}
    try:
        selection: Any = import_module(f"{KERNELS}.select")
    except ImportError:
        yield found
        return
    choose = selection.choose

    def noting(direction: str, site: Any, *rest: Any, **named: Any) -> Any:
        choice = choose(direction, site, *rest, **named)
        found[f"{direction} {site.inner}→{site.outer}"] = (
            f"{choice.plan} ({Path(choice.source).name})"
        )
        return choice

    selection.choose = noting
    try:
        yield found
    finally:
        selection.choose = choose


def strict(inputs: Inputs) -> Built:
    """Our operator in its strict mode: one plan and one tile for every number of tokens."""
    mode: Any = _kernels("", "strict")
    return ours(inputs, lambda: mode(True))


def _kernels(module: str, name: str) -> Any:
    """A name of the room of kernels, which a build without kernels lacks."""
    where = f"{KERNELS}.{module}".rstrip(".")
    try:
        return getattr(import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise CannotError(f"there is no {where}.{name}: {error}") from error


OURS: dict[str, Arm] = {"ours": ours}
VARIANTS: dict[str, Arm] = {f"ours-{plan}": forced(plan) for plan in PLANS} | {
    "ours-strict": strict,
}
