"""The arms of `step.py`: each trains eight jobs for one step, in its own way, on shared weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import tlora_fx
from benchmarks.step_mixes import ALPHA, RANKS, SEED, Mix, Shape
from benchmarks.step_packed import ATTENTION, RATE, Packed, llama, stack_adapters
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.ops.float8 import BACKWARDS
from tlora_fx.runtime.data import DataReport, JobData, Sample

Seconds = dict[str, float]
WHOLE, COMPUTE, OPTIMIZER = "step", "forward and backward", "optimizer"


class Arm(Protocol):
    """Something that trains the jobs."""

    def load(self, mix: Mix) -> None:
        """Take a mix; not timed."""

    def step(self) -> Seconds:
        """One step of every job; the seconds of its parts, which add up to the step."""

    def gradients(self) -> list[Tensor]:
        """What one step gathers; nothing is trained."""


#: Of the norm of all gradients, compiled against eager. Rounding in bf16 parts them by .019 of four
#: layers of 2,048 on a CPU, where eager ones are .018 and compiled ones .017 from float32's; by
#: .028 of four layers of 4,096 on an H200, and by .044 of eight.
GRADIENT_BOUND = 1e-1
#: Of the norm of one tensor's gradient: one that is lost is 1 off, and may be little of all.
LOST = 0.75
#: In float8 a number that a compiler rounds otherwise falls on another code, a sixteenth apart:
#: compiled gradients may be so many times as far from those of the base as it is as eager ones are.
FLOAT8_BOUND = 1.1


class Clock:
    """Seconds by part; waits for the device where a part begins and ends."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, dict[str, float]()

    def time(self, part: str, run: Callable[[], object]) -> Any:
        """Run, and add its seconds to a part; the profiler sees a range of that name."""
        started = self._now()
        with torch.profiler.record_function(part):
            result = run()
        self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - started
        return result

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Ours:
    """The Shared Super-Model as `Trainer` runs it: rows packed on the host, one optimizer a job.

    compiled   layer by layer, by `SuperModel.compile`
    float8     how products in float8 find dx, "" for none
    """

    def __init__(
        self,
        base: tlora_fx.BaseSpec,
        made: Made,
        folder: Path,
        *,
        compiled: bool = False,
        float8: str = "",
    ) -> None:
        self.shape, self.device, self.float8, self.made = made.shape, made.device, float8, made
        self.jobs = [_job(base, place, made.shape) for place in range(len(RANKS))]
        added = f"quantize-base{{to=float8 products=true backward={float8}}}@before:lower-adapters"
        pipeline = resolve_pipeline(None, [added]) if float8 else None
        self.model = tlora_fx.compile(self.jobs, pipeline=pipeline)
        self.model.materialize(made.weights, made.device)
        if compiled:
            self.model.compile()
        nothing = {job.name: JobData(job, [], DataReport()) for job in self.jobs}
        self.trainer = tlora_fx.Trainer(self.model, output=folder, device=made.device, data=nothing)
        self.trainer.prepare(nothing)
        self.batches: dict[int, list[list[Sample]]] = {}

    def load(self, mix: Mix) -> None:
        """Take a mix as samples, each job's in one micro-batch."""
        for index, ids in enumerate(mix.ids(self.shape, "cpu")):
            rows = [tuple(row) for row in ids.tolist()]
            self.batches[index] = [[Sample(row, row) for row in rows]]

    def gradients(self) -> list[Tensor]:
        """Of all jobs' parameters."""
        self.trainer.gradients(self.batches)
        params = [p for run in self.trainer.runs for p in run.parameters.values()]
        found = [p.grad.clone() for p in params if p.grad is not None]
        for run in self.trainer.runs:
            run.optimizer.zero_grad()
        return found

    def exact_gradients(self) -> list[Tensor]:
        """Of all jobs' parameters, by the base as it is."""
        plain = Ours(self.made.base, self.made, self.made.folder / "plain")
        plain.batches = self.batches
        return plain.gradients()

    def step(self) -> Seconds:
        """One round of the trainer."""
        clock = Clock(self.device)
        losses = clock.time(COMPUTE, lambda: self.trainer.gradients(self.batches))
        clock.time(OPTIMIZER, lambda: self._finish(losses))
        return clock.seconds

    def _finish(self, losses: Mapping[int, float]) -> None:
        self.trainer.update(losses, self.batches)
        for run in self.trainer.runs:
            if run.status != "running":
                raise RuntimeError(f"{run.job.name}: {run.status} {run.reason}")


def require_gradients(arm: Arm) -> None:
    """Compare an arm's gradients with those of the same code run eagerly; nothing is timed yet.

    raises   RuntimeError where they differ, or where all are zeros
    """
    found = arm.gradients()
    with torch.compiler.set_stance("force_eager"):
        expected = arm.gradients()
        exact = arm.exact_gradients() if isinstance(arm, Ours) and arm.float8 else None
    if not expected:
        return
    apart, bound = _apart(found, expected), GRADIENT_BOUND
    if exact is not None:
        apart, bound = _apart(found, exact), FLOAT8_BOUND * _apart(expected, exact)
    if not apart <= bound:
        raise RuntimeError(f"it trains nothing: gradients {apart:.3g} off, bound {bound:.3g}")
    pairs = zip(found, expected, strict=True)
    # A trains nothing yet while B is zero.
    apart = max(_apart([a], [b]) for a, b in pairs if b.count_nonzero())
    if not apart <= LOST:
        raise RuntimeError(f"a tensor trains nothing: {apart:.3g} off, bound {LOST:g}")


def _apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what is expected; nan where that is 0."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    whole = sum(float(b.double().square().sum()) for _, b in pairs)
    return float((apart / whole) ** 0.5) if whole else math.nan


class Peft:
    """PEFT, one job after the other: what users do who share a GPU but no model.

    Choosing a job's adapter is not timed: alone, a job would not have to.
    """

    def __init__(self, made: Made) -> None:
        import peft

        self.shape, self.device = made.shape, made.device
        base = llama(made.shape, made.weights, made.device, "sdpa")
        names = [f"j{place}" for place in range(len(RANKS))]
        configs = [
            peft.LoraConfig(
                r=rank,
                lora_alpha=ALPHA,
                lora_dropout=made.shape.dropout,
                target_modules=made.shape.target_modules,
            )
            for rank in RANKS
        ]
        self.model: Any = peft.get_peft_model(
            base, configs[0], adapter_name=names[0], autocast_adapter_dtype=False
        )
        for name, config in zip(names[1:], configs[1:], strict=True):
            self.model.add_adapter(name, config)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(made.device, made.shape.torch_dtype)
        self.model.train()
        self.names, self.ids = names, list[Tensor]()
        self.optimizers = [self._optimizer(name) for name in names]

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        own = [p for known, p in self.model.named_parameters() if f".{name}." in known]
        return torch.optim.AdamW(own, lr=RATE, fused=self.device == "cuda")

    def load(self, mix: Mix) -> None:
        """Take a mix, a batch a job."""
        self.ids = mix.ids(self.shape, self.device)

    def gradients(self) -> list[Tensor]:
        """Nothing is compiled here."""
        return []

    def step(self) -> Seconds:
        """A step of the first job, then of the next."""
        clock = Clock(self.device)
        for name, ids, optimizer in zip(self.names, self.ids, self.optimizers, strict=True):
            self.model.set_adapter(name)

            def train(ids: Tensor = ids, optimizer: torch.optim.Optimizer = optimizer) -> None:
                self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            clock.time(WHOLE, train)
        return clock.seconds


class PackedArm:
    """A transformers Llama on packed rows: frozen, or with stacked adapters."""

    def __init__(self, made: Made, *, stacked: bool, compiled: bool = False) -> None:
        model = llama(made.shape, made.weights, made.device, ATTENTION)
        sites = stack_adapters(model) if stacked else []
        if compiled:
            for layer in model.model.layers:
                # Anew for each mix: the best that it can do.
                layer.compile(dynamic=False)
        self.device = made.device
        self.packed = Packed(model, sites, made.shape, made.device)

    def load(self, mix: Mix) -> None:
        """Take a mix as one row."""
        self.packed.load(mix)

    def gradients(self) -> list[Tensor]:
        """Of the stacked adapters."""
        return self.packed.gradients()

    def step(self) -> Seconds:
        """One step."""
        clock = Clock(self.device)
        clock.time(WHOLE, self.packed.step)
        return clock.seconds


class Made:
    """The base's weights, made once and shared by all arms."""

    def __init__(self, shape: Shape, device: str, folder: Path) -> None:
        from tlora_fx.model.backbone import load_backbone
        from tlora_fx.runtime.adapters import base_tensors

        self.shape, self.device, self.folder = shape, device, folder
        shape.config().save_pretrained(folder / "base")
        dtype: Any = shape.dtype
        self.base = tlora_fx.BaseSpec(config=folder / "base", dtype=dtype, seed=SEED)
        self.weights = base_tensors(load_backbone(self.base), device)


def _job(base: tlora_fx.BaseSpec, place: int, shape: Shape) -> tlora_fx.Job:
    lora = {
        "r": RANKS[place],
        "lora_alpha": ALPHA,
        "lora_dropout": shape.dropout,
        "target_modules": shape.target_modules,
    }
    fields: dict[str, Any] = {"max_steps": 10**6, "learning_rate": RATE, "seed": place}
    return tlora_fx.Job(name=f"job-{place}", base=base, lora=lora, data={"path": "-"}, **fields)


def _in_float8(made: Made, backward: str) -> Ours:
    folder = made.folder / f"ours-float8-{backward}"
    return Ours(made.base, made, folder, compiled=True, float8=backward)


ARMS: dict[str, Callable[[Made], Arm]] = {
    "frozen": lambda made: PackedArm(made, stacked=False),
    "frozen-compiled": lambda made: PackedArm(made, stacked=False, compiled=True),
    "ours": lambda made: Ours(made.base, made, made.folder / "ours"),
    "ours-compiled": lambda made: Ours(
        made.base, made, made.folder / "ours-compiled", compiled=True
    ),
    **{f"ours-float8-{backward}": partial(_in_float8, backward=backward) for backward in BACKWARDS},
    "peft": Peft,
    "stacked": lambda made: PackedArm(made, stacked=True),
    "stacked-compiled": lambda made: PackedArm(made, stacked=True, compiled=True),
}
