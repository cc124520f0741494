"""What a trainer of clients' models is made of; without torch, for who starts one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tlora_fx.config.base_spec import BaseSpec, DtypeName
from tlora_fx.host.environment import wants_strict_kernels
from tlora_fx.training.small_base import NAME, write_small_base


def settle_products() -> None:
    """In strict mode, let MKL round alike wherever its operands lie in memory.

    To be called in a process of its own, before torch computes anything.

    source   oneMKL Developer Guide, Obtaining Numerically Reproducible Results
    """
    if wants_strict_kernels():
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a trainer of clients' models is made.

    folder      of the log, the small base, and versions
    base        hub id or folder; None: the small base
    dtype       of the base; None: float32 on the CPU, else bfloat16
    residents   models and versions that lie in the banks at a time
    max_rank    of a model at most, a multiple of 8
    """

    folder: Path
    base: str | None = None
    device: str = "cpu"
    dtype: DtypeName | None = None
    residents: int = 8
    max_rank: int = 64

    @property
    def base_name(self) -> str:
        """The base's name, as clients give it."""
        return self.base or NAME

    @property
    def tokenizer(self) -> str:
        """What clients load the tokenizer from."""
        return self.base or str(self._small_folder)

    @property
    def _small_folder(self) -> Path:
        return self.folder.absolute() / "base"

    def spec(self) -> BaseSpec:
        """The base."""
        dtype: DtypeName = self.dtype or ("float32" if self.device == "cpu" else "bfloat16")
        if self.base is None:
            return BaseSpec(config=write_small_base(self._small_folder), dtype=dtype)
        return BaseSpec(model=self.base, dtype=dtype)
