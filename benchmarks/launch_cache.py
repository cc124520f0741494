"""What keeping launches brings where rows are launched: `python -m benchmarks.launch_cache`.

Rows that a CUDA graph cannot hold start each kernel from the host. The launch cache writes down
what a call of an operator starts, and starts the same for later calls. Here no row is captured,
and rounds with and without the cache take turns. Losses and gradients of both are compared first.

On a CPU nothing but the code is tried: `--device cpu --layers 2 --hidden 64`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import parser_of, shape_of
from benchmarks.interleaved import Spread, seconds_of
from benchmarks.results_file import console, described, write
from benchmarks.step_arms import Made, Ours
from benchmarks.step_mixes import MIXES as STEP_MIXES
from benchmarks.step_mixes import Mix
from tlora_fx.ops.kernels import launch_cache
from tlora_fx.parallel import cuda_graphs

MIXES = (
    Mix("8 x 16", (1,) * 8, 16),
    STEP_MIXES["ones"],
    STEP_MIXES["gsm8k"],
    STEP_MIXES["wide"],
)
WARM_UP = 6


@contextmanager
def kept(on: bool) -> Iterator[None]:
    """Launches are kept, or decided anew at each call."""
    serve = launch_cache.serve

    def anew(run: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        function(run, *args)

    vars(launch_cache)["serve"] = serve if on else anew
    try:
        yield
    finally:
        vars(launch_cache)["serve"] = serve


def gradients(arm: Ours) -> list[Tensor]:
    """Losses of one round, and the gradients of all adapters after it."""
    trained = [p.grad for p in arm.model.parameters() if p.grad is not None]
    for grad in trained:
        grad.zero_()
    losses = arm.trainer.gradients(arm.batches)
    return [torch.tensor(list(losses.values())), *(grad.clone() for grad in trained)]


def compared(arm: Ours) -> int:
    """How many tensors are equal to the last bit with and without the cache.

    raises    RuntimeError where one is not
    """
    for _ in range(WARM_UP):
        with kept(True):
            one = gradients(arm)
    with kept(False):
        two = gradients(arm)
    for index, (left, right) in enumerate(zip(one, two, strict=True)):
        if not torch.equal(left, right):
            raise RuntimeError(f"tensor {index} is not the same with and without the cache")
    return len(one)


def timed(arm: Ours, on: bool) -> float:
    """Milliseconds of forward and backward of one round."""
    with kept(on):
        return 1e3 * seconds_of(lambda: arm.trainer.gradients(arm.batches))


def measured(arm: Ours, mix: Mix, rounds: int) -> dict[str, Any]:
    """Both ways in turns."""
    arm.load(mix)
    tensors = compared(arm)
    for _ in range(WARM_UP):
        timed(arm, True), timed(arm, False)
    pairs = [(timed(arm, True), timed(arm, False)) for _ in range(rounds)]
    on, off = zip(*pairs, strict=True)
    return {
        "mix": mix.name,
        "tokens": mix.tokens,
        "compared_tensors": tensors,
        "kept_ms": Spread.of(on).json(),
        "anew_ms": Spread.of(off).json(),
        "anew_over_kept": statistics.median(b / a for a, b in pairs),
    }


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__, layers=8)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    vars(cuda_graphs)["CAPTURED_TOKENS"] = 0  # no row is captured
    found = described("launch_cache", given.device) | {"layers": given.layers, "cases": []}
    folder = Path(tempfile.mkdtemp())
    made = Made(shape_of(given), given.device, folder)
    for compiled in (False, True):
        arm = Ours(made.base, made, folder / f"ours-{compiled}", compiled=compiled)
        for mix in MIXES:
            case = {"compiled": compiled} | measured(arm, mix, given.rounds)
            found["cases"].append(case)
            console().print(case)
            write(given.out / f"launch-cache-{found['date']}.json", found)


if __name__ == "__main__":
    main()
