"""Jobs that adapt a mixture's experts, and what each of them gets alone in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What `multi_lora_experts` is given, all jobs' adapters among it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    index: Tensor
    turned: bool
    a: list[Tensor]
    b: list[Tensor]
    jobs: list[int]
    scales: list[float]
    crossed: bool
    segments: Tensor
    dy: Tensor

    def arguments(self) -> tuple[Any, ...]:
        """In the operator's order."""
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-1])

    def results(self, function: Any) -> list[Tensor]:
        """y, dx, and each job's dA and dB."""
        x, *leaves = (t.detach().requires_grad_() for t in (self.x, *self.a, *self.b))
        count = len(self.a)
        given = replace(self, x=x, a=leaves[:count], b=leaves[count:]).arguments()
        y = function(*given)
        return [y.detach(), *torch.autograd.grad(y, (x, *leaves), self.dy.to(y.dtype))]

    def wide(self) -> Case:
        """The same in float64."""
        changes: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name).double()
            for name in ("x", "weight", "bias", "dy")
        }
        lists = {name: [t.double() for t in getattr(self, name)] for name in ("a", "b")}
        return replace(self, **changes, **lists)


def case(
    lengths: tuple[int, ...] = (9, 0, 13),
    ranks: tuple[int, ...] = (2, 3, 17),
    *,
    experts: int = 4,
    chosen: int = 2,
    sizes: tuple[int, int] = (20, 12),
    turned: bool = False,
    crossed: bool = False,
    shared: bool = True,
    biased: bool = False,
    skew: float = 0.0,
    by_column: bool = True,
    dtype: torch.dtype = torch.float32,
    adapters: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random tensors; a job of rank 0 has no adapter, and one expert may have nothing to do.

    skew        part of the pairs that go to the first experts, whoever their tokens belong to
    by_column   B is stored by columns, as models have it
    """
    draw = torch.Generator().manual_seed(seed)
    adapters = adapters or dtype

    def drawn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, kind)

    tokens, (inner, outer) = sum(lengths), sizes
    scores = torch.rand(tokens, experts, generator=draw)
    scores[:, :chosen] += (torch.rand(tokens, 1, generator=draw) < skew) * 2.0
    index = scores.topk(chosen, dim=1).indices
    # The last expert is hit by nobody, where enough others are left.
    index = index.where(index < experts - 1, 0) if chosen < experts - 1 else index
    jobs = [job for job, rank in enumerate(ranks) if rank]
    widths = (outer, inner) if crossed else (inner, outer)
    a = [drawn(experts * ranks[job], widths[0], kind=adapters) for job in jobs]
    b = [drawn(experts * ranks[job], widths[1], kind=adapters).t() for job in jobs]
    return Case(
        x=drawn(tokens, inner) if shared else drawn(tokens, chosen, inner),
        weight=drawn(experts, *((inner, outer) if turned else (outer, inner))) / inner**0.5,
        bias=drawn(experts, outer) if biased else None,
        index=index.to(device),
        turned=turned,
        a=a,
        b=b if by_column else [own.contiguous() for own in b],
        jobs=jobs,
        scales=[0.5 + job for job in jobs],
        crossed=crossed,
        segments=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        dy=drawn(tokens, chosen, outer),
    )


def by_job_and_expert(*given: Any) -> Tensor:
    """The same in plain PyTorch: a loop over jobs and experts."""
    x, weight, bias, index, turned, a, b, jobs, scales, crossed, segments = given
    experts, bounds = weight.shape[0], segments.tolist()
    pairs = x[:, None].expand(*index.shape, x.shape[-1]) if x.dim() == 2 else x
    matrices = weight[index] if turned else weight[index].transpose(2, 3)
    y = (pairs[:, :, None] @ matrices)[:, :, 0]
    y = y if bias is None else y + bias[index]
    for job, scale, own_a, own_b in zip(jobs, scales, a, b, strict=True):
        inside = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
        inside[bounds[job] : bounds[job + 1]] = True
        for expert in range(experts):
            rank = len(own_a) // experts
            upper = own_a[expert * rank : (expert + 1) * rank]
            lower = own_b[:, expert::experts]
            update = upper.t() @ lower.t() if not crossed else lower @ upper
            hit = (inside & (index == expert))[:, :, None]
            y = y + torch.where(hit, scale * (torch.where(hit, pairs, 0) @ update), 0)
    return y


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance of a tensor from what is expected, over the norm of that."""
    apart = [
        float((mine.double() - right).norm() / right.norm().clamp(min=1e-30))
        for mine, right in zip(found, expected, strict=True)
    ]
    return max(apart)
