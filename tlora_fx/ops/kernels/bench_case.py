"""One site, or several on one x, with random numbers: plans and kernels to be timed one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tlora_fx.codegen.spec import Kind
from tlora_fx.ops.kernels import plans
from tlora_fx.ops.kernels.dispatch import Run
from tlora_fx.ops.kernels.support import Served, Site
from tlora_fx.ops.site_group import SiteGroup

_RATE = 0.05
_WARM = 2
# What takes so much longer than the fastest is not timed again.
_FAR = 1.5
Call = Callable[[], object]


@dataclass(slots=True)
class Case:
    """A site and a row of equal jobs.

    x, dy           random; dy of the first site
    group, served   as the operators have them
    s, bits         of the forward
    """

    x: Tensor
    dy: Tensor
    group: SiteGroup
    served: Served
    s: list[Tensor]
    bits: list[Tensor]

    @classmethod
    def make(
        cls,
        shape: tuple[int, int],
        tokens: int,
        ranks: Sequence[int],
        dtype: torch.dtype,
        drops: bool,
        device: torch.device,
        beside: Sequence[int] = (),
    ) -> Case:
        """A row of `tokens` tokens, shared out evenly among jobs of these ranks.

        beside   outputs of further sites on the same x
        """
        inner, *outers = *shape, *beside
        jobs, rows = len(ranks), sum(ranks)
        bounds = [tokens * job // jobs for job in range(jobs + 1)]

        def normal(*sizes: int, to: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.float32).to(to)

        group = SiteGroup(
            [normal(outer, inner) / inner**0.5 for outer in outers],
            [normal(rows, inner, to=torch.float32) / inner**0.5 for _ in outers],
            [normal(rows, outer, to=torch.float32) for outer in outers],
            [torch.tensor([0, *accumulate(ranks)], dtype=torch.int32) for _ in outers],
            [torch.ones(jobs, dtype=torch.float64) for _ in outers],
            [torch.full((jobs,), _RATE * drops, dtype=torch.float64) for _ in outers],
            torch.tensor(bounds, dtype=torch.int32),
            torch.tensor([[job, 1] for job in range(jobs)]),
            torch.arange(tokens, dtype=torch.int32, device=device),
            [torch.tensor(7 + site) for site in range(len(outers))],
            dtype,
            max(ranks),
            drops,
        )
        x, dy = normal(tokens, inner), normal(tokens, outers[0])
        served, count = Served.of(x, group), len(outers)
        made = plans.forward(x, [None] * count, group, served)[count:]
        return cls(x, dy, group, served, made[:count], made[count:])

    @property
    def site(self) -> Site:
        """The site as kernels see it."""
        return self.served.sites[0]

    def direction(self, name: str, room: bool = False) -> Call:
        """The whole forward, or the whole of dX with dS and dB's parts.

        room   whether x or dy has room behind its rows, which is when concat-K is taken
        """
        tail = self.site.tail if room else 0
        if name == "forward":
            x = _widened(self.x, tail)
            return lambda: plans.forward(x, [None], self.group, self.served, tail)
        dys = [_widened(self.dy, tail)]
        return lambda: plans.input_gradient(dys, self.group, self.s, self.bits, True, tail)

    def kernel(self, kind: Kind) -> Call:
        """One kernel alone: of all sites where it serves several at once, else of the first."""
        run = Run.open(self.served, self.group, len(self.x), self.x.device)
        helds, site = [run.packed(place) for place in range(len(self.s))], self.site
        held = helds[0]
        wide = torch.promote_types(torch.float32, self.x.dtype)
        chunks = site.chunks(len(self.x), self.served.jobs)
        if kind == "shrink":
            return lambda: run.shrink(self.x, helds, self.s, self.bits)
        if kind == "expand":
            y = torch.empty_like(self.dy)
            return lambda: run.expand([0], self.s, [held.b], None, y, accumulate=False)
        if kind == "lora_b_backward":
            parts = run.empty(chunks, site.width, site.outer, dtype=wide)
            ds = torch.empty_like(self.s[0])
            return lambda: run.lora_b_backward(0, self.dy, self.s[0], held, parts, ds, None)
        assert kind == "lora_a_backward"
        sums = [run.empty(chunks, site.width, site.inner, dtype=wide) for _ in self.s]
        return lambda: run.lora_a_backward(self.x, self.s, self.bits, sums)


def _widened(rows: Tensor, columns: int) -> Tensor:
    """[tokens, n + columns]: the rows with so many columns behind them."""
    return torch.cat([rows, rows.new_zeros(len(rows), columns)], 1) if columns else rows


def microseconds(calls: Sequence[Call], device: torch.device, rounds: int = 5) -> list[float]:
    """The median time of each call, in turns, so that a slow moment hits all alike.

    On CUDA each call is captured into a graph first: what is timed is the device, not Python.
    """
    if device.type == "cuda":
        return _on_cuda(calls, rounds)
    return [_by_the_clock(call) for call in calls]


def _by_the_clock(call: Call) -> float:
    """One run: what tests take, under the interpreter."""
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _on_cuda(calls: Sequence[Call], rounds: int) -> list[float]:
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for call in calls:
        for _ in range(_WARM):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            kept = call()
        del kept
        graphs.append(graph)
    found: list[list[float]] = [[] for _ in graphs]
    for done in range(rounds):
        far = _FAR * min((times[0] for times in found if times), default=0.0)
        for graph, times in zip(graphs, found, strict=True):
            if done and times[0] > far:
                continue
            graph.replay()
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            graph.replay()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(1e3 * first.elapsed_time(last) / 2)
    return [statistics.median(times) for times in found]
