"""A whole training step of eight jobs, ours beside others': `python -m benchmarks.step`.

Llama-3-8B's shape with random weights, which all arms share. Each arm does forward, backward and
the optimizer for all eight jobs; the frozen model does forward and backward down to its embeddings.
All arms take turns, some steps with no wait between them; a figure is the median wall time of one.
Ours is `Trainer`'s whole round, its rows as CUDA graphs as in training: packing on the host,
gradient norms, metrics, an update of all jobs. The others have their tokens on the GPU already, and
one fused AdamW; `*-graph` are compiled, the whole step a CUDA graph. Those of `alone-graph` and
`peft` are sums over their jobs. Before an arm is timed, its gradients are compared with those of
the same code run eagerly: they may be off by twice what rounding does to eager ones, measured
against float32.

`ours-float8-*` have products in float8 of the frozen layers, and the name says how they find dX.

`ours-dora` and `ours-dropout` are `ours-compiled` whose jobs have DoRA, or drop 5 % of what their
adapters read; `ours-apart` is it with gate and up in buffers of their own, `ours-ungated` with
gated activations in kernels of their own, `ours-summed` with gradients that are added behind the
backward instead of by kernels, `ours-chunked` with gradients of short rows in chunks, too,
`ours-without-flash4` as where FlashAttention-4 is not installed.

`--base` takes another shape: `llama-3b` Llama-3.2-3B's, `qwen2.5-7b` and `qwen3-8b` theirs,
`qwen3-moe` Qwen3-30B-A3B's with half its layers and adapters on attention; with `--adapt-experts`
ours and PEFT's adapt all experts too, at the job's rank each. By estimate twelve layers of that fit
80 GB.

On a CPU nothing but the code is tried: `--device cpu --layers 2 --hidden 64 --vocabulary 512`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Spread, turns
from benchmarks.kernel_times import busy, profiled, table
from benchmarks.results_file import bare_table, console, described, write
from benchmarks.step_arms import ARMS, Arm, Made, Ours, require_gradients
from benchmarks.step_mixes import BASES, EXPERTS, MIXES, RANKS, Mix, Mixture, Shape
from benchmarks.step_profile import CLASSES, classes

DEFAULT = "frozen-graph,ours-compiled,stacked-graph,alone-graph,peft"
# Stacked adapters take every linear of a layer; a mixture's jobs adapt attention.
OF_MIXTURES = "frozen-compiled,ours-compiled,peft"
PROFILED = (
    "frozen-graph",
    "ours",
    "ours-apart",
    "ours-chunked",
    "ours-compiled",
    "ours-dora",
    "ours-dropout",
    "ours-float8-copy",
    "ours-summed",
    "ours-ungated",
    "ours-without-flash4",
    "stacked-graph",
)
WARM_UP = 3
#: Steps of an arm in a round, with no wait between them, as training has none: as many as take so
#: many seconds, within limits. The first of them alone waits for the host.
SECONDS_AT_ONCE, MIN_AT_ONCE, MAX_AT_ONCE = 1.5, 3, 10
GIB = 2**30
KEPT_KERNELS = 60


@dataclass(slots=True)
class Found:
    """What is known of one arm on one mix.

    steps   seconds of one step, an entry a round
    at_once how many steps of a round follow each other
    peak    bytes that forward and backward take above what all arms hold between steps
    """

    steps: list[float] = field(default_factory=list)
    at_once: int = MIN_AT_ONCE
    peak: int = 0
    classes: dict[str, float] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    busy_ms: float = 0.0

    @property
    def totals(self) -> list[float]:
        """Milliseconds a step, one figure a round."""
        return [seconds * 1e3 for seconds in self.steps]


class Bench:
    """Arms that stand ready beside each other.

    failed   by arm, why it cannot run
    """

    def __init__(self, made: Made, names: Sequence[str], out: Console) -> None:
        self.made, self.out = made, out
        self.arms: dict[str, Arm] = {}
        self.failed: dict[str, str] = {}
        for name in names:
            started = time.perf_counter()
            try:
                self.arms[name] = ARMS[name](made)
            except Exception as error:  # noqa: BLE001  (an arm may fail in any way; others go on)
                self._fail(name, error)
            out.print(f"{name}: built in {time.perf_counter() - started:.1f} s", highlight=False)

    def run(self, mix: Mix, rounds: int, profile: Sequence[str]) -> dict[str, Found]:
        """Warm up, measure memory, then time in rounds."""
        found = {name: Found() for name in self.arms}
        for name in list(self.arms):
            self._try(name, lambda name=name: self._prepare(name, mix, found[name]))
        for _, name in turns(self.arms, rounds):
            self._try(name, lambda name=name: self._time(name, found[name]))
        for name in [name for name in profile if name in self.arms]:
            self._try(name, lambda name=name: self._profile(name, found[name]))
        return {name: one for name, one in found.items() if name in self.arms}

    def _time(self, name: str, found: Found) -> None:
        found.steps.append(self.arms[name].step(found.at_once))

    def _try(self, name: str, run: Any) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001  (as above)
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        self.failed[name] = f"{type(error).__name__}: {lines[0][:300]}"
        self.out.print(f"{name} cannot: {self.failed[name]}", highlight=False)
        self.arms.pop(name, None)
        _forget(self.made.device)

    def _prepare(self, name: str, mix: Mix, found: Found) -> None:
        started, arm = time.perf_counter(), self.arms[name]
        if mix.uneven and not isinstance(arm, Ours):
            raise RuntimeError("it takes sequences of one length")
        on_gpu = self.made.device == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        arm.load(mix)
        arm.gradients()
        found.peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        apart = require_gradients(arm)
        for _ in range(WARM_UP):
            arm.step()
        found.at_once = at_once(arm.step(MIN_AT_ONCE))
        seconds = time.perf_counter() - started
        compared = "eager" if apart is None else f"gradients {apart:.3g} off"
        told = f"{compared}, warm after {seconds:.1f} s"
        self.out.print(f"{name}, {mix.name}: {told}", highlight=False)

    def _profile(self, name: str, found: Found) -> None:
        arm = self.arms[name]
        with arm.launched():
            arm.step()
            kernels = profiled(arm.step)
        shape, wall = self.made.shape, statistics.median(found.totals)
        found.classes = classes(kernels, shape.vocabulary, shape.ranks, wall)
        found.busy_ms = busy(kernels) / 1e3
        found.kernels = table(kernels, 1)[:KEPT_KERNELS]


def at_once(step: float) -> int:
    """How many steps of so many seconds follow each other in a round."""
    return max(MIN_AT_ONCE, min(MAX_AT_ONCE, round(SECONDS_AT_ONCE / step)))


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def mix_json(mix: Mix, shape: Shape, found: Mapping[str, Found]) -> dict[str, Any]:
    """A mix as a result file has it."""
    return asdict(mix) | {
        "tokens": mix.tokens,
        "arms": {name: _arm_json(mix, shape, one) for name, one in found.items()},
    }


def _arm_json(mix: Mix, shape: Shape, found: Found) -> dict[str, Any]:
    spread = Spread.of(found.totals)
    made: dict[str, Any] = {
        "milliseconds": asdict(spread),
        "steps_at_once": found.at_once,
        "frozen_tflops": _tflops(mix, shape, spread.median),
        "tokens_per_second": round(mix.tokens / spread.median * 1e3),
        "peak_gib_above_rest": round(found.peak / GIB, 2),
    }
    if found.classes:
        made |= {"gpu_busy_ms": found.busy_ms, "classes_ms": found.classes}
        made |= {"kernels": found.kernels}
    return made


def _tflops(mix: Mix, shape: Shape, milliseconds: float) -> float:
    """Of the frozen products alone: two of two operations a parameter and token."""
    return round(4 * shape.frozen_parameters() * mix.tokens / milliseconds / 1e9, 1)


def show(mix: Mix, shape: Shape, found: Mapping[str, Found], out: Console) -> None:
    """A line an arm, then the classes of what was profiled."""
    heads = ("arm", "ms", "least..most", "TFLOP/s", "tokens/s", "GiB above rest")
    made = bare_table(*heads, title=f"{mix.name}: {mix.tokens} tokens")
    for name, one in found.items():
        made.add_row(name, *_cells(mix, shape, one))
    out.print(made)
    taken = {name: one for name, one in found.items() if one.classes}
    if taken:
        title = f"{mix.name}: milliseconds on the GPU by class of kernel"
        parts = bare_table("class", *taken, title=title)
        for kind in CLASSES:
            parts.add_row(kind, *(f"{one.classes[kind]:.1f}" for one in taken.values()))
        out.print(parts)


def _cells(mix: Mix, shape: Shape, found: Found) -> Iterator[str]:
    spread = Spread.of(found.totals)
    yield f"{spread.median:.1f}"
    yield f"{spread.least:.1f}..{spread.most:.1f}"
    yield f"{_tflops(mix, shape, spread.median):g}"
    yield f"{mix.tokens / spread.median * 1e3:.0f}"
    yield f"{found.peak / GIB:.2f}"


def shape_of(given: argparse.Namespace) -> Shape:
    """The shape of a dense base, or one with the same proportions."""
    whole = BASES[given.base]
    whole = replace(
        whole,
        dtype=given.dtype,
        dropout=given.dropout,
        ranks=tuple(given.ranks),
        layers=given.layers or whole.layers,
        vocabulary=given.vocabulary or whole.vocabulary,
    )
    if given.hidden in (0, whole.hidden):
        return whole
    heads = max(2, given.hidden // 128)
    return replace(
        whole,
        hidden=given.hidden,
        intermediate=given.hidden * 7 // 2,
        heads=heads,
        key_value_heads=max(1, heads // 4),
    )


def mixture_of(given: argparse.Namespace) -> Mixture:
    """Qwen3-30B-A3B's shape with half its layers, or a small one."""
    whole = Mixture(dtype=given.dtype, dropout=given.dropout, ranks=tuple(given.ranks))
    if given.adapt_experts:
        whole = replace(whole, parameters=EXPERTS)
    if given.layers:
        whole = replace(whole, layers=given.layers)
    if not given.hidden:
        return whole
    return replace(
        whole, hidden=given.hidden, intermediate=given.hidden, heads=4, key_value_heads=2,
        head_width=16, experts=8, chosen=2, vocabulary=given.vocabulary or 512,
    )  # fmt: skip


def mixes_of(given: argparse.Namespace) -> list[Mix]:
    """What the arms train, one after the other."""
    if given.batch:
        count, length = len(given.ranks), given.length or 160
        name = f"{'uneven' if given.uneven else 'equal'} {count * given.batch}x{length}"
        return [Mix(name, (given.batch,) * count, length, given.uneven)]
    chosen = [MIXES[name] for name in given.mixes]
    if not given.length:
        return chosen
    return [
        replace(mix, name=f"{sum(mix.batches)}x{given.length}", length=given.length)
        for mix in chosen
    ]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--base", choices=(*BASES, "qwen3-moe"), default="llama")
    parser.add_argument("--adapt-experts", action="store_true", help="of a mixture, too")
    for name in ("layers", "hidden", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: the base's own")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=["gsm8k", "ones"])
    parser.add_argument("--batch", type=int, default=0, help="of each job, in place of the mixes")
    parser.add_argument("--length", type=int, default=0, help="of a sequence; 0: the mix's own")
    parser.add_argument("--uneven", action="store_true", help="with --batch: that or shorter")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="one a job")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0, help="of ours and of PEFT's adapters")
    parser.add_argument("--arms", help=f"of {', '.join(ARMS)}, commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="time on the GPU by kernel class")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 when an arm cannot run."""
    given, out = parsed(arguments), console()
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    dense = given.base != "qwen3-moe"
    shape = shape_of(given) if dense else mixture_of(given)
    names = (given.arms or (DEFAULT if dense else OF_MIXTURES)).split(",")
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise SystemExit(f"no arm is called {unknown[0]}; there are {', '.join(ARMS)}")
    started = time.perf_counter()
    found = described("step", given.device) | {"shape": asdict(shape), "rounds": given.rounds}
    kind = "step" if given.base == "llama" else f"step-{given.base}"
    kind += "-experts" * given.adapt_experts
    path = given.out / f"{kind}-{found['date']}.json"
    mixes: list[dict[str, Any]] = []
    profile = PROFILED if given.profile and given.device == "cuda" else ()
    with tempfile.TemporaryDirectory() as folder:
        made = Made(shape, given.device, Path(folder))
        out.print(f"weights: drawn in {time.perf_counter() - started:.1f} s", highlight=False)
        bench = Bench(made, names, out)
        for mix in mixes_of(given):
            measured = bench.run(mix, given.rounds, profile)
            show(mix, shape, measured, out)
            mixes.append(mix_json(mix, shape, measured))
            found["seconds"] = round(time.perf_counter() - started, 1)
            write(path, found | {"mixes": mixes, "cannot": bench.failed})
    out.print(f"written to {path} after {found['seconds']} s")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
