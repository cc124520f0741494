"""The ablation without our scheduler: mLoRA's batching with our kernels.

source   "tLoRA w/o Scheduler" of tLoRA, section 4.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.scheduler.policies.mlora_fifo import MloraFifo


@dataclass(slots=True)
class NoScheduler(MloraFifo):
    """mLoRA's groups, run by fused kernels."""

    name: ClassVar[str] = "no-scheduler"
    fused: ClassVar[bool] = True
