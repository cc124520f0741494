"""From one task to the next: what was learned becomes a frozen direction of norm 1."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from tlora_fx.runtime.adapters.files import draw, read_adapter, write_adapter
from tlora_fx_sd_lora.tuner import SDLoRAConfig


def next_task(
    adapter: Path | str, folder: Path | str, *, r: int | None = None, seed: int = 0
) -> Path:
    """Write the adapter from which the next task starts.

    It computes what `adapter` does: alpha_t becomes alpha_t |B_t A_t|, and the new B is zeros. A
    job continues it by `adapter: FOLDER`.

    adapter   folder of a finished task
    folder    to write
    r         rank of the new direction; by default the last one's
    seed      of the new A
    returns   folder
    raises    AdapterFolderError when `adapter` cannot be read, or the disk refuses
    """
    tensors = read_adapter(adapter).tensors
    config: SDLoRAConfig = SDLoRAConfig.from_pretrained(str(adapter))
    ranks = [*config.earlier_ranks, config.r]
    config.earlier_ranks, config.r = ranks, r or config.r
    for name in [name for name in tensors if name.endswith(".sdlora_A")]:
        site = name.removesuffix("A")
        mine = {key: value for key, value in tensors.items() if key.startswith(site)}
        tensors |= _extended(site, mine, config.r, seed + len(ranks))
    write_adapter(folder, tensors, config)
    return Path(folder)


def _extended(site: str, tensors: dict[str, Tensor], r: int, seed: int) -> dict[str, Tensor]:
    """The tensors of one linear, with its last direction among the earlier ones."""
    a, b, magnitudes = (tensors[site + part] for part in ("A", "B", "magnitudes"))
    norm = direction_norm(a, b)
    # Where nothing was learned there is no direction: zeros stay zeros.
    unit = b / torch.where(norm > 0, norm, torch.ones_like(norm))
    earlier_a, earlier_b = tensors.get(site + "earlier_A"), tensors.get(site + "earlier_B")
    reached = torch.cat([magnitudes[:-1], (magnitudes[-1] * norm).view(1)])
    fresh = draw(a.new_empty(r, a.shape[1]), 1 / math.sqrt(3 * a.shape[1]), seed, site)
    return {
        site + "A": fresh,
        site + "B": b.new_zeros(b.shape[0], r),
        site + "magnitudes": torch.cat([reached, magnitudes.new_ones(1)]),
        site + "earlier_A": a if earlier_a is None else torch.cat([earlier_a, a]),
        site + "earlier_B": unit if earlier_b is None else torch.cat([earlier_b, unit], dim=1),
    }


def direction_norm(a: Tensor, b: Tensor) -> Tensor:
    """The Frobenius norm of B A, computed in float64 from products of the rank's size.

    a         [r, in]
    b         [out, r]
    returns   a scalar in the dtype of b
    """
    wide_a, wide_b = a.double(), b.double()
    square = ((wide_a @ wide_a.T) * (wide_b.T @ wide_b)).sum()
    return square.clamp_min(0).sqrt().to(b.dtype)
