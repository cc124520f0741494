"""Seeded tensors by canonical name: the same values in every state of the graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tlora_fx.model.backbone import Backbone
from tlora_fx.ops import site_id

# A tensor repeats this many random numbers; a prime, so that no two near rows are equal.
PERIOD = 1_048_573
NOISE = 0.1
# Half of what keeps values at their size: attention stays even, so that rounding stays small.
SPREAD = 0.5


class Unchecked(Exception):
    """Reason why a pass cannot be checked here; never the pass's fault."""


def buffers_of(backbone: Backbone) -> dict[str, Tensor]:
    """The base's buffers by canonical name, such as rotary frequencies."""
    names = {backbone.names.get(id(buffer)) for buffer in backbone.model.buffers()}
    return {name: value for name, value in backbone.values.items() if name in names}


def band_of(width: int) -> int:
    """The middle of the widths, from a power of four up to the next, that share one memory."""
    return int(2 * 4 ** ((width.bit_length() - 1) // 2))


class Seeded:
    """Weights of the base and of jobs, drawn by name and kept until `clear`.

    buffers   the base's buffers by canonical name, which are taken as they are
    """

    def __init__(self, seed: int, buffers: Mapping[str, Tensor]) -> None:
        self.seed = seed
        self.buffers = buffers
        self._base: dict[str, Tensor] = {}
        # By band of widths and dtype, what large matrices are cut out of.
        self._cloth: dict[tuple[int, torch.dtype], Tensor] = {}
        # By band, numbers of the largest matrix to come, where that is known.
        self._largest: dict[int, int] = {}
        self._own: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def base(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the base; raises Unchecked for integers that no buffer gives."""
        if name in self.buffers:
            return self.buffers[name].detach().to("cpu", dtype)
        if name not in self._base:
            if not dtype.is_floating_point:
                raise Unchecked(f"the base's {name} holds integers whose values are not known")
            self._base[name] = self._drawn_or_cut(f"base {name}", shape, dtype)
        return self._base[name]

    def own(self, job: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that a job trains, as a leaf that takes gradients."""
        key = (job, name, shape)
        if key not in self._own:
            drawn = self._draw(f"job {job} {name}", shape, dtype)
            self._own[key] = drawn.requires_grad_(dtype.is_floating_point)
        return self._own[key]

    def clear(self) -> None:
        """Free all memory."""
        self._base.clear()
        self._cloth.clear()
        self._own.clear()

    def _drawn_or_cut(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor; large matrices of about one width share their memory, shifted by name."""
        if math.prod(shape) <= PERIOD or len(shape) < 2:
            return self._draw(name, shape, dtype)
        return self._cut(name, shape, dtype)

    def _cut(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A matrix out of the memory that its band of widths shares."""
        count, width = math.prod(shape), band_of(shape[-1])
        cloth = self._cloth.get((width, dtype))
        if cloth is None or len(cloth) < count + PERIOD:
            rows = -(-(max(count, self._largest.get(width, 0)) + PERIOD) // width)
            cloth = self._draw(f"base of {width}", (rows, width), dtype).flatten()
            self._cloth[width, dtype] = cloth
        start = site_id(f"{self.seed} {name}") % PERIOD
        return cloth[start : start + count].view(shape)

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Matrices that keep the size of what they multiply, vectors around 0 (biases) or 1."""
        generator = torch.Generator().manual_seed(site_id(f"{self.seed} {name}"))
        count = math.prod(shape)
        drawn = torch.randn(min(count, PERIOD), generator=generator)
        if len(shape) > 1:
            drawn *= SPREAD * shape[-1] ** -0.5
        else:
            drawn = drawn * NOISE + (0.0 if name.endswith("bias") else 1.0)
        pool = drawn.to(dtype)
        tensor = torch.empty(count, dtype=dtype)
        for start in range(0, count, PERIOD):
            tensor[start : start + PERIOD] = pool[: count - start]
        return tensor.view(shape)
