"""Losses with a name, and functions, of a job trained alone: written once more for `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlora_fx.config.functions import UserFunction, callable_of
from tlora_fx.config.job import Job
from tlora_fx.config.losses import LOSSES
from tlora_fx.runtime.data.sample_order import NO_TARGET, Line


def summed_losses(job: Job, lines: Sequence[Line], token_losses: Tensor) -> Tensor:
    """The sum of a micro-batch's losses.

    lines          its sequences; those without targets count for nothing
    token_losses   [B, S - 1], of each token but the first
    """
    logprobs, said = [], []
    for line, losses in zip(lines, token_losses, strict=True):
        places = [at for at, label in enumerate(line.labels) if at and label != NO_TARGET]
        if not places:
            continue
        logprobs.append(-losses[[at - 1 for at in places]])
        numbers = {"weights": [1.0] * len(line.ids), **line.numbers}
        said.append(
            {
                name: logprobs[-1].new_tensor([values[at] for at in places])
                for name, values in numbers.items()
            }
        )
    loss = job.named_loss
    if isinstance(loss, UserFunction):
        found = callable_of(loss, "loss", job.name)(logprobs, said)
        total: Tensor = found[0] if isinstance(found, tuple) else found
        return total.reshape(())
    assert loss is not None
    options = {**LOSSES[loss], **job.loss_options}
    pairs = zip(logprobs, said, strict=True)
    return torch.stack([_sequence_loss(loss, options, *pair) for pair in pairs]).sum()


def _sequence_loss(
    loss: str, options: Mapping[str, float], logprobs: Tensor, said: Mapping[str, Tensor]
) -> Tensor:
    """The sum of a sequence's token losses, by the table of docs/group-step.md."""
    old, gains = said["logprobs"], said["advantages"]
    ratio = torch.exp(logprobs - old)
    if loss == "gspo":
        level = torch.exp((logprobs - old).mean().detach())
        ratio = level * torch.exp(logprobs - logprobs.detach())
    if loss == "importance_sampling":
        each = ratio * gains
    elif loss == "dro":
        each = gains * logprobs - options["beta"] / 2 * (logprobs - old) ** 2
    else:
        clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
        each = torch.minimum(ratio * gains, clipped * gains)
        if loss == "cispo":
            each = clipped.detach() * gains * logprobs
    return -(said["weights"] * each).sum()
