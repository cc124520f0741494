"""Layers computed again in the backward, whole or by a budget: `python -m benchmarks.recompute`.

Llama-3-8B's shape with random weights, eight jobs of 1,024 tokens. Every arm is `ours-compiled` of
`benchmarks.step`, rounds of `Trainer`: `none` keeps what Inductor keeps, `layers` recomputes whole
layers, and `budget 0.7` computes gated activations again and keeps 70 % of the other bytes that
`none` keeps within layers. All arms share the base's weights. Before an arm is timed, its gradients
are compared with those of `none`: they may be off by twice what rounding does to eager ones,
measured against float32. Then all arms take turns.

The peak of an arm is what torch's allocator gave out at most in its rounds, the weights among it,
without what other arms hold between rounds. Rows of more tokens than are captured run as they are.

On a CPU nothing but the code is tried, and bytes are those that autograd saves:
`--device cpu --layers 2 --hidden 64 --vocabulary 512 --length 16 --dtype float32`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Spread, ratios, turns
from benchmarks.results_file import bare_table, console, described, write
from benchmarks.step import GIB, MIN_AT_ONCE, WARM_UP, shape_of
from benchmarks.step_arms import ROUNDING_BOUND, Made, Ours, apart_of, stirred
from benchmarks.step_mixes import RANKS, Mix

NONE, LAYERS = "none", "layers"
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5)
#: The issue's bound: so much of the time more, where so much of the peak is gone.
MEMORY_SAVED, TIME_ADDED = 0.30, 0.08


@dataclass(slots=True)
class Measured:
    """What is known of one arm.

    steps   seconds of one round of the trainer, an entry a round of the benchmark
    peak    bytes at most in its rounds
    apart   how far its gradients are from those of `none`
    """

    steps: list[float] = field(default_factory=list)
    peak: int = 0
    apart: float = 0.0


class Bench:
    """Arms that stand ready beside each other, on one copy of the weights."""

    def __init__(self, made: Made, mix: Mix, out: Console) -> None:
        self.made, self.mix, self.out = made, mix, out
        self.bound = ROUNDING_BOUND * made.rounding()
        self._share_extended_weights()
        self.shared = self._allocated()
        self.arms: dict[str, Ours] = {}
        self.found: dict[str, Measured] = {}
        self.expected: list[Tensor] = []

    def _share_extended_weights(self) -> None:
        """Put adapters' columns behind the weights once: each arm would copy all weights for it."""
        model = Ours(self.made.base, self.made, self.made.folder / "base-run", compiled=True).model
        names = list(self.made.weights)
        self.made.weights = {name: model.base_tensor_or_value(name) for name in names}
        del model
        self._forget()

    def add(self, name: str) -> None:
        """Build an arm, measure its memory and compare its gradients; raises RuntimeError."""
        started, before = time.perf_counter(), self._allocated()
        arm = Ours(
            self.made.base, self.made, self.made.folder / name.replace(" ", ""), compiled=True,
            added=_passes(name),
        )  # fmt: skip
        arm.load(self.mix)
        found = self.found[name] = Measured()
        with stirred(arm.ups):
            gradients = [gradient.cpu() for gradient in arm.gradients()]
        if name == NONE:
            self.expected = gradients
        found.apart = apart_of(gradients, self.expected)
        if not found.apart <= self.bound:
            raise RuntimeError(f"{name}: gradients {found.apart:.3g} off, bound {self.bound:.3g}")
        for _ in range(WARM_UP):
            arm.step()
        found.peak = self._peak(arm) - (before - self.shared)
        self.arms[name] = arm
        seconds = time.perf_counter() - started
        told = f"gradients {found.apart:.3g} off, peak {found.peak / GIB:.2f} GiB"
        self.out.print(f"{name}: {told}, ready after {seconds:.1f} s", highlight=False)

    def run(self, rounds: int) -> None:
        """Time all arms in turns."""
        for _, name in turns(self.arms, rounds):
            self.found[name].steps.append(self.arms[name].step(MIN_AT_ONCE))

    def _peak(self, arm: Ours) -> int:
        if self.made.device != "cuda":
            _saved_bytes(arm)  # It compiles again, for code that is watched.
            return _saved_bytes(arm)
        self._forget()
        torch.cuda.reset_peak_memory_stats()
        arm.step()
        return torch.cuda.max_memory_allocated()

    def _allocated(self) -> int:
        self._forget()
        return torch.cuda.memory_allocated() if self.made.device == "cuda" else 0

    def _forget(self) -> None:
        gc.collect()
        if self.made.device == "cuda":
            torch.cuda.empty_cache()


def _passes(arm: str) -> list[str]:
    if arm == NONE:
        return []
    budget = "" if arm == LAYERS else f"{{budget={arm.split()[1]}}}"
    return [f"recompute-layers{budget}@after:lower-loss"]


def _saved_bytes(arm: Ours) -> int:
    """Bytes that autograd keeps at once for a backward, tensors of the model left out."""
    net = arm.model.net
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    kept, most = Counter[tuple[int, int]](), 0

    def keep(tensor: Tensor) -> tuple[Tensor, Any]:
        nonlocal most
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes() * (storage.data_ptr() not in own)
        kept[key] += 1
        most = max(most, sum(size for (_, size), count in kept.items() if count))
        marker = _Marker()
        weakref.finalize(marker, kept.subtract, [key])
        return tensor, marker

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved[0]):
        arm.gradients()
    return most


class _Marker:
    """Goes when what was saved goes."""


def arms_of(found: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """Arms as a result file has them."""
    none = found[NONE]
    return {
        name: {
            "milliseconds": asdict(Spread.of([1e3 * step for step in one.steps])),
            "time_ratio": asdict(ratios(one.steps, none.steps)),
            "peak_gib": round(one.peak / GIB, 3),
            "peak_ratio": round(one.peak / none.peak, 4) if none.peak else None,
            "gradients_apart": one.apart,
        }
        for name, one in found.items()
    }


def bound_of(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The arm that is asked for: the fastest whose peak is low enough, and whether it holds."""
    low = {
        name: arm
        for name, arm in arms.items()
        if arm["peak_ratio"] is not None and arm["peak_ratio"] <= 1 - MEMORY_SAVED
    }
    bound = {"peak_ratio": 1 - MEMORY_SAVED, "time_ratio": 1 + TIME_ADDED}
    if not low:
        return bound | {"arm": None, "holds": False}
    best = min(low, key=lambda name: low[name]["time_ratio"]["median"])
    return bound | {"arm": best, "holds": low[best]["time_ratio"]["median"] <= 1 + TIME_ADDED}


def show(arms: dict[str, dict[str, Any]], out: Console) -> None:
    """A line an arm."""
    heads = ("arm", "ms", "time", "least..most", "peak GiB", "peak", "gradients off")
    table = bare_table(*heads)
    for name, arm in arms.items():
        ratio = arm["time_ratio"]
        table.add_row(
            name,
            f"{arm['milliseconds']['median']:.1f}",
            f"{ratio['median']:.3f}",
            f"{ratio['least']:.3f}..{ratio['most']:.3f}",
            f"{arm['peak_gib']:.2f}",
            "-" if arm["peak_ratio"] is None else f"{arm['peak_ratio']:.3f}",
            f"{arm['gradients_apart']:.2g}",
        )
    out.print(table)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    for name in ("layers", "hidden", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: the base's own")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each of eight jobs")
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    return argparse.Namespace(**vars(given), base="llama", dropout=0.0, ranks=RANKS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 when an arm cannot run."""
    given, out = parsed(arguments), console()
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    shape = shape_of(given)
    found = described("recompute", given.device) | {"shape": asdict(shape), "rounds": given.rounds}
    path, cannot = given.out / f"recompute-{found['date']}.json", dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        made = Made(shape, given.device, Path(folder))
        mix = Mix(f"{len(shape.ranks)}x{given.length}", (1,) * len(shape.ranks), given.length)
        bench = Bench(made, mix, out)
        for name in (NONE, LAYERS, *(f"budget {budget:g}" for budget in given.budgets)):
            try:
                bench.add(name)
            except Exception as error:  # noqa: BLE001  (an arm may fail in any way; others go on)
                cannot[name] = f"{type(error).__name__}: {error}"[:500]
                out.print(f"{name} cannot: {cannot[name]}", highlight=False)
                bench.found.pop(name, None)
        if NONE in bench.arms:
            bench.run(given.rounds)
            arms = arms_of(bench.found)
            show(arms, out)
            found |= {"mix": asdict(mix), "arms": arms, "bound": bound_of(arms)}
            out.print(f"bound: {found['bound']}", highlight=False)
        write(path, found | {"cannot": cannot})
    out.print(f"written to {path}")
    return 1 if cannot else 0


if __name__ == "__main__":
    raise SystemExit(main())
