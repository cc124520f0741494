"""Show that jobs trained together train as each would alone.

Each job is trained alone by plain transformers, PEFT and torch.optim (oracle.py), and with all
others in the Shared Super-Model, from the same adapters and on the same data. Twice: with every
dropout at 0 against PEFT as it is, and with dropout against PEFT whose dropouts draw the job's
keyed masks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.compiler import Jobs, as_jobs, compile
from tlora_fx.config.job import Job
from tlora_fx.model.backbone import Backbone, load_config
from tlora_fx.runtime.adapter_files import read_adapter
from tlora_fx.runtime.adapters import adapter_tensors, load_adapter, saved_name
from tlora_fx.runtime.checks import check_fits, load_all_data
from tlora_fx.runtime.data import JobData
from tlora_fx.runtime.devices import device_named
from tlora_fx.runtime.oracle import train_alone
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.weights import base_tensors, canonical_names

PLAIN = "plain PEFT, dropout 0"
MASKED = "PEFT with the job's keyed masks"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative difference that passes."""

    loss: float
    gradient: float
    adapter: float


# In float32 and wider transformers' float32 loss sets the floor. On a GPU sums run in another order
# in each GEMM, which AdamW's first steps make larger. In half precision PEFT multiplies adapters in
# float32 and we in the base's dtype, unless adapter_compute is float32.
_WIDE = Bounds(2e-6, 2e-5, 1e-5)
_ON_GPU = Bounds(2e-6, 1e-4, 1e-4)
_HALF = {"bfloat16": Bounds(2e-3, 3e-2, 1e-2), "float16": Bounds(5e-4, 5e-3, 5e-3)}


def bounds_of(dtype: str, device: torch.device | str | None = None) -> Bounds:
    """What passes for a base of this dtype on this device (default: where training would run)."""
    if dtype in _HALF:
        return _HALF[dtype]
    known = device if isinstance(device, torch.device) else device_named(device)
    gpu = known.type == "cuda"
    return _ON_GPU if gpu and dtype == "float32" else _WIDE


@dataclass(frozen=True, slots=True)
class Difference:
    """One job's largest relative differences between fused and alone, over all steps.

    loss       of any step, over the loss alone
    gradient   norm of the difference over the norm alone, of all that the job trains, any step
    adapter    of the adapter after the last step, see `adapter_difference`
    """

    job: str
    against: str
    steps: int
    loss: float
    gradient: float
    adapter: float

    def within(self, bounds: Bounds) -> bool:
        """Whether the job trained as it would alone."""
        pairs = ((self.loss, bounds.loss), (self.gradient, bounds.gradient))
        return all(x <= y for x, y in (*pairs, (self.adapter, bounds.adapter)))


def verify(
    jobs: Jobs,
    steps: int = 20,
    *,
    device: torch.device | str | None = None,
    data: Mapping[str, JobData] | None = None,
) -> Iterator[Difference]:
    """Compare every job trained fused with the job trained alone.

    steps     optimizer steps of each job, at most its own
    yields    for each way of dropout a `Difference` a job, as they become known
    """
    given = as_jobs(jobs)
    samples = dict(data or load_all_data(given))
    for masks in (False, True):
        if masks and not _any_dropout(given):
            continue
        yield from _compare(given, samples, steps, device, masks)


def _any_dropout(jobs: list[Job]) -> bool:
    """Whether the jobs or their base drop anything."""
    if any(float(job.lora_config().lora_dropout or 0) > 0 for job in jobs):
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
) -> Iterator[Difference]:
    model = compile(jobs, dropout=masks)
    check_fits(model.backbone, data)
    with TemporaryDirectory() as folder:
        trainer = Trainer(model, output=Path(folder) / "run", device=device)
        trainer.prepare(data)
        for job in jobs:
            if job.adapter is not None:
                tensors = read_adapter(job.adapter).tensors
                load_adapter(model.job_parameters(job.name), tensors, str(job.adapter))
        start = {job.name: _tensors(model.job_parameters(job.name)) for job in jobs}
        fused = _train_fused(trainer, steps)
        after = {job.name: _tensors(model.job_parameters(job.name)) for job in jobs}
    base = plain_base(model.backbone).to(trainer.device)
    for job in jobs:
        own = fused[job.name]
        watch = _Watch(own)
        solo = train_alone(
            job, base, data[job.name], start[job.name], len(own.losses), masks, watch
        )
        yield Difference(
            job.name,
            MASKED if masks else PLAIN,
            len(own.losses),
            watch.loss,
            watch.gradient,
            adapter_difference(after[job.name], solo.adapters),
        )


@dataclass(slots=True)
class _Fused:
    """One job's steps in the fused run; gradients before clipping."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def _train_fused(trainer: Trainer, steps: int) -> dict[str, _Fused]:
    told = {run.job.name: _Fused([], []) for run in trainer.runs}
    while active := [run for run in trainer.runs if run.status == "running" and run.step < steps]:
        batches = {run.index: run.batches() for run in active}
        losses = trainer.gradients(batches)
        for run in active:
            own = told[run.job.name]
            own.losses.append(losses[run.index])
            own.gradients.append(
                {
                    saved_name(name): parameter.grad.detach().cpu().clone()
                    for name, parameter in run.parameters.items()
                    if parameter.grad is not None
                }
            )
            run.finish_step(losses[run.index], batches[run.index], 0.0)
    return told


class _Watch:
    """Compares the solo run with the fused one, step by step, and lets go of its gradients."""

    def __init__(self, fused: _Fused) -> None:
        self.fused = fused
        self.loss = self.gradient = 0.0

    def __call__(self, step: int, loss: float, gradients: dict[str, Tensor]) -> None:
        mine = self.fused.losses[step]
        self.loss = max(self.loss, abs(mine - loss) / max(abs(loss), 1e-12))
        own = self.fused.gradients[step]
        self.gradient = max(self.gradient, _relative(_flat(own), _flat(gradients)))
        self.fused.gradients[step] = {}


def adapter_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two adapters over the norm of the second, all tensors together.

    Not tensor by tensor: a B that hardly got a gradient holds rounding noise, which AdamW makes as
    large as its step.
    """
    if mine.keys() != theirs.keys():
        return float("inf")
    return _relative(_flat(mine), _flat(theirs))


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double().cpu() for _, tensor in sorted(tensors.items())])


def plain_base(backbone: Backbone) -> nn.Module:
    """The base as plain transformers builds it, with the weights that the fused model has."""
    spec = backbone.spec
    if spec.module is not None:
        given: nn.Module = copy.deepcopy(spec.module)
        return given
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM

    dtype = getattr(torch, spec.dtype)
    if spec.model is not None:
        loaded: nn.Module = factory.from_pretrained(
            spec.model, dtype=dtype, use_safetensors=True, trust_remote_code=spec.trust_remote_code
        )
        return loaded
    model: nn.Module = factory.from_config(
        load_config(spec), dtype=dtype, trust_remote_code=spec.trust_remote_code
    )
    canonical = canonical_names(backbone)
    drawn = base_tensors(backbone)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn[canonical[name]])
    return model


def _tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in adapter_tensors(parameters).items()}


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 0 where both are 0, infinite for NaN."""
    difference = float(torch.linalg.vector_norm(mine - theirs))
    size = float(torch.linalg.vector_norm(theirs))
    if math.isnan(difference) or math.isnan(size):
        return float("inf")
    return difference / size if size else (0.0 if difference == 0 else float("inf"))
