"""Show that jobs trained together train as each would alone.

Each job is trained alone by plain transformers, PEFT and torch.optim, and with all others in the
Shared Super-Model, from the same adapters and on the same data. Twice: with every dropout at 0
against PEFT as it is, and with dropout against PEFT whose dropouts draw the job's keyed masks.

Both sides begin each step with the adapter that the fused run has by then, and the optimizer alone
keeps its own state throughout. So a difference is that of one step, however much the base makes of
rounding from step to step, and what the optimizer does otherwise adds up over all of them.

At a kink, such as that of a ReLU, two roundings of one number have two gradients. A step whose
gradients differ beyond the bound is right if the job alone has those gradients when its token
embeddings are disturbed by no more than a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from tlora_fx.compiler import Jobs, as_jobs, compile, resolve_pipeline
from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job import Job
from tlora_fx.model.backbone import load_config
from tlora_fx.numerics.noise import lifted
from tlora_fx.pipeline import Pipeline
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    continued_adapter,
    load_adapter,
    saved_name,
)
from tlora_fx.runtime.adapters.quantised import trained_base
from tlora_fx.runtime.checks import check_fits, load_all_data
from tlora_fx.runtime.data.batching import MicroBatches
from tlora_fx.runtime.data.sample_order import Line, SampleOrder, in_another_layout, lines_of
from tlora_fx.runtime.data.samples import JobData, Sample
from tlora_fx.runtime.distributed import device_named
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.solo import SoloTrainer

PLAIN = "plain PEFT, dropout 0"
MASKED = "PEFT with the job's keyed masks"
# So many roundings of the embeddings are tried for a step beyond the bound. At a kink each of them
# lands on one of two sides.
DISTURBANCES = 12


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of two runs of a job; `JobDifference` says what the numbers are."""

    loss: float
    gradient: float
    adapter: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative differences that pass.

    loss, gradient, adapter   whatever the base
    lift                      the noise of a base widens each of them at most so many times
    """

    loss: float
    gradient: float
    adapter: float
    lift: float

    def over(self, noise: Differences) -> Bounds:
        """The bounds for a base of this noise."""
        return Bounds(
            lifted(self.loss, noise.loss, self.lift * self.loss),
            lifted(self.gradient, noise.gradient, self.lift * self.gradient),
            lifted(self.adapter, noise.adapter, self.lift * self.adapter),
            self.lift,
        )


# In float32 and wider transformers' float32 loss sets the floor. On a GPU sums run in another order
# in each GEMM, which AdamW's first steps make larger. In half precision PEFT multiplies adapters in
# float32 and we in the base's dtype, unless adapter_compute is float32.
_WIDE = Bounds(2e-6, 2e-5, 1e-5, 10)
_ON_GPU = Bounds(2e-6, 1e-4, 1e-4, 10)
_NONE = Bounds(math.inf, math.inf, math.inf, 1)
_HALF = {"bfloat16": Bounds(2e-3, 3e-2, 1e-2, 2), "float16": Bounds(5e-4, 5e-3, 5e-3, 2)}


def bounds_of(dtype: str, device: torch.device | str | None = None) -> Bounds:
    """Bounds for a base of this dtype on this device (default: where training would run)."""
    if dtype in _HALF:
        return _HALF[dtype]
    if not isinstance(device, torch.device):
        device = device_named(device)
    gpu = device.type == "cuda"
    return _ON_GPU if gpu and dtype == "float32" else _WIDE


@dataclass(frozen=True, slots=True)
class JobDifference:
    """One job's largest relative differences between fused and alone.

    form       form of the fused rows: packed, or batch
    steps      optimizer steps of both, after which the job's longest and shortest samples ran
    loss       difference in any of these, over the loss alone
    gradient   norm of the difference over the norm alone, of all that the job trains, any of these
    adapter    difference of the adapter after all steps, over the norm of the adapter
    noise      difference of the job alone from itself in batches of other shapes
    kinks      steps compared with the job alone on embeddings that a rounding disturbs
    """

    job: str
    against: str
    form: str
    steps: int
    loss: float
    gradient: float
    adapter: float
    noise: Differences
    kinks: int = 0

    def within(self, bounds: Bounds) -> bool:
        """Whether the job trained as it would alone, for a base of this noise."""
        widest = bounds.over(self.noise)
        pairs = ((self.loss, widest.loss), (self.gradient, widest.gradient))
        return all(x <= y for x, y in (*pairs, (self.adapter, widest.adapter)))


def verify(
    jobs: Jobs,
    steps: int = 20,
    *,
    device: torch.device | str | None = None,
    data: Mapping[str, JobData] | None = None,
    pipeline: str | Pipeline | None = None,
) -> Iterator[JobDifference]:
    """Compare every job trained fused with the job trained alone.

    steps     optimizer steps of each job, at most its own
    pipeline  passes that fuse the jobs instead of the default; where one of them declares other
              numbers (`declared`), no step is looked into, for nothing is beyond a bound
    yields    for each way of dropout a `JobDifference` a job, as they become known
    """
    jobs = as_jobs(jobs)
    data = dict(data or load_all_data(jobs))
    for masks in (False, True):
        if not masks or _any_dropout(jobs):
            yield from _compare(jobs, data, steps, device, masks, pipeline)


def declared(pipeline: str | Pipeline | None) -> list[str]:
    """The passes that declare other numbers than the base's, such as those of a rounded base."""
    passes = resolve_pipeline(pipeline).passes
    return [item.name for item in passes if item.preserves_numerics == "no"]


def _any_dropout(jobs: list[Job]) -> bool:
    """Whether the jobs or their base drop anything."""
    if any(float(job.lora_fields.get(job.dropout_field or "") or 0) > 0 for job in jobs):
        return True
    base = jobs[0].base
    if base.module is not None:
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in base.module.modules())
    values = vars(load_config(base)).items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values)


def _compare(
    jobs: list[Job],
    data: dict[str, JobData],
    steps: int,
    device: torch.device | str | None,
    masks: bool,
    pipeline: str | Pipeline | None,
) -> Iterator[JobDifference]:
    model = compile(jobs, pipeline, dropout=masks)
    check_fits(model.backbone, data, model.group.vocabulary)
    with TemporaryDirectory() as folder:
        trainer = Trainer(model, output=Path(folder) / "run", device=device)
        trainer.prepare(data)
        for job in jobs:
            if job.adapter is not None:
                tensors = continued_adapter(model, job)
                load_adapter(model.job_parameters(job.name), tensors, str(job.adapter))
                if job.has_adapter_reference:
                    model.keep_reference(job.name)
        fused = {run.job.name: _Fused(run) for run in trainer.runs}
        _train(trainer, fused, steps)
        _run_extremes(trainer, fused)
    base = trained_base(jobs, device=trainer.device)
    for job in jobs:
        start = fused[job.name].adapters[0]
        alone = SoloTrainer(job, base, data[job.name], start, masks)
        again = SoloTrainer(job, base, data[job.name], start, masks)
        bounds = _NONE if declared(pipeline) else bounds_of(job.base.dtype, trainer.device)
        difference, noise, kinks = _follow(fused[job.name], alone, again, bounds)
        yield JobDifference(
            job.name,
            MASKED if masks else PLAIN,
            model.group.form,
            len(fused[job.name].steps),
            difference.loss,
            difference.gradient,
            difference.adapter,
            noise,
            kinks,
        )


Gradients = dict[str, Tensor]
Outcome = tuple[float, Gradients]


@dataclass(slots=True)
class _Fused:
    """What one job did in the fused run.

    steps      loss and gradients of each optimizer step, before clipping
    adapters   at the start, and after each step
    extremes   the same of micro-batches that ran after the last step and changed nothing
    """

    run: JobRun
    steps: list[Outcome] = field(default_factory=list)
    adapters: list[dict[str, Tensor]] = field(default_factory=list)
    extremes: list[tuple[list[Sample], Outcome]] = field(default_factory=list)

    def gradients(self) -> Gradients:
        """Gradients that the job's parameters have gathered."""
        return {
            saved_name(name): parameter.grad.detach().cpu().clone()
            for name, parameter in self.run.parameters.items()
            if parameter.grad is not None
        }


def _train(trainer: Trainer, fused: Mapping[str, _Fused], steps: int) -> None:
    """Let every job do its first steps."""
    for job in fused.values():
        job.adapters.append(_tensors(job.run.parameters))
    while active := [run for run in trainer.runs if run.status == "running" and run.step < steps]:
        batches = {run.index: run.batches() for run in active}
        losses = trainer.gradients(batches)
        for run in active:
            job = fused[run.job.name]
            job.steps.append((losses[run.index], job.gradients()))
        trainer.update(losses, batches)
        for run in active:
            fused[run.job.name].adapters.append(_tensors(run.parameters))


def _run_extremes(trainer: Trainer, fused: Mapping[str, _Fused]) -> None:
    """Run every job's longest and shortest samples; no adapter changes.

    The first steps may hold none of them, and a base may compute otherwise beyond some length.
    """
    healthy = [run for run in trainer.runs if run.status != "failed"]
    extremes = {
        run.index: extreme_batches(run.data, run.job.per_device_train_batch_size) for run in healthy
    }
    for number in range(max(map(len, extremes.values()), default=0)):
        batches: dict[int, MicroBatches] = {
            index: [of_job[number]] for index, of_job in extremes.items() if number < len(of_job)
        }
        losses = trainer.gradients(batches)
        for index in batches:
            job = fused[trainer.runs[index].job.name]
            outcome = losses[index], job.gradients()
            job.extremes.append((extremes[index][number], outcome))
            job.run.optimizer.zero_grad()


def extreme_batches(data: JobData, size: int) -> list[list[Sample]]:
    """Micro-batches of the longest samples, of the shortest, and of both where two fit in one.

    size   samples of each, or what batches count as one
    """
    ordered = sorted(range(data.count), key=data.lengths.__getitem__)
    size = min(size, len(ordered))
    chosen = [ordered[-size:], ordered[:size]]
    if size > 1:
        half = size // 2
        chosen.append([*ordered[-half:], *ordered[: size - half]])
    distinct = {tuple(sorted(indices)): indices for indices in chosen}
    return [
        [sample for index in indices for sample in data.unit(index)]
        for indices in distinct.values()
    ]


def _follow(
    fused: _Fused, alone: SoloTrainer, again: SoloTrainer, bounds: Bounds
) -> tuple[Differences, Differences, int]:
    """Do alone what the fused run did.

    again     does the same in batches of other shapes
    returns   how far fused lies from alone, how far the two alone lie apart, and the kinks
    """
    difference, noise, kinks = _Largest(), _Largest(), 0
    for step, batches, outcome in _steps_and_extremes(fused, alone.order):
        alone.load(fused.adapters[step])
        again.load(fused.adapters[step])
        expected = alone.gradients(batches, step)
        is_compared = alone.job.is_preference or isinstance(alone.job.loss, UserFunction)
        other = in_another_layout(batches, whole=is_compared)
        noise.add(again.gradients(other, step), expected)
        lifted_bounds = bounds.over(Differences(noise.loss, noise.gradient, 0.0))
        if not _agree(outcome, expected, lifted_bounds):
            other_side = _at_a_kink(alone, batches, step, outcome, lifted_bounds)
            kinks += other_side is not None
            expected = other_side or alone.gradients(batches, step)
        difference.add(outcome, expected)
        outcome[1].clear()
        if step < len(fused.steps):
            alone.update()
            again.update()
            trained = alone.adapters()
            difference.add_drift(fused.adapters[step + 1], trained)
            noise.add_drift(again.adapters(), trained)
    end = fused.adapters[-1]
    return difference.relative_to(end), noise.relative_to(end), kinks


def _at_a_kink(
    alone: SoloTrainer,
    batches: Sequence[Sequence[Line]],
    step: int,
    outcome: Outcome,
    bounds: Bounds,
) -> Outcome | None:
    """What the job alone does on embeddings disturbed by a rounding, where the fused run agrees."""
    for draw in range(DISTURBANCES):
        with alone.disturbed(draw):
            nearby = alone.gradients(batches, step)
        if _agree(outcome, nearby, bounds):
            return nearby
    return None


def _agree(found: Outcome, expected: Outcome, bounds: Bounds) -> bool:
    largest = _Largest()
    largest.add(found, expected)
    return largest.loss <= bounds.loss and largest.gradient <= bounds.gradient


def _steps_and_extremes(
    fused: _Fused, order: SampleOrder
) -> Iterator[tuple[int, list[list[Line]], Outcome]]:
    """The step by which dropouts draw, its batches, and what the fused run made of them."""
    for step, outcome in enumerate(fused.steps):
        yield step, order.batches(step), outcome
    for samples, outcome in fused.extremes:
        most = fused.run.job.max_length if fused.run.job.method == "kto" else None
        yield len(fused.steps), lines_of([samples], most), outcome


class _Largest:
    """The largest differences of losses and gradients, and what adapters drifted apart in all."""

    def __init__(self) -> None:
        self.loss = self.gradient = 0.0
        self.drift: dict[str, Tensor] = {}

    def add(self, found: Outcome, expected: Outcome) -> None:
        """Compare a step, or a micro-batch."""
        loss = abs(found[0] - expected[0]) / max(abs(expected[0]), 1e-12)
        self.loss = max(self.loss, math.inf if math.isnan(loss) else loss)
        self.gradient = max(self.gradient, _relative(_flat(found[1]), _flat(expected[1])))

    def add_drift(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Add by how far one step led two adapters apart that were one before it."""
        for name, tensor in expected.items():
            apart = found[name].double().cpu() - tensor.double().cpu()
            self.drift[name] = self.drift[name] + apart if name in self.drift else apart

    def relative_to(self, adapter: Mapping[str, Tensor]) -> Differences:
        """All differences, that of the adapter over its norm."""
        drifted = {name: tensor + self.drift.get(name, 0) for name, tensor in adapter.items()}
        return Differences(self.loss, self.gradient, adapter_difference(drifted, adapter))


def adapter_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two adapters over the norm of the second, all tensors together.

    Not tensor by tensor: a B that hardly got a gradient holds rounding noise, which AdamW makes as
    large as its step.
    """
    return float("inf") if mine.keys() != theirs.keys() else _relative(_flat(mine), _flat(theirs))


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double().cpu() for _, tensor in sorted(tensors.items())])


def _tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in adapter_tensors(parameters).items()}


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 0 where both are 0, infinite for NaN."""
    difference = float(torch.linalg.vector_norm(mine - theirs))
    size = float(torch.linalg.vector_norm(theirs))
    if math.isnan(difference) or math.isnan(size):
        return float("inf")
    return difference / size if size else (0.0 if difference == 0 else float("inf"))
