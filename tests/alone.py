"""One job trained by plain PEFT for some steps: what fused training is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.verification.solo import SoloTrainer


@dataclass(slots=True)
class SoloRun:
    """What a job did alone.

    losses      loss of each step: sum over its targets divided by their number
    norms       2-norm of each step's gradients, before clipping
    gradients   of each step before clipping, by the names of `adapters`
    adapters    the trained tensors after the last step, as PEFT's get_peft_model_state_dict
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)


def train_alone(
    job: Job,
    base_model: nn.Module,
    data: JobData,
    start: Mapping[str, Tensor],
    steps: int,
    masks: bool,
) -> SoloRun:
    """Train a job by itself for some steps from its start; arguments as of `SoloTrainer`."""
    solo = SoloTrainer(job, base_model, data, start, masks)
    run = SoloRun()
    for step in range(steps):
        loss, gradients = solo.gradients(solo.order.batches(step), step)
        run.norms.append(solo.update())
        run.losses.append(loss)
        run.gradients.append(gradients)
    run.adapters = solo.adapters()
    return run
