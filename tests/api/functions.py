"""Optimizers, schedulers and metrics of a user's own, as tests hand them over."""

from __future__ import annotations

import numpy as np
import torch


class SignDescent(torch.optim.Optimizer):
    """Moves by the sign of a running mean, and counts its steps in its group."""

    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.mul_(group["decay"]).add_(param.grad, alpha=1 - group["decay"])
                # Some optimizers replace what they are given.
                param.data = param - group["lr"] / group["count"] * mean.sign()


def momentum(params, lr, **options):
    """A factory."""
    return torch.optim.SGD(params, lr=lr, **options)


def halving(optimizer):
    """A factory of a scheduler."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def linear(optimizer, num_warmup_steps, num_training_steps):
    """What a job file calls linear, with the parameters of transformers' functions."""

    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        left = num_training_steps - step
        return max(0.0, left / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def accuracy(prediction):
    """The share of targets that are predicted, from transformers' EvalPrediction."""
    labels = prediction.label_ids[:, 1:]
    is_target = labels != -100
    return {"mine": float(np.mean((prediction.predictions[:, :-1] == labels)[is_target]))}


def rewarded(logprobs, inputs):
    """A loss that mixes the tokens of a sequence, and the sequences of a micro-batch."""
    said = zip(logprobs, inputs, strict=True)
    rewards = torch.stack([of["reward"][0] for of in inputs])
    gains = torch.stack([(own * of["scale"]).sum() for own, of in said])
    spread = torch.stack([own.var(correction=0) for own in logprobs])
    loss = -((rewards - rewards.mean()) * gains).sum() + spread.sum()
    return loss, {"reward": rewards.mean(), "sequences": len(logprobs)}
