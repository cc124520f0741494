"""Frozen products in float8 beside bfloat16: `python -m benchmarks.float8`.

The seven linears of Llama-3-8B's layer without adapters, forward and dX, as the pass
`quantize-base{to=float8 products=true}` multiplies them: x is rounded once for q, k and v and once
for gate and up, each dY once. What rounds, turns or restores is compiled, each alone; in a layer it
becomes part of what makes x or dY. On a GPU an arm is a CUDA graph. A figure is the median of a
layer; arms take turns.

`bfloat16`      torch.mm
`copy`          rows in float8, the codes stand turned beside the others
`turn`          the same, the codes are turned for each product
`restore`       dX in bfloat16, of the restored matrix
`tensor`        one scale for all of x or dY, and one for the matrix: jobs would round each other
`exact sums`    `copy` without `use_fast_accum`
`rounded`       `copy` without what rounds: codes stand ready, the products alone

Before it is timed each arm is compared with float64: with the product of what it rounded, which
tells a wrong product, and of what it was given, which tells what rounding costs.

On a CPU nothing but the code is tried: `--device cpu --hidden 64 --tokens 32`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Runner, Spread, captured, eager, interleave
from benchmarks.results_file import bare_table, console, described, write
from benchmarks.step_mixes import Shape
from tlora_fx.ops.float8 import CODES, LARGEST, float8_rows

TOKENS = (1280, 4800, 16384)
#: Of the norm, against float64: a product of what was rounded has only bfloat16's own rounding, and
#: rounding to e4m3 moves a normal number by a sixteenth at most, two factors by less than a tenth.
SAME, ROUNDED = 1e-2, 1e-1
Rounded = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """The linears of a layer; those of a group read one x.

    weights   of each group, [out, in]
    """

    weights: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def drawn(cls, shape: Shape, device: str) -> Layer:
        """Random matrices as small as a trained one's."""
        width = shape.hidden // shape.heads * shape.key_value_heads
        sizes = (
            (shape.hidden, (shape.hidden, width, width)),
            (shape.hidden, (shape.hidden,)),
            (shape.hidden, (shape.intermediate, shape.intermediate)),
            (shape.intermediate, (shape.hidden,)),
        )
        draw = torch.Generator(device).manual_seed(1)
        like: dict[str, Any] = {"generator": draw, "device": device, "dtype": torch.bfloat16}
        return cls(
            tuple(
                tuple(torch.randn(outer, inner, **like) * 0.02 for outer in outers)
                for inner, outers in sizes
            )
        )


@torch.compile(dynamic=True)
def round_rows(x: Tensor, factors: Tensor | None) -> Rounded:
    """Codes, and a scale a row."""
    return float8_rows(x, factors)


@torch.compile(dynamic=True)
def round_tensor(x: Tensor) -> Rounded:
    """Codes, and one scale for all."""
    wide = x.float()
    scale = wide.abs().amax() / LARGEST
    return (wide / scale).to(CODES), scale


@torch.compile(dynamic=True)
def turn(codes: Tensor) -> Tensor:
    """The codes of a matrix turned."""
    return codes.t().contiguous()


@torch.compile(dynamic=True)
def restore(codes: Tensor, scales: Tensor) -> Tensor:
    """The matrix in bfloat16."""
    return (codes.float() * scales).to(torch.bfloat16)


class Arm:
    """One way to multiply; the products of a layer, forward and dX.

    rounding   of x and dY: rows, or the tensor; "" for none
    backward   as the pass has it
    """

    def __init__(
        self, layer: Layer, rounding: str = "rows", backward: str = "copy", *, fast: bool = True
    ) -> None:
        self.layer, self.rounding, self.backward, self.fast = layer, rounding, backward, fast
        self.stored = [[self._store(weight) for weight in group] for group in layer.weights]

    def _store(self, weight: Tensor) -> tuple[Tensor, ...]:
        if not self.rounding:
            return (weight,)
        codes, scale = self.round(weight)
        columns = (codes.t().contiguous(),) if self.backward == "copy" else ()
        return codes, scale, *columns

    def round(self, x: Tensor, factors: Tensor | None = None) -> Rounded:
        """Codes and scale."""
        return round_rows(x, factors) if self.rounding == "rows" else round_tensor(x)

    def multiply(self, left: Rounded, right: Rounded) -> Tensor:
        """left [T, k], right [n, k] to [T, n]."""
        scale = right[1].view(1, -1) if self.rounding == "rows" else right[1]
        return torch._scaled_mm(
            left[0], right[0].t(), left[1], scale,
            out_dtype=torch.bfloat16, use_fast_accum=self.fast,
        )  # fmt: skip

    def forward(self, xs: Sequence[Any]) -> list[list[Tensor]]:
        """Of each group's x its y."""
        found = []
        for x, group in zip(xs, self.stored, strict=True):
            if not self.rounding:
                found.append([x @ weight[0].t() for weight in group])
                continue
            rounded = self.round(x) if isinstance(x, Tensor) else x
            found.append([self.multiply(rounded, (own[0], own[1])) for own in group])
        return found

    def factors(self, own: Sequence[Tensor]) -> Tensor | None:
        """What dY is multiplied with before it is rounded."""
        return own[1].view(-1) if self.rounding == "rows" else None

    def input_gradient(self, dys: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
        """Of each dY its dX."""
        return [
            [self._one(dy, own) for dy, own in zip(given, group, strict=True)]
            for given, group in zip(dys, self.stored, strict=True)
        ]

    def _one(self, dy: Any, own: tuple[Tensor, ...]) -> Tensor:
        if not self.rounding or self.backward == "restore":
            weight = restore(own[0], own[1]) if self.rounding else own[0]
            return torch.mm(dy, weight)
        columns = own[2] if self.backward == "copy" else turn(own[0])
        rounded = self.round(dy, self.factors(own)) if isinstance(dy, Tensor) else dy
        one = own[1].new_ones(len(columns)) if self.rounding == "rows" else own[1]
        return self.multiply(rounded, (columns, one))


ARMS: dict[str, Callable[[Layer], Arm]] = {
    "bfloat16": partial(Arm, rounding=""),
    "copy": Arm,
    "turn": partial(Arm, backward="turn"),
    "restore": partial(Arm, backward="restore"),
    "tensor": partial(Arm, rounding="tensor"),
    "exact sums": partial(Arm, fast=False),
    "rounded": Arm,
}


def inputs(layer: Layer, tokens: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """x of each group, and dY of each linear."""
    device = layer.weights[0][0].device
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    xs = [torch.randn(tokens, group[0].shape[1], **like) for group in layer.weights]
    dys = [
        [torch.randn(tokens, weight.shape[0], **like) * 1e-4 for weight in group]
        for group in layer.weights
    ]
    return xs, dys


def require_right(name: str, arm: Arm, layer: Layer) -> dict[str, float]:
    """Compare with float64; raises RuntimeError beyond the bounds."""
    xs, dys = inputs(layer, 48)
    ys, dxs = arm.forward(xs), arm.input_gradient(dys)
    found = {"product": 0.0, "rounding": 0.0}
    for x, group, given, y, dx, stored in zip(
        xs, layer.weights, dys, ys, dxs, arm.stored, strict=True
    ):
        for weight, dy, one, other, own in zip(group, given, y, dx, stored, strict=True):
            for out, left, right, exact in (
                (one, *_decoded(arm, x, own, turned=False), x.double() @ weight.double().t()),
                (other, *_decoded(arm, dy, own, turned=True), dy.double() @ weight.double()),
            ):
                apart = _relative(out, left @ right)
                found["product"] = max(found["product"], apart)
                found["rounding"] = max(found["rounding"], _relative(out, exact))
    if found["product"] > SAME or found["rounding"] > ROUNDED:
        raise RuntimeError(f"{name} is off by {found}")
    return found


def _decoded(
    arm: Arm, given: Tensor, own: tuple[Tensor, ...], *, turned: bool
) -> tuple[Tensor, Tensor]:
    """Both factors of a product in float64, as the arm rounds them."""
    if not arm.rounding:
        return given.double(), own[0].double() if turned else own[0].double().t()
    weight = own[0].double() * own[1].double()
    if not turned:
        codes, scale = arm.round(given)
        return codes.double() * scale.double(), weight.t()
    if arm.backward == "restore":
        return given.double(), weight.to(given.dtype).double()
    codes, scale = arm.round(given, arm.factors(own))
    rows = codes.double() * scale.double()
    return rows, own[0].double() if arm.rounding == "rows" else weight


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def runners(
    arms: dict[str, Arm], xs: list[Tensor], dys: list[list[Tensor]], direction: str
) -> dict[str, Runner]:
    """Each arm's products of one direction on these numbers."""
    found = {}
    start = captured if xs[0].is_cuda else eager
    for name, arm in arms.items():
        given: Any = xs if direction == "forward" else dys
        if name == "rounded":
            given = _ready(arm, xs, dys, direction)
        found[name] = start(partial(_work, arm, direction, given), 1)
    return found


def _work(arm: Arm, direction: str, given: Any, _: int) -> object:
    return arm.forward(given) if direction == "forward" else arm.input_gradient(given)


def _ready(arm: Arm, xs: list[Tensor], dys: list[list[Tensor]], direction: str) -> Any:
    if direction == "forward":
        return [arm.round(x) for x in xs]
    return [
        [arm.round(dy, arm.factors(own)) for dy, own in zip(group, stored, strict=True)]
        for group, stored in zip(dys, arm.stored, strict=True)
    ]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--arms", default=",".join(ARMS), help="commas between")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure."""
    given, out = parsed(arguments), console()
    started = time.perf_counter()
    heads = max(2, given.hidden // 128)
    shape = Shape(
        hidden=given.hidden, intermediate=given.hidden * 7 // 2, heads=heads,
        key_value_heads=max(1, heads // 4),
    )  # fmt: skip
    found = described("float8", given.device) | {"hidden": given.hidden, "rounds": given.rounds}
    layer = Layer.drawn(shape, given.device)
    arms, errors = {}, {}
    for name in given.arms.split(","):
        arms[name] = ARMS[name](layer)
        errors[name] = require_right(name, arms[name], layer)
        out.print(f"{name}: {errors[name]}", highlight=False)
    measured = []
    for tokens in given.tokens:
        xs, dys = inputs(layer, tokens)
        row: dict[str, Any] = {"tokens": tokens}
        for direction in ("forward", "input gradient"):
            times = interleave(runners(arms, xs, dys, direction), given.device, given.rounds)
            row[direction] = {name: Spread.of(ms).json() for name, ms in times.items()}
        measured.append(row)
        out.print(_table(row))
        found["seconds"] = round(time.perf_counter() - started, 1)
        path = given.out / f"float8-{found['date']}.json"
        write(path, found | {"errors": errors, "milliseconds": measured})
    out.print(f"written to {path} after {found['seconds']} s")
    return 0


def _table(row: dict[str, Any]) -> Table:
    title = f"{row['tokens']} tokens: ms a layer"
    made = bare_table("arm", "forward", "input gradient", "of bfloat16's", title=title)
    parts = row["forward"], row["input gradient"]
    whole = {name: sum(part[name]["median"] for part in parts) for name in parts[0]}
    for name, total in whole.items():
        cells = [f"{part[name]['median']:.3f}" for part in parts]
        made.add_row(name, *cells, f"{total / whole['bfloat16']:.2f}")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
