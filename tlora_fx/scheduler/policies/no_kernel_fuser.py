"""The ablation without our kernels: the default policy over unfused adapters.

The policy is the same; an estimator made with `fused=False` belongs to it.

source   "tLoRA w/o Kernel Fuser" of tLoRA, section 4.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.scheduler.policies.tlora import Tlora


@dataclass(slots=True)
class NoKernelFuser(Tlora):
    """The default policy, told of unfused kernels."""

    name: ClassVar[str] = "no-kernel-fuser"
    fused: ClassVar[bool] = False
