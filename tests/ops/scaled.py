"""`dora_scale` behind the sites of `make_lora`, and the plain reference: W + s B A as a matrix."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def magnitudes_of(made, jobs) -> list[Tensor]:
    """A DoRA job's each, near what norms are."""
    draw = torch.Generator().manual_seed(len(jobs))
    columns = made.weight.shape[0]
    drawn = torch.rand(len(jobs), columns, generator=draw, dtype=torch.float64) + 0.5
    return list(drawn.to(made.x.device, made.a.dtype).unbind())


def arguments(made, y, magnitudes, jobs, **other):
    """All arguments in the operator's order."""
    a, b, ranks, scales, rates, segments, keys, _, site, _ = made.arguments(**other)[3:]
    largest = max(made.ranks[job] for job in jobs)
    tables = a, b, ranks, scales, rates, site, segments, keys
    return (y, made.weight, made.bias, magnitudes, *tables, list(jobs), largest)


def norms(made, job) -> Tensor:
    """Of the rows of a job's whole matrix, float64."""
    first = sum(made.ranks[:job])
    rows = slice(first, first + made.ranks[job])
    change = made.b.double()[rows].t() @ made.a.double()[rows]
    return (made.weight.double() + made.scales[job] * change).norm(dim=1)


def reference(made, y, magnitudes, jobs) -> Tensor:
    """Each job's tokens by themselves, in float64."""
    rows, parts = y.double().reshape(-1, y.shape[-1]), []
    given = dict(zip(jobs, magnitudes, strict=True))
    shift = 0 if made.bias is None else made.bias.double()
    for job in range(len(made.ranks)):
        own = rows[made.row.span(job)]
        if job in given:
            own = (own - shift) * (given[job].double() / norms(made, job)) + shift
        parts.append(own)
    return torch.cat(parts).reshape(y.shape)


def results(run, y, magnitudes, dy) -> tuple[Tensor, ...]:
    """Output, and gradients of y and of each magnitude."""
    leaves = [t.detach().clone().requires_grad_() for t in (y, *magnitudes)]
    found = run(leaves[0], leaves[1:])
    return (found.detach(), *torch.autograd.grad(found, leaves, dy.to(found.dtype)))


def others(made, jobs) -> list[int]:
    """The tokens of all other jobs."""
    spans = (made.row.span(job) for job in range(len(made.ranks)) if job not in jobs)
    return list(itertools.chain.from_iterable(range(span.start, span.stop) for span in spans))
