"""DoRA beside LoRA at sites of Llama-3-8B's sizes: `python -m benchmarks.dora`.

The same jobs, ranks and tokens on one frozen linear, forward and backward with the gradients of all
adapters. On a GPU an arm is a CUDA graph, and a figure the median of rounds in which arms take
turns. What is in the graph of each arm stands in `ARMS`, and in the result file.

Before anything is timed, results and gradients are compared with float64.

On a CPU nothing but the code is tried: `--device cpu --sizes 64x96 --tokens 64`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Spread, captured, eager, interleave, ratios
from benchmarks.results_file import bare_table, console, described, write
from tlora_fx.ops import dora_scale, multi_lora_linear

SIZES = "4096x4096,4096x1024,4096x14336,14336x4096"
ARMS = {
    "lora": "multi_lora_linear forward and backward: the result, gradients of x, A and B",
    "dora": "one round of one row: lora, and dora_scale of every job behind it, with the norms of "
    "the adapted weights from A, B and the weight (nothing is kept from before) and gradients of "
    "the magnitudes",
    "half": "dora of every other job",
    "cached": "dora, whose norms are there already: as in a round's rows after the first, and in "
    "those for which one graph computed all",
    "norms": "the norms of dora alone; the weight may lie in the L2 cache",
    "frozen": "the linear alone: the result, and the gradient of x",
    "peft": "each job's DoRA as PEFT writes it, on its own tokens (not as a graph; --peft)",
}
#: Of the norm, against float64: bfloat16 rounds y once more before it is scaled.
BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Site:
    """A frozen linear and DoRA of some jobs on one row of tokens.

    tables   ranks to token_index, and the site's number, as `multi_lora_linear` takes them
    """

    weight: Tensor
    x: Tensor
    dy: Tensor
    a: Tensor
    b: Tensor
    magnitudes: list[Tensor]
    tables: dict[str, Tensor]
    rank: int

    @classmethod
    def drawn(cls, inner: int, outer: int, tokens: int, jobs: int, rank: int, device: str) -> Site:
        """Jobs of equal rank and share of the row."""
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        draw = torch.Generator(device).manual_seed(inner + outer)

        def normal(*sizes: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
            made = torch.randn(*sizes, generator=draw, device=device) * by
            return made.to(dtype)

        bounds = [tokens * job // jobs for job in range(jobs + 1)]
        places = [index for start, stop in pairwise(bounds) for index in range(stop - start)]
        tables = {
            "ranks": torch.tensor([0, *accumulate([rank] * jobs)], dtype=torch.int32),
            "scales": torch.full((jobs,), 2.0, dtype=torch.float64),
            "rates": torch.zeros(jobs, dtype=torch.float64),
            "segments": torch.tensor(bounds, dtype=torch.int32),
            "keys": torch.zeros(jobs, 2, dtype=torch.int64),
            "token_index": torch.tensor(places, dtype=torch.int32, device=device),
            "site": torch.tensor(1),
        }
        weight = normal(outer, inner, dtype=kind, by=inner**-0.5)
        lengths = weight.float().norm(dim=1)
        return cls(
            weight,
            normal(1, tokens, inner, dtype=kind).requires_grad_(),
            normal(1, tokens, outer, dtype=kind),
            normal(jobs * rank, inner, by=inner**-0.5).requires_grad_(),
            normal(jobs * rank, outer, by=0.02).requires_grad_(),
            [(lengths * (1 + 0.1 * job / jobs)).requires_grad_() for job in range(jobs)],
            tables,
            rank,
        )

    def lora(self) -> Tensor:
        """All jobs' LoRA."""
        t = self.tables
        return multi_lora_linear(
            self.x, self.weight, None, self.a, self.b, t["ranks"], t["scales"], t["rates"],
            t["segments"], t["keys"], t["token_index"], t["site"], self.x.dtype,
            max_rank=self.rank, drops=False,
        )  # fmt: skip

    def dora(self, jobs: Sequence[int] = ()) -> Tensor:
        """The same with DoRA, of all jobs where none are named."""
        t, chosen = self.tables, list(jobs or range(len(self.magnitudes)))
        return dora_scale(
            self.lora(), self.weight, None, [self.magnitudes[job] for job in chosen], self.a,
            self.b, t["ranks"], t["scales"], t["rates"], t["site"], t["segments"], t["keys"],
            chosen, self.rank,
        )  # fmt: skip

    def norms(self) -> Tensor:
        """What the magnitudes of all jobs are divided by."""
        t, jobs = self.tables, list(range(len(self.magnitudes)))
        found: Tensor = torch.ops.tlora_fx.dora_norms(
            self.weight, self.a.detach(), self.b.detach(), t["ranks"], t["scales"], t["rates"],
            t["site"], jobs, self.rank,
        )  # fmt: skip
        return found

    def cached(self, norms: Tensor) -> Tensor:
        """`dora` of all jobs, by norms that were computed before."""
        t = self.tables
        scaled: Tensor = torch.ops.tlora_fx.dora_columns(
            self.lora(), None, torch.stack(self.magnitudes), norms, t["segments"], t["keys"],
            list(range(len(self.magnitudes))),
        )  # fmt: skip
        return scaled

    def peft(self) -> Tensor:
        """Job by job, as PEFT computes it."""
        bounds, parts = self.tables["segments"].tolist(), []
        frozen = F.linear(self.x, self.weight)
        for job, (start, stop) in enumerate(pairwise(bounds)):
            rows = slice(job * self.rank, (job + 1) * self.rank)
            own, base = self.x[:, start:stop].float(), frozen[:, start:stop]
            change = self.b[rows].t() @ self.a[rows]
            norm = (self.weight.float() + 2.0 * change.detach()).norm(dim=1)
            ratio = (self.magnitudes[job] / norm)[None]
            branch = own @ self.a[rows].t() @ self.b[rows]
            parts.append((base + (ratio - 1) * base + ratio * branch * 2.0).to(base.dtype))
        return torch.cat(parts, 1)

    def wide(self) -> Site:
        """In float64, for `peft` alone."""
        grown = [t.detach().double().requires_grad_() for t in (self.x, self.a, self.b)]
        magnitudes = [m.detach().double().requires_grad_() for m in self.magnitudes]
        x, a, b = grown
        return Site(
            self.weight.double(), x, self.dy.double(), a, b, magnitudes, self.tables, self.rank
        )

    def both(self, forward: Callable[[], Tensor], magnitudes: Sequence[Tensor]) -> list[Tensor]:
        """The result, and the gradients of x, A, B and some magnitudes."""
        leaves = [self.x, self.a, self.b, *magnitudes]
        found = forward()
        return [found, *torch.autograd.grad(found, leaves, self.dy.to(found.dtype))]


def exact(site: Site) -> list[Tensor]:
    """Results and gradients in float64, by whole adapted matrices."""
    wide = site.wide()
    bounds, parts = wide.tables["segments"].tolist(), []
    for job, (start, stop) in enumerate(pairwise(bounds)):
        rows = slice(job * site.rank, (job + 1) * site.rank)
        adapted = wide.weight + 2.0 * wide.b[rows].t() @ wide.a[rows]
        ratio = wide.magnitudes[job] / adapted.detach().norm(dim=1)
        parts.append(F.linear(wide.x[:, start:stop], adapted) * ratio)
    return wide.both(lambda: torch.cat(parts, 1), wide.magnitudes)


def require_right(site: Site) -> dict[str, float]:
    """How far results and gradients of each arm with DoRA are from float64, at most.

    raises   SystemExit where that is too far
    """
    names = ["y", "dx", "da", "db", *(f"dm {job}" for job in range(len(site.magnitudes)))]
    wanted = [tensor.detach() for tensor in exact(site)]
    bound, worst = BOUND[site.x.dtype], dict.fromkeys(names, 0.0)
    for forward in (site.dora, partial(site.cached, site.norms())):
        found = site.both(forward, site.magnitudes)
        for name, mine, theirs in zip(names, found, wanted, strict=True):
            error = float((mine.detach().double() - theirs).norm() / theirs.norm())
            if not error <= bound:
                raise SystemExit(f"{name} is {error} from float64, allowed are {bound}")
            worst[name] = max(worst[name], error)
    return worst


def arms(site: Site, *, with_peft: bool) -> dict[str, Callable[[int], object]]:
    """What is timed, by its name in `ARMS`."""
    every, half = range(len(site.magnitudes)), list(range(0, len(site.magnitudes), 2))
    ours, norms = [site.magnitudes[job] for job in half], site.norms()

    def frozen(_: int) -> object:
        return torch.autograd.grad(F.linear(site.x, site.weight), site.x, site.dy)

    works: dict[str, Callable[[int], object]] = {
        "lora": lambda _: site.both(site.lora, ()),
        "dora": lambda _: site.both(lambda: site.dora(every), site.magnitudes),
        "half": lambda _: site.both(lambda: site.dora(half), ours),
        "cached": lambda _: site.both(lambda: site.cached(norms), site.magnitudes),
        "norms": lambda _: site.norms(),
        "frozen": frozen,
    }
    if with_peft:
        works["peft"] = lambda _: site.both(site.peft, site.magnitudes)
    return works


def measured(site: Site, given: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each arm, a figure a round."""
    graphs = given.device == "cuda" and not given.eager
    runners = {
        # PEFT's sizes are read on the host.
        name: captured(work, 1) if graphs and name != "peft" else eager(work, 1)
        for name, work in arms(site, with_peft=given.peft).items()
    }
    return interleave(runners, given.device, given.rounds)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default=SIZES, help="INxOUT of the linears, commas between")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 1024])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--peft", action="store_true", help="PEFT's arm too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure."""
    given, out = parsed(arguments), console()
    started, rows = time.perf_counter(), []
    found = described("dora", given.device)
    found |= {"jobs": given.jobs, "rank": given.rank, "rounds": given.rounds}
    found |= {"graphs": given.device == "cuda" and not given.eager, "timed": ARMS}
    for size in given.sizes.split(","):
        inner, outer = map(int, size.split("x"))
        for tokens in given.tokens:
            site = Site.drawn(inner, outer, tokens, given.jobs, given.rank, given.device)
            errors = require_right(site)
            times = measured(site, given)
            over = {name: ratios(ms, times["lora"]).json() for name, ms in times.items()}
            spread = {name: Spread.of(ms).json() for name, ms in times.items()}
            rows.append(
                {"inner": inner, "outer": outer, "tokens": tokens, "errors": errors,
                 "milliseconds": spread, "over lora": over}
            )  # fmt: skip
            out.print(_table(rows[-1]))
    found["seconds"] = round(time.perf_counter() - started, 1)
    path = given.out / f"dora-{found['date']}.json"
    write(path, found | {"measured": rows})
    out.print(f"written to {path} after {found['seconds']} s")
    return 0


def _table(row: dict[str, Any]) -> Table:
    title = f"{row['inner']} to {row['outer']}, {row['tokens']} tokens: ms"
    made = bare_table("arm", "median", "over LoRA", title=title)
    for name, ms in row["milliseconds"].items():
        made.add_row(name, f"{ms['median']:.3f}", f"{row['over lora'][name]['median']:.3f}")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
