"""Which fields a job of `peft_type: SDLORA` may name. Neither torch nor PEFT is imported."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tlora_fx.config.fields import Names, Rank
from tlora_fx.config.other_kinds import OtherKind


class SDLoRASpec(OtherKind):
    """SD-LoRA: the directions of earlier tasks are frozen, the magnitudes of all are trained.

    r               rank of this task's direction
    earlier_ranks   those of the tasks before it, the first one first; `next_task` writes them
    """

    tuner: ClassVar[str] = "tlora_fx_sd_lora.tuner"
    vectors: ClassVar[bool] = True
    frozen: ClassVar[tuple[str, ...]] = (".sdlora_earlier_",)

    exclude_modules: Names = None
    r: Rank = 8
    earlier_ranks: list[Rank] = Field(default=[])
