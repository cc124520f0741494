"""Compare a generated kernel's file with float64, on a drawn site: what `kernels repro` writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from tlora_fx.codegen import loading
from tlora_fx.codegen.kernels import build
from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.ops import multi_lora_linear
from tlora_fx.ops.kernels import select

#: What the relative difference of a result may be: operands and results are rounded.
BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5, "float64": 1e-12}
RATE = 0.1


def repro_script(spec: KernelSpec, tokens: int, ranks: Sequence[int]) -> str:
    """A file with the kernel's code that compares a site with float64 when it is run."""
    made = build(spec)
    return f"""{made.text}

if __name__ == "__main__":
    from tlora_fx.codegen.spec import KernelSpec, Tile
    from tlora_fx.testing.kernels import compare_site

    SPEC = {made.spec.text()}  # fmt: skip
    raise SystemExit(compare_site(__file__, SPEC, tokens={tokens}, ranks={tuple(ranks)}))
"""


def compare_site(
    file: str | Path, spec: KernelSpec, tokens: int, ranks: Sequence[int], seed: int = 0
) -> int:
    """Run a site forward and backward with a file's kernel, and compare with float64.

    file       the kernel's code, edited or not
    tokens     of the row; its jobs, one for each rank, have unequal shares
    returns    0: all results are within the bound; 1: some is not; 2: the kernel was not launched
    """
    module: Any = loading.load_file(Path(file), spec)
    launched, launch = [0], module.launch

    def count(*args: Any, **options: Any) -> None:
        launched[0] += 1
        launch(*args, **options)

    module.launch = count
    site = _Site(spec, tokens, ranks, seed)
    plan: select.Plan = "sidecar" if spec.kind == "expand" else "fused"
    with select.force_tiles({spec.kind: spec.cut}), select.force_plan(plan):
        found = site.run()
    worst = 0.0
    for (name, value), expected in zip(found.items(), site.expected(), strict=True):
        norm = expected.norm().clamp_min(1e-30)
        error = float((value.detach().cpu().double() - expected).norm() / norm)
        worst = math.inf if math.isnan(error) else max(worst, error)
        typer.echo(f"{name:<3} differs from float64 by {error:.1e}, bound {BOUNDS[spec.dtype]:.0e}")
    if not launched[0]:
        others = [each for each in loading.loaded_specs() if each != spec]
        same = [each.text() for each in others if each.kind == spec.kind]
        taken = "\n  ".join(same) or "no such kernel"
        typer.echo(f"the kernel was not launched: this site takes\n  {taken}")
        return 2
    return int(worst > BOUNDS[spec.dtype])


class _Site:
    """A frozen linear with adapters, and a row of jobs: drawn."""

    def __init__(self, spec: KernelSpec, tokens: int, ranks: Sequence[int], seed: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype, stored = getattr(torch, spec.dtype), getattr(torch, spec.adapter_dtype)
        draw, jobs, rows = torch.Generator().manual_seed(seed), len(ranks), sum(ranks)

        def normal(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
            drawn = torch.randn(*shape, generator=draw, dtype=torch.float64) * scale
            return drawn.to(device, to)

        weight = normal(spec.outer, spec.inner, scale=spec.inner**-0.5)
        self.weight = weight if spec.weight_layout == "out_in" else weight.t().contiguous().t()
        self.bias = normal(spec.outer) if spec.bias else None
        self.x, self.dy = normal(tokens, spec.inner), normal(tokens, spec.outer)
        self.a = normal(rows, spec.inner, scale=spec.inner**-0.5, to=stored)
        self.b = normal(rows, spec.outer, scale=0.3, to=stored)
        shares = [tokens * job * (job + 1) // (jobs * (jobs + 1)) for job in range(jobs + 1)]
        self.ranks = torch.tensor([0, *itertools.accumulate(ranks)], dtype=torch.int32)
        self.segments = torch.tensor(shares, dtype=torch.int32)
        self.scales = 0.5 + 0.25 * torch.arange(jobs, dtype=torch.float64)
        rates = torch.full((jobs,), RATE * spec.dropout, dtype=torch.float64)
        index = torch.arange(tokens, dtype=torch.int32, device=device)
        keys = torch.tensor([[7 + job, 3] for job in range(jobs)])
        self.masks = (rates, self.segments, keys, index, torch.tensor(1234567))
        self.rest = (dtype, max(ranks), spec.dropout)

    def run(self) -> dict[str, Tensor]:
        """The result and all gradients."""
        leaves = [part.requires_grad_() for part in (self.x, self.a, self.b)]
        tables = (self.a, self.b, self.ranks, self.scales, *self.masks, *self.rest)
        y = multi_lora_linear(self.x, self.weight, self.bias, *tables)
        return dict(zip(("y", "dx", "da", "db"), (y, *torch.autograd.grad(y, leaves, self.dy)),
                        strict=True))  # fmt: skip

    def expected(self) -> tuple[Tensor, ...]:
        """The same, of each job alone, in float64 on the CPU."""

        def wide(tensor: Tensor) -> Tensor:
            return tensor.detach().cpu().double()

        leaves = x, a, b = [wide(part).requires_grad_() for part in (self.x, self.a, self.b)]
        bias = None if self.bias is None else wide(self.bias)
        masks = [part.cpu() for part in self.masks]
        dropped = torch.ops.tlora_fx.keyed_dropout(x, *masks, 1)
        cuts = (itertools.pairwise(each.tolist()) for each in (self.segments, self.ranks))
        branches = [
            float(scale) * dropped[start:stop] @ a[first:last].t() @ b[first:last]
            for scale, (start, stop), (first, last) in zip(self.scales, *cuts, strict=True)
        ]
        y = F.linear(x, wide(self.weight), bias) + torch.cat(branches)
        return (y.detach(), *torch.autograd.grad(y, leaves, wide(self.dy)))
