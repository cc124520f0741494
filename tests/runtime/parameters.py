"""A job, and parameters as the super-model makes them: views of storage that others share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tlora_fx.config.job import BaseSpec, DataSpec, Job


def job_with(**fields: Any) -> Job:
    """A job whose learning rate is high enough for every step to change much."""
    given: dict[str, Any] = {"learning_rate": 0.05, "weight_decay": 0.01, "max_grad_norm": 0.7}
    return Job(
        name="job",
        base=BaseSpec(model="base"),
        data=DataSpec(path="data.jsonl"),
        **{"lora": {"r": 2, "target_modules": ["q"]}} | given | fields,
    )


def params_of(bank: torch.Tensor) -> dict[str, nn.Parameter]:
    """Three parameters as the super-model makes them: views of one storage, gradients too."""
    grads = torch.zeros_like(bank)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a.lora_A.weight": lambda x: x[1:3],
        "a.lora_B.weight": lambda x: x[3:6].t(),
        "a.lora_magnitude_vector": lambda x: x[6, 1:5] if x.shape[1] < 8 else x[6, 8:],
        "a.never_used": lambda x: x[7],
    }
    params = {}
    for name, view in views.items():
        params[name] = nn.Parameter(view(bank))
        if name != "a.never_used":
            params[name].grad = view(grads)
    return params


def start(
    dtype: torch.dtype = torch.float32, device: str = "cpu", width: int = 5
) -> dict[str, nn.Parameter]:
    """The same parameters on each call; width of A's rows."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(8, width, generator=generator, dtype=torch.float64)
    return params_of(drawn.to(device, dtype))
