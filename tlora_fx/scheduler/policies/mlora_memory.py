"""mLoRA's batching by memory: jobs join in the order of their arrival while memory lasts.

source   tLoRA, section 4.1: "grouping jobs as long as memory capacity permits"
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from tlora_fx.scheduler.policies.mlora_fifo import MloraFifo


@dataclass(slots=True)
class MloraMemory(MloraFifo):
    """Fill groups until nothing more fits into memory."""

    name: ClassVar[str] = "mlora-memory"

    cap: float = inf
