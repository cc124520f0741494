"""Modes of torch that a caller's code may be in while jobs train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from tlora_fx.errors import StepMisuse
from tlora_fx.tracing.surroundings import default_modes

P = ParamSpec("P")
R = TypeVar("R")


def in_default_modes(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that trains or draws, of an object with `mesh` or with a `step`.

    It has gradients under no_grad and inference_mode, too, and makes tensors on the CPU where the
    caller has set another default device.

    raises    StepMisuse under autocast: operators compute in the types that were traced
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        own: Any = args[0]
        kind = getattr(own, "step", own).mesh.device.type
        if torch.is_autocast_enabled(kind):
            raise StepMisuse(
                "jobs cannot run under torch.autocast",
                expected="no autocast around the call",
                found=f"autocast of '{kind}' to {torch.get_autocast_dtype(kind)}",
                help="give the base the dtype to compute in, such as dtype: bfloat16",
            )
        with default_modes(), torch.enable_grad():
            return method(*args, **kwargs)

    return run
