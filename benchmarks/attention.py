"""Attention of packed rows by four kernels: `python -m benchmarks.attention`.

    python -m benchmarks.attention                                              # on a GPU
    python -m benchmarks.attention --models Llama-3-8B --tiles chosen
    python -m benchmarks.attention --read benchmarks/results/attention-heads-2026-11-27.json
    TRITON_INTERPRET=1 python -m benchmarks.attention --device cpu --cases tiny  # tries the code

`flash` is torch's kernel for rows of sequences, which `packed_attention` takes where neither ours
nor cuDNN's was measured to win; `batch` is cuDNN's, which takes rows of sequences that are equally
long; `flash4` is FlashAttention-4, where it is installed, and `apart` is it with a call for each
sequence. `forward`, `dq` and `dkv` are our three kernels, each with several tiles, written as
rows,keys,warps,stages; our backward is `dq` and `dkv` one after the other. `gain` is how many times
as fast as `flash` the kernels are that `packed_attention` chooses on Hopper for a row of one job.

Before anything is timed, results and gradients of the first and last sequence are compared with
float64, the last sequence alone must give the bits that it gives in its row, and a second run must
give the bits of the first. Arms are CUDA graphs over several sets of inputs, and take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Runner, Spread, captured, eager, interleave
from benchmarks.results_file import console, described, write
from tlora_fx.codegen.spec import Tile
from tlora_fx.ops import attention
from tlora_fx.ops.attention import RowKernel, is_batch, row_backward, row_forward
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import flash_attention_4
from tlora_fx.ops.kernels import short_attention as ours
from tlora_fx.ops.kernels.flash_attention_4 import JobSpans

#: Bytes a second of a copy on an H200: the floor of reading and writing.
BYTES = 4.27e12
#: Of ours over FlashAttention-2's, of the same row against float64.
BOUND = 1.5
TILES = {
    "forward": ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)),
    "dq": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 1)),
    "dkv": ((64, 64, 8, 2), (32, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3)),
}
#: Of rows with so few sequences that a tile's latency decides.
SMALL = {
    "forward": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3)),
    "dq": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 3)),
    "dkv": (
        (32, 64, 4, 3), (32, 32, 4, 3), (32, 16, 4, 3), (64, 32, 4, 2), (64, 16, 4, 2),
        (128, 32, 4, 2), (128, 16, 4, 2), (64, 32, 8, 2),
    ),
}  # fmt: skip
#: Of heads beside those of Llama-3-8B: the best there, and the best of the first tries.
OTHERS = {
    "forward": ((64, 64, 4, 3), (128, 64, 8, 3)),
    "dq": ((64, 64, 4, 2), (128, 64, 8, 2)),
    "dkv": ((32, 64, 4, 3), (64, 64, 8, 2), (32, 64, 4, 2)),
}
TRIED = dict.fromkeys(TILES, ((16, 16, 4, 1),))
SETS = {"all": TILES, "small": SMALL, "others": OTHERS, "none": {}}

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A row.

    lengths   of its sequences
    heads     of queries, of keys
    window    0: none
    longest   as the tables of a row have it, where that is more than the longest sequence
    tiles     of `SETS`, which of our kernels are tried; none: only what others ship is timed
    """

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    width: int = 128
    window: int = 0
    longest: int = 0
    tiles: str = "all"

    @property
    def most(self) -> int:
        """What kernels are told of the longest sequence."""
        return self.longest or max(self.lengths)

    @property
    def bounds(self) -> list[int]:
        """Where sequences begin, and the last ends."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def rule(self) -> AttentionRule:
        """As the operator has it."""
        return AttentionRule(self.width**-0.5, True, self.window or -1, 0.0, 0.0)

    def alone(self, index: int) -> slice:
        """The tokens of one sequence."""
        return slice(*self.bounds[index : index + 2])


CASES = {
    "64 x 256": Case((256,) * 64),
    "30 x 160": Case((160,) * 30),
    "8 x 160": Case((160,) * 8),
    # A captured row: sequences and their length rise to powers of two.
    "30 x 160, captured": Case((160,) * 30 + (0,) * 2, longest=256),
    "mixed to 512": Case((31, 512, 7, 160, 90, 256, 333, 1) * 6),
    "32 x 512": Case((512,) * 32),
    "8 x 1,024": Case((1024,) * 8),
    "1 x 4,096": Case((4096,)),
    "64 x 256, window 128": Case((256,) * 64, window=128, tiles="others"),
    "64 x 256, 32:32 heads": Case((256,) * 64, heads=(32, 32), tiles="others"),
    "64 x 256, width 64": Case((256,) * 64, width=64, tiles="others"),
    "1 x 160, captured": Case((160,), longest=256, tiles="small"),
    "2 x 160, captured": Case((160,) * 2, longest=256, tiles="small"),
    "1 x 1,024": Case((1024,), tiles="small"),
    "tiny": Case((20, 1, 33), heads=(4, 1), width=64, window=9),
}
#: Query and key heads, and their width.
HEADS = {
    "Llama-3-8B": ((32, 8), 128),
    "Llama-2-7B": ((32, 32), 128),
    "Llama-3.2-1B": ((32, 8), 64),
    "Llama-3.2-3B": ((24, 8), 128),
    "Qwen2.5-0.5B": ((14, 2), 64),
    "Qwen2.5-1.5B": ((12, 2), 128),
    "Qwen2.5-7B": ((28, 4), 128),
    "Qwen3-0.6B": ((16, 8), 128),
    "Qwen3-30B-A3B": ((32, 4), 128),
    "Gemma-2-9B": ((16, 8), 256),
}
SHAPES = {
    "30 x 160": (160,) * 30,
    "64 x 256": (256,) * 64,
    "16 x 512": (512,) * 16,
    "8 x 1,024": (1024,) * 8,
    "4 x 2,048": (2048,) * 4,
    "2 x 4,096": (4096,) * 2,
    "mixed to 1,500": (1412, 640, 980, 512, 1333, 777, 1500, 601),
    "mixed to 3,000": (2900, 640, 1333, 2210, 3000, 12, 1777),
    "mixed to 8,192": (8192, 130, 3000, 1, 700),
}
CASES |= {
    f"{name}: {row}": Case(lengths, heads, width, tiles="others" if width <= 128 else "none")
    for name, (heads, width) in HEADS.items()
    for row, lengths in SHAPES.items()
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set: q, k, v, dout, and what the forward gave for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    bounds: Tensor

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What the backward reads."""
        return self.q, self.k, self.v, self.out, self.lse


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    if given.read:
        for file in given.read:
            show(json.loads(file.read_text("utf-8")))
        return
    out, found = console(), described("attention", given.device) | {"cases": {}}
    path = given.out / f"attention-{found['date']}.json"
    heads = [name for name in CASES if _model(name) in given.models]
    for name in heads or given.cases:
        figures = measured(CASES[name], given)
        found["cases"][name] = figures
        out.print(name, figures["error over flash"], figures["us"], highlight=False)
        write(path, found)
    show(found)


def measured(case: Case, given: argparse.Namespace) -> Figures:
    """Microseconds of every arm, the best of ours, and how far from float64 both are."""
    cuda = given.device == "cuda"
    tiles = _tiles(case, given.tiles) if cuda else TRIED
    sets = [_inputs(case, seed, given.device) for seed in range(2 if cuda else 1)]
    arms = dict(_arms(case, sets, tiles, cuda))
    difference = compared(case, sets[0], tiles, cuda)
    make: Callable[..., Runner] = captured if cuda else eager
    runners = {name: make(work, len(sets)) for name, work in arms.items()}
    times = interleave(runners, given.device, given.rounds)
    us = {name: round(Spread.of(each).median * 1e3, 1) for name, each in times.items()}
    found: Figures = {"tokens": sum(case.lengths), "us": us, "floor us": _floors(case)}
    if tiles:
        best = {kind: _least(us, kind) for kind in tiles}
        backward = round(us[best["dq"]] + us[best["dkv"]], 1)
        found["best"] = best
        found["ours us"] = {"forward": us[best["forward"]], "backward": backward}
    return found | {"error over flash": difference}


def _tiles(case: Case, asked: str) -> dict[str, Any]:
    """What to try of our kernels: what was asked for, or what the case has."""
    if asked != "chosen":
        return SETS[asked or case.tiles]
    form = ours.FORMS.get((90, torch.bfloat16, case.heads[0] // case.heads[1], case.width))
    return {} if form is None else {kind: (cut,) for kind, cut in _cuts(form.tiles).items()}


def _cuts(tiles: ours.Tiles) -> dict[str, tuple[int, ...]]:
    kinds = {"forward": tiles.forward, "dq": tiles.query_gradient, "dkv": tiles.key_gradient}
    return {kind: (t.rows, t.columns, t.warps, t.stages) for kind, t in kinds.items()}


def _model(case: str) -> str:
    return case.partition(":")[0]


def _least(us: dict[str, float], kind: str) -> str:
    return min((name for name in us if name.startswith(f"{kind} ")), key=us.__getitem__)


def _inputs(case: Case, seed: int, device: str) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    many, few = case.heads
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = sum(case.lengths)

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, case.width, generator=draw, device=device, dtype=dtype)

    q, k, v, dout = normal(many), normal(few), normal(few), normal(many)
    bounds = torch.tensor(case.bounds, dtype=torch.int32, device=device)
    if device == "cuda":
        out, lse = row_forward(q, k, v, bounds, case.most, case.rule)
    else:
        out, lse = ours.forward(q, k, v, bounds, _rule(case), Tile(*_tile(TRIED["forward"][0])))
    return Inputs(q, k, v, dout, out, lse, bounds)


def _tile(numbers: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    rows, keys, warps, stages = numbers
    return rows, keys, 0, warps, stages


def _rule(case: Case) -> ours.Rule:
    return ours.Rule(case.most, case.width**-0.5, case.window)


def _arms(
    case: Case, sets: list[Inputs], tiles: dict[str, Any], cuda: bool
) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Every arm by name: work on the set of a number."""
    for name, kernel in _shipped(case, sets[0]).items() if cuda else ():
        yield f"{name} forward", partial(_their_forward, case, sets, kernel)
        yield f"{name} backward", partial(_their_backward, case, sets, kernel)
    for kind, run in (("forward", _forward), ("dq", _dq), ("dkv", _dkv)):
        for numbers in tiles.get(kind, ()):
            name = f"{kind} {','.join(map(str, numbers))}"
            yield name, partial(run, case, sets, Tile(*_tile(numbers)))


def _shipped(case: Case, one: Inputs) -> dict[str, RowKernel]:
    """The kernels of others that can take the row, were it one job's."""
    found: dict[str, RowKernel] = {"flash": "flash"}
    if is_batch(one.q, one.bounds, case.most, case.rule):
        found["batch"] = "batch"
    if not case.window and flash_attention_4.is_installed():
        equal = sum(case.lengths) == len(case.lengths) * case.most
        found["flash4"] = JobSpans(() if equal else (0, case.bounds[-1]))
        if not equal:
            found["apart"] = JobSpans(tuple(case.bounds))
    return found


def _their_forward(
    case: Case, sets: list[Inputs], kernel: RowKernel, index: int
) -> tuple[Tensor, ...]:
    one = sets[index]
    return row_forward(one.q, one.k, one.v, one.bounds, case.most, case.rule, kernel)


def _their_backward(
    case: Case, sets: list[Inputs], kernel: RowKernel, index: int
) -> tuple[Tensor, ...]:
    one = sets[index]
    given = one.dout, one.q, one.k, one.v, one.out, one.lse
    return row_backward(*given, one.bounds, case.most, case.rule, kernel)


def _forward(case: Case, sets: list[Inputs], tile: Tile, index: int) -> tuple[Tensor, ...]:
    one = sets[index]
    return ours.forward(one.q, one.k, one.v, one.bounds, _rule(case), tile)


def _dq(case: Case, sets: list[Inputs], tile: Tile, index: int) -> tuple[Tensor, ...]:
    one = sets[index]
    return ours.query_gradient(one.dout, one.saved, one.bounds, _rule(case), tile)


def _dkv(case: Case, sets: list[Inputs], tile: Tile, index: int) -> tuple[Tensor, ...]:
    one = sets[index]
    # Any numbers will do for the row sums of dout and out: only the time counts here.
    return ours.key_gradient(one.dout, one.saved, one.lse, one.bounds, _rule(case), tile)


def compared(case: Case, one: Inputs, tiles: dict[str, Any], cuda: bool) -> dict[str, float]:
    """The error of ours and of others over FlashAttention-2's by result, the worst of all tiles.

    raises   RuntimeError where one is over the bound, or bits of ours depend on neighbours or on
             the run
    """
    combinations = itertools.zip_longest(*tiles.values())
    worst: dict[str, float] = {}
    last = max(index for index, length in enumerate(case.lengths) if length)
    spans = [case.alone(0), case.alone(last)]
    expected = [_reference(case, one, span) for span in spans]
    theirs = dict.fromkeys(_NAMES, 1e-6)
    if cuda:
        theirs = _errors(_theirs(case, one, "flash"), spans, expected)
    others = _shipped(case, one) if cuda else {}
    for kernel in others.keys() - {"flash"}:
        errors = _errors(_theirs(case, one, others[kernel]), spans, expected)
        worst |= {f"{kernel} {name}": round(errors[name] / theirs[name], 3) for name in _NAMES}
    for numbers in combinations:
        parts = [n or tiles[kind][0] for n, kind in zip(numbers, tiles, strict=True)]
        cut = ours.Tiles(*(Tile(*_tile(each)) for each in parts))
        results = _ours(case, one, cut)
        _require_bits(results, _ours(case, one, cut), f"a second run with {parts}")
        span = spans[1]
        own = Case((case.lengths[last],), case.heads, case.width, case.window)
        alone = _ours(own, _cut(one, span), cut)
        _require_bits([r[span] for r in results], alone, f"the last sequence alone with {parts}")
        for name, error in _errors(results, spans, expected).items():
            worst[name] = max(worst.get(name, 0.0), round(error / theirs[name], 3))
    if over := {name: value for name, value in worst.items() if not value <= BOUND}:
        raise RuntimeError(f"over FlashAttention-2 against float64: {over}, at most {BOUND}")
    return worst


def _cut(one: Inputs, span: slice) -> Inputs:
    q, k, v, dout, out = (x[span].contiguous() for x in (one.q, one.k, one.v, one.dout, one.out))
    bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return Inputs(q, k, v, dout, out, one.lse[:, span].contiguous(), bounds)


_NAMES = ("out", "lse", "dq", "dk", "dv")


def _ours(case: Case, one: Inputs, tiles: ours.Tiles) -> list[Tensor]:
    """out, lse, dq, dk, dv, tokens first."""
    rule = _rule(case)
    out, lse = ours.forward(one.q, one.k, one.v, one.bounds, rule, tiles.forward)
    saved = one.q, one.k, one.v, out, lse
    return [out, lse.t(), *ours.backward(one.dout, saved, one.bounds, rule, tiles)]


def _theirs(case: Case, one: Inputs, kernel: RowKernel) -> list[Tensor]:
    out, lse = row_forward(one.q, one.k, one.v, one.bounds, case.most, case.rule, kernel)
    given = one.dout, one.q, one.k, one.v, out, lse
    grads = row_backward(*given, one.bounds, case.most, case.rule, kernel)
    return [out, lse.t(), *grads]


def _require_bits(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for name, mine, other in zip(_NAMES, found, expected, strict=True):
        if not torch.equal(mine, other):
            raise RuntimeError(f"{name}: {what} gives other bits")


def _errors(
    results: Sequence[Tensor], spans: Sequence[slice], expected: Sequence[Sequence[Tensor]]
) -> dict[str, float]:
    """Norm of the difference over the reference's norm, the worst of these sequences."""
    found = dict.fromkeys(_NAMES, 0.0)
    for span, references in zip(spans, expected, strict=True):
        for name, result, reference in zip(_NAMES, results, references, strict=True):
            difference = (result[span].double() - reference).norm() / reference.norm()
            found[name] = max(found[name], float(difference))
    return found


def _reference(case: Case, one: Inputs, span: slice) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of one sequence in float64, one key head after the other."""
    few, length = case.heads[1], span.stop - span.start
    distance = torch.arange(length, device=one.q.device)
    distance = distance[:, None] - distance
    hidden = (distance < 0) | (distance >= (case.window or length))
    parts = []
    for head in range(few):
        heads = slice(head * (case.heads[0] // few), (head + 1) * (case.heads[0] // few))
        q = one.q[span, heads].double().requires_grad_()
        k, v = (x[span, head].double().requires_grad_() for x in (one.k, one.v))
        scores = torch.einsum("ihd,jd->hij", q, k) * case.width**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        out = torch.einsum("hij,jd->ihd", scores.softmax(-1), v)
        grads = torch.autograd.grad(out, (q, k, v), one.dout[span, heads].double())
        dq, dk, dv = grads
        parts.append(
            (out.detach(), scores.logsumexp(-1).t().detach(), dq, dk[:, None], dv[:, None])
        )
    return tuple(torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))


def _floors(case: Case) -> dict[str, float]:
    """Microseconds that reading and writing each tensor once takes on an H200."""
    many, few = case.heads
    head = sum(case.lengths) * case.width * 2
    forward, backward = head * (2 * many + 2 * few), head * (4 * many + 4 * few)
    return {
        "forward": round(forward / BYTES * 1e6, 1),
        "backward": round(backward / BYTES * 1e6, 1),
    }


def show(found: Figures) -> None:
    """A line a case."""
    words = ("FA2", "cuDNN", "FA4", "apart", "ours", "gain", "floor")
    table = Table("case", *words, *(f"{word} back" for word in words), "tiles", box=None)
    for name, one in found["cases"].items():
        numbers = []
        for way in ("forward", "backward"):
            kernels = ("flash", "batch", "flash4", "apart")
            theirs = [one["us"].get(f"{kernel} {way}", math.nan) for kernel in kernels]
            ours_us = one.get("ours us", {}).get(way, math.nan)
            gain = theirs[0] / _chosen(CASES[name], one["us"], way)
            numbers += [
                *map(_cell, (*theirs, ours_us)),
                _cell(gain, 2),
                _cell(one["floor us"][way]),
            ]
        tiles = "; ".join(one.get("best", {}).values())
        table.add_row(name, *numbers, tiles)
    console().print(table)


def _cell(number: float, places: int = 0) -> str:
    return "-" if math.isnan(number) else f"{number:.{places}f}"


def _chosen(case: Case, us: dict[str, float], way: str) -> float:
    """Microseconds of what the operator chooses on Hopper, in bfloat16 and with all packages."""
    many, few = case.heads
    q, k = (
        torch.empty(sum(case.lengths), heads, case.width, dtype=torch.bfloat16, device="meta")
        for heads in (many, few)
    )
    bounds = torch.empty(len(case.lengths) + 1, device="meta")
    installed = any(name.startswith("flash4") for name in us)
    with (
        mock.patch.object(attention, "_batches_pay", return_value=True),
        mock.patch.object(flash_attention_4, "is_installed", return_value=installed),
    ):
        one_job = torch.tensor([0, len(q)])
        pair = attention.row_kernels(q, k, bounds, case.most, case.rule, one_job)
    kernel = pair[way == "backward"]
    if isinstance(kernel, JobSpans):
        return us.get(f"flash4 {way}", math.nan)
    if isinstance(kernel, str):
        return us.get(f"{kernel} {way}", math.nan)
    cuts = _cuts(kernel)
    kinds = ("forward",) if way == "forward" else ("dq", "dkv")
    names = (f"{kind} {','.join(map(str, cuts[kind]))}" for kind in kinds)
    return sum(us.get(name, math.nan) for name in names)


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    usual = [name for name in CASES if name != "tiny" and _model(name) not in HEADS]
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--cases", nargs="+", default=usual, choices=CASES)
    what.add_argument("--models", nargs="+", default=[], choices=HEADS, help="their heads")
    what.add_argument(
        "--read", nargs="+", default=[], type=_file, help="print earlier files' times"
    )
    parser.add_argument(
        "--tiles", choices=(*SETS, "chosen"), help="of ours, in place of the case's own"
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}; see benchmarks/results")
    return path


if __name__ == "__main__":
    main()
