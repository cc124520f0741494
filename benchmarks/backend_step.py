"""One PEFT job under both backends of torch.compile: `python -m benchmarks.backend_step`.

A Llama with random weights and one LoRA adapter on all its linears does forward and backward, as
Inductor compiles it and as `backend="tlora-fx"` does. The precision is that of TRL: a bf16 base,
float32 adapters, autocast; `--precision same` has all in `--dtype`, without autocast. Before
anything is timed, every adapter's gradient is compared with eager mode's: ours may be at most twice
as far away as Inductor's, or the benchmark ends. Then both take turns; a figure is the median.

On a CPU: `--device cpu --precision same --dtype float32 --layers 4 --hidden 512 --vocabulary 512
--tokens 256`.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Runner, Spread, interleave, ratios
from benchmarks.results_file import console, described, write
from benchmarks.step import shape_of
from benchmarks.step_mixes import SEED, Shape

BACKENDS = ("inductor", "tlora-fx")
# Two sums of bf16 products in other orders: below this nobody is nearer than the other.
ALIKE = 1e-3
GIB = 2**30

Gradients = dict[str, Tensor]


class WrongGradients(Exception):
    """Ours are farther from eager mode's than rounding makes them."""


def peft_model(shape: Shape, device: str, rank: int, precision: str) -> Any:
    """A PEFT model whose B is not zero, so that every adapter gets a gradient."""
    import peft
    import transformers

    torch.manual_seed(SEED)
    factory: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        base = factory.from_config(shape.config(), dtype=shape.torch_dtype)
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.device(device):
        model: Any = peft.get_peft_model(base, lora, autocast_adapter_dtype=precision == "autocast")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


class Job:
    """One batch of one model; each call of a step leaves its gradients on the adapters."""

    def __init__(self, model: Any, ids: Tensor, precision: str) -> None:
        self.model, self.ids, self.precision = model, ids, precision
        self.learning = [p for p in model.parameters() if p.requires_grad]

    def step(self, run: Callable[..., Any]) -> None:
        """Forward and backward."""
        for parameter in self.learning:
            parameter.grad = None
        cast: Any = contextlib.nullcontext()
        if self.precision == "autocast":
            cast = torch.autocast(self.ids.device.type, torch.bfloat16)
        with cast:
            loss = run(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()

    def gradients(self, run: Callable[..., Any]) -> Gradients:
        """Every adapter's gradient after one step, copied."""
        self.step(run)
        return {
            name: parameter.grad.double().cpu()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def distance(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest relative distance of a gradient, and whose it is."""
    if found.keys() != expected.keys():
        raise WrongGradients(f"gradients of {sorted(found.keys() ^ expected.keys())[:3]} differ")
    return max(
        (float((found[name] - expected[name]).norm() / expected[name].norm()), name)
        for name in expected
    )


def require_alike(distances: Mapping[str, tuple[float, str]]) -> None:
    """Raise WrongGradients where ours are twice as far from eager mode's as Inductor's."""
    theirs, ours = (distances[name] for name in BACKENDS)
    if not ours[0] <= max(2 * theirs[0], ALIKE):
        raise WrongGradients(
            f"{ours[1]}: {ours[0]:.2g} from eager mode's, Inductor {theirs[0]:.2g}"
        )


def compiled_arms(job: Job, out: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """What runs each backend's code, and what is known of it: gradients, seconds, branches."""
    expected = job.gradients(job.model)
    arms: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    torch._dynamo.reset()
    for name in BACKENDS:
        counters.clear()
        arms[name] = torch.compile(job.model, backend=name, dynamic=False)
        started = time.perf_counter()
        far = distance(job.gradients(arms[name]), expected)
        seconds = time.perf_counter() - started
        facts[name] = {
            "gradient_distance": far[0],
            "of": far[1],
            "first_step_seconds": round(seconds, 1),
            **dict(counters["tlora_fx"]),
        }
        out.print(f"{name}: first step {seconds:.1f} s, gradients {far[0]:.2g} from eager mode's")
    require_alike({name: (one["gradient_distance"], one["of"]) for name, one in facts.items()})
    return arms, facts


def measure(job: Job, rounds: int, out: Console) -> dict[str, Any]:
    """Both backends on one batch, as a result file has them."""
    device = job.ids.device.type
    arms, facts = compiled_arms(job, out)
    runners = {name: Runner(partial(job.step, run)) for name, run in arms.items()}
    for name, runner in runners.items():
        facts[name]["peak_gib"] = _peak(device, runner)
    times = interleave(runners, device, rounds)
    for name, spent in times.items():
        facts[name]["milliseconds"] = asdict(Spread.of(spent))
    inductor, ours = (times[name] for name in BACKENDS)
    return {
        "tokens": job.ids.numel(),
        "backends": facts,
        "ours_over_inductor": asdict(ratios(ours, inductor)),
    }


def _peak(device: str, runner: Runner) -> float | None:
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    runner.run()
    return round(torch.cuda.max_memory_allocated() / GIB, 2)


def show(cases: Sequence[Mapping[str, Any]], out: Console) -> None:
    """A line for each number of tokens."""
    table = Table("tokens", "inductor", "tlora-fx", "ours / inductor", "branches", box=None)
    for case in cases:
        theirs, ours = (case["backends"][name] for name in BACKENDS)
        ratio = case["ours_over_inductor"]
        table.add_row(
            str(case["tokens"]),
            *(f"{one['milliseconds']['median']:.1f} ms" for one in (theirs, ours)),
            f"{ratio['median']:.3f} ({ratio['least']:.3f}..{ratio['most']:.3f})",
            f"{ours['branches_lowered']} lowered, {ours['branches_left']} left",
        )
    out.print(table)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1280, 4800])
    parser.add_argument("--lines", type=int, default=8, help="sequences of a batch")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--precision", choices=("autocast", "same"), default="autocast")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    # What `shape_of` asks besides; with dropout the masks of the backends differ.
    parser.set_defaults(base="llama", dropout=0.0, ranks=())
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all numbers of tokens; exit status 1 where gradients are wrong."""
    given, out = parsed(arguments), console()
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    shape = shape_of(given)
    found = described("backend_step", given.device) | {"shape": asdict(shape), "rank": given.rank}
    path = given.out / f"backend-step-{given.precision}-{found['date']}.json"
    model = peft_model(shape, given.device, given.rank, given.precision)
    cases: list[dict[str, Any]] = []
    for tokens in given.tokens:
        ids = torch.randint(0, shape.vocabulary, (given.lines, tokens // given.lines))
        job = Job(model, ids.to(given.device), given.precision)
        try:
            cases.append(measure(job, given.rounds, out))
        except WrongGradients as error:
            out.print(f"wrong gradients at {tokens} tokens: {error}")
            return 1
        write(path, found | {"precision": given.precision, "cases": cases})
    show(cases, out)
    out.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
