"""Random inputs of a load, and the form in which an arm is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.site_loads import Load

WORKING_SET = 512 * 2**20  # bytes of all sets of inputs, several times a large L2 cache
MAX_SETS = 12


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of tensors; adapters hold numbers that every arm's type can hold.

    xs       [M, in] of each group, which want gradients
    weights  [out, in] of each site
    dys      [M, out] of each site
    a, b     [R, in] and [R, out] of each site, jobs one below the other, b is B transposed
    """

    load: Load
    xs: list[Tensor]
    weights: list[Tensor]
    dys: list[Tensor]
    a: list[Tensor]
    b: list[Tensor]

    @property
    def inputs_of_sites(self) -> list[Tensor]:
        """The x of each site."""
        outers = [outers for _, outers in self.load.groups]
        return [x for x, own in zip(self.xs, outers, strict=True) for _ in own]

    def of_job(self, site: int) -> Iterator[tuple[slice, Tensor, Tensor, float]]:
        """Each job's tokens, A [r, in], Bᵀ [r, out] and scale at a site."""
        jobs = zip(tokens(self.load), ranks(self.load), self.load.scales, strict=True)
        for own, rows, scale in jobs:
            yield own, self.a[site][rows], self.b[site][rows], scale


@dataclass(frozen=True, slots=True)
class Built:
    """An arm on one set of inputs.

    forward    the y of every site
    leaves     what is trained
    gradients  from the leaves' gradients to (da [R, in], db [R, out]) of every site
    context    what stands around forward and backward
    weights    what the arm has in place of the inputs' weights
    """

    inputs: Inputs
    forward: Callable[[], Sequence[Tensor]]
    leaves: Sequence[Tensor] = ()
    gradients: Callable[[Sequence[Tensor]], list[tuple[Tensor, Tensor]]] = field(
        default=lambda _: []
    )
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    weights: Sequence[Tensor] = ()

    def step(self) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """Forward and backward: the y of every site; the gradients of every x, then of leaves."""
        ys = self.forward()
        wanted = [*self.inputs.xs, *self.leaves]
        return ys, torch.autograd.grad(ys, wanted, self.inputs.dys)


def tokens(load: Load) -> list[slice]:
    """Each job's tokens."""
    return [slice(*ends) for ends in pairwise([0, *accumulate(load.lengths)])]


def ranks(load: Load) -> list[slice]:
    """Each job's rows of a and b."""
    return [slice(*ends) for ends in pairwise([0, *accumulate(load.ranks)])]


def draw(load: Load, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """One set of random inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        # Drawn in float32 so that every type gets the same numbers, rounded to bfloat16.
        value = torch.randn(shape, generator=generator, device=device) * scale
        return value.to(torch.bfloat16).to(dtype)

    count, sites = sum(load.ranks), load.sites
    return Inputs(
        load,
        [normal(load.tokens, inner).requires_grad_() for inner, _ in load.groups],
        [normal(outer, inner, scale=inner**-0.5) for inner, outer in sites],
        [normal(load.tokens, outer) for _, outer in sites],
        [normal(count, inner, scale=inner**-0.5) for inner, _ in sites],
        [normal(count, outer, scale=0.02) for _, outer in sites],
    )


def with_load(inputs: Inputs, load: Load) -> Inputs:
    """The same tensors for a load of the same shapes and another dropout rate."""
    return replace(inputs, load=load)


def sets_of(load: Load, dtype: torch.dtype, device: str) -> list[Inputs]:
    """So many sets that together they are larger than the caches."""
    width = dtype.itemsize
    rows = sum(inner for inner, _ in load.groups) + sum(outer for _, outer in load.sites)
    size = width * (load.tokens * rows + sum(inner * outer for inner, outer in load.sites))
    count = min(max(2, -(-WORKING_SET // size)), MAX_SETS) if device == "cuda" else 2
    return [draw(load, dtype, device, seed) for seed in range(count)]
