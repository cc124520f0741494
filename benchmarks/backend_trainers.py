"""Trainers under both backends of torch.compile: `python -m benchmarks.backend_trainers`.

A small Llama with LoRA on all linears trains as people train it: with PEFT's `set_adapter` between
two adapters, as accelerate prepared it, and by TRL's `SFTTrainer` with its defaults, on batches of
several lengths. Each run starts from the same weights with torch's caches of graphs empty: eager,
as Inductor compiles it, and as `backend="tlora-fx"` does. Stated are losses, graphs that were
compiled, graph breaks, and the time of a step after those that compile, by the clock and of the
processor, which other processes disturb less; runs take turns, and a ratio is one of medians of the
same round. What a process compiled, later rounds find in caches on disk. It ends with 1 where ours
breaks or compiles more often than Inductor's, or losses differ.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from benchmarks.interleaved import Spread, ratios
from benchmarks.results_file import RESULTS, console, described, write

BASE = Path(__file__).parents[1] / "examples/quickstart/base"
EAGER, INDUCTOR, OURS = "eager", "inductor", "tlora-fx"
ARMS = (EAGER, INDUCTOR, OURS)
#: The least part of a run's steps, all of which may compile, that is not timed.
WARM = 0.5
#: Losses of eager mode that others may be off, relatively: in float32, and under autocast.
BOUNDS = {"set_adapter": 1e-4, "accelerate": 5e-3, "sft": 5e-3}


@dataclass(slots=True)
class Run:
    """One training.

    losses   of each step
    steps    seconds of each step
    busy     seconds of processors in each step
    graphs   that dynamo compiled, again where it had to
    breaks   of graphs
    """

    losses: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    graphs: int = 0
    breaks: int = 0
    _begun: tuple[float, float] = (0.0, 0.0)

    def milliseconds(self, seconds: Sequence[float]) -> float:
        """The median of the steps that come after those that compile."""
        return 1e3 * statistics.median(seconds[int(len(seconds) * WARM) :])

    def begin(self) -> None:
        """Start to time a step."""
        self._begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Keep what it took."""
        self.steps.append(time.perf_counter() - self._begun[0])
        self.busy.append(time.process_time() - self._begun[1])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one."""
        self.begin()
        yield
        self.end()


def small_model(layers: int, adapters: int = 1) -> Any:
    """A PEFT model whose B is not zero; the same each time."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(BASE, num_hidden_layers=layers)
    factory: Any = transformers.AutoModelForCausalLM
    lora = [peft.LoraConfig(r=r, target_modules="all-linear") for r in (8, 4)[:adapters]]
    model: Any = peft.get_peft_model(factory.from_config(config), lora[0])
    for number, more in enumerate(lora[1:]):
        model.add_adapter(f"adapter-{number}", more)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def batches(count: int) -> Iterator[torch.Tensor]:
    """Ids of lines of several lengths."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        yield torch.randint(1, 200, (4, (48, 64, 56)[number % 3]), generator=generator)


def set_adapter(run: Run, arm: str, layers: int, steps: int) -> None:
    """Two adapters in turns."""
    model = small_model(layers, adapters=2)
    compiled: Any = model if arm == EAGER else torch.compile(model, backend=arm)
    for number, ids in enumerate(batches(steps)):
        with run.step():
            model.set_adapter(("default", "adapter-0")[number % 2])
            model.zero_grad()
            loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
        run.losses.append(float(loss))


def accelerate(run: Run, arm: str, layers: int, steps: int) -> None:
    """As accelerate prepares a model for bfloat16, with its optimizer."""
    library: Any = import_module("accelerate")
    accelerator, model = library.Accelerator(cpu=True, mixed_precision="bf16"), small_model(layers)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(learning, lr=1e-3))
    if arm != EAGER:
        model.compile(backend=arm)
    for ids in batches(steps):
        with run.step():
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(float(loss))


def sft(run: Run, arm: str, layers: int, steps: int) -> None:
    """TRL's trainer with its defaults: bfloat16 by autocast, checkpointing."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    trl: Any = import_module("trl")

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if arm != EAGER:
                more["model"].compile(backend=arm)

        def on_step_begin(self, *given: Any, **more: Any) -> None:
            run.begin()

        def on_step_end(self, *given: Any, **more: Any) -> None:
            run.end()

    rows = [{"prompt": f"{n} + {n} = ", "completion": str(2 * n) * (1 + n % 9)} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            small_model(layers),
            args=trl.SFTConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=4,
                learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[],
                use_cpu=True, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(BASE),
            callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


TRAINERS: dict[str, Callable[[Run, str, int, int], None]] = {
    "set_adapter": set_adapter, "accelerate": accelerate, "sft": sft,
}  # fmt: skip


def trained(trainer: str, arm: str, layers: int, steps: int) -> Run:
    """One training from the same start, with no graph compiled before."""
    torch._dynamo.reset()
    counters.clear()
    run = Run()
    TRAINERS[trainer](run, arm, layers, steps)
    run.graphs = counters["stats"]["unique_graphs"]
    run.breaks = sum(counters["graph_break"].values())
    return run


def faults(trainer: str, runs: dict[str, Run]) -> list[str]:
    """What does not hold of the first round of a trainer."""
    eager, theirs, ours = (runs[arm] for arm in ARMS)
    found = []
    if ours.graphs > theirs.graphs:
        found.append(f"{trainer}: {ours.graphs} graphs, Inductor {theirs.graphs}")
    if ours.breaks > theirs.breaks:
        found.append(f"{trainer}: {ours.breaks} breaks, Inductor {theirs.breaks}")
    far = apart(ours, eager)
    if not far <= BOUNDS[trainer]:
        found.append(f"{trainer}: losses are {far:.2g} from those of eager mode")
    return found


def apart(run: Run, eager: Run) -> float:
    """The largest relative difference of a loss; nan where one is none."""
    found, expected = torch.tensor(run.losses), torch.tensor(eager.losses)
    return float((found / expected - 1).abs().max())


def measure(trainer: str, given: argparse.Namespace, out: Console) -> dict[str, Any]:
    """All arms of a trainer in turns, as a result file has them."""
    rounds: list[dict[str, Run]] = []
    for number in range(given.rounds):
        order = ARMS if number % 2 == 0 else ARMS[::-1]
        rounds.append({arm: trained(trainer, arm, given.layers, given.steps) for arm in order})
    first = rounds[0]
    times, busy = (
        {arm: [one[arm].milliseconds(seconds(one[arm])) for one in rounds] for arm in ARMS}
        for seconds in (attrgetter("steps"), attrgetter("busy"))
    )
    case: dict[str, Any] = {
        "trainer": trainer,
        "arms": {
            arm: {
                "milliseconds": asdict(Spread.of(times[arm])),
                "processor_milliseconds": asdict(Spread.of(busy[arm])),
                "graphs": first[arm].graphs,
                "breaks": first[arm].breaks,
                "losses_apart": apart(first[arm], first[EAGER]),
            }
            for arm in ARMS
        },
        "ours_over_inductor": asdict(ratios(times[OURS], times[INDUCTOR])),
        "ours_over_inductor_processor": asdict(ratios(busy[OURS], busy[INDUCTOR])),
        "faults": faults(trainer, first),
    }
    clock, processor = (case[f"ours_over_inductor{of}"]["median"] for of in ("", "_processor"))
    out.print(f"{trainer}: {clock:.2f} of Inductor's time, {processor:.2f} of its processor's")
    return case


def show(cases: Sequence[dict[str, Any]], out: Console) -> None:
    """A line for each trainer and arm."""
    table = Table(
        "trainer", "arm", "ms a step", "of processors", "graphs", "breaks", "losses off", box=None
    )
    for case in cases:
        for arm, one in case["arms"].items():
            table.add_row(
                case["trainer"], arm, f"{one['milliseconds']['median']:.1f}",
                f"{one['processor_milliseconds']['median']:.1f}", str(one["graphs"]),
                str(one["breaks"]), f"{one['losses_apart']:.1e}",
            )  # fmt: skip
    out.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all trainers; exit status 1 where ours compiles more or computes otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backend_trainers")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given, out = parser.parse_args(arguments), console()
    warnings.filterwarnings("ignore")
    found = described("backend_trainers", "cpu")
    found |= {"layers": given.layers, "steps": given.steps, "rounds": given.rounds}
    cases = [measure(trainer, given, out) for trainer in given.trainers]
    show(cases, out)
    some = "" if len(cases) == len(TRAINERS) else "-".join(given.trainers) + "-"
    write(given.out / f"backend-trainers-{some}{found['date']}.json", found | {"cases": cases})
    wrong = [fault for case in cases for fault in case["faults"]]
    for fault in wrong:
        out.print(fault)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
