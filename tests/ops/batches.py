"""Jobs of a row run together, alone, or in another order, and their parts of the results."""

import itertools
from dataclasses import replace

import torch

from tlora_fx.ops import multi_lora_linear


def run(made, dy, *, x=None, a=None, b=None, **other):
    """Output and gradients."""
    leaves = [
        (getattr(made, name) if value is None else value).detach().clone().requires_grad_()
        for name, value in (("x", x), ("a", a), ("b", b))
    ]
    arguments = made.arguments(**dict(zip("xab", leaves, strict=True)))
    y = multi_lora_linear(*arguments, **other)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def jobs_of(made, dy):
    """Each job's part of everything."""
    bounds = list(itertools.accumulate(made.row.lengths, initial=0))
    rows = list(itertools.accumulate(made.ranks, initial=0))
    for job, rank in enumerate(made.ranks):
        own, ranks = slice(*bounds[job : job + 2]), slice(*rows[job : job + 2])
        yield {
            "x": made.x[:, own], "dy": dy[:, own], "a": made.a[ranks], "b": made.b[ranks],
            "rank": rank, "scale": made.scales[job], "rate": made.row.rates[job],
            "keys": made.row.keys[job], "index": made.row.token_index[own],
        }  # fmt: skip


def batch(made, jobs, max_rank=9):
    """Run some jobs together."""
    row = type(made.row)(
        tuple(job["x"].shape[1] for job in jobs),
        tuple(job["rate"] for job in jobs),
        device=made.row.device,
    )
    row.keys = torch.stack([job["keys"] for job in jobs])
    row.token_index = torch.cat([job["index"] for job in jobs])
    batch = replace(
        made, row=row, ranks=tuple(job["rank"] for job in jobs),
        scales=tuple(job["scale"] for job in jobs),
    )  # fmt: skip
    x, dy = (torch.cat([job[name] for job in jobs], 1) for name in ("x", "dy"))
    a, b = (torch.cat([job[name] for job in jobs]) for name in ("a", "b"))
    return run(batch, dy, x=x, a=a, b=b, max_rank=max_rank)


def split(results, jobs):
    """Each job's part of output and gradients."""
    y, dx, da, db = results
    tokens, ranks = [job["x"].shape[1] for job in jobs], [job["rank"] for job in jobs]
    return list(
        zip(y.split(tokens, 1), dx.split(tokens, 1), da.split(ranks), db.split(ranks), strict=True)
    )
