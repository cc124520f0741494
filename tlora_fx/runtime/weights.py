"""The base's weights: loaded by transformers, drawn at random, or taken from a given module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import BaseNotLoadable
from tlora_fx.model.backbone import Backbone
from tlora_fx.ops import site_id, uniform_at

PIECE = 1 << 22


def base_tensors(backbone: Backbone, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
    """All tensors of a base by canonical name; random ones are drawn when they are asked for.

    device    where random weights are drawn; what is loaded stays on the CPU
    raises    BaseNotLoadable when the checkpoint cannot be read
    """
    spec = backbone.spec
    if spec.module is not None:
        return dict(backbone.values)
    if spec.model is not None:
        return {**backbone.values, **_loaded(backbone)}
    return _Drawn(backbone, device)


def _loaded(backbone: Backbone) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    spec = backbone.spec
    try:
        factory: Any = AutoModelForCausalLM
        model, info = factory.from_pretrained(
            str(spec.model),
            output_loading_info=True,
            dtype=getattr(torch, spec.dtype),
            use_safetensors=True,
            trust_remote_code=spec.trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BaseNotLoadable(
            "the base's weights cannot be loaded",
            base=spec.model,
            found=error,
            help="give a folder or hub id with *.safetensors; pickled weights are not read",
        ) from error
    missing = sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])})
    if missing:
        raise BaseNotLoadable(
            "the base's checkpoint lacks tensors, or has them in other shapes",
            base=spec.model,
            found=", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else ""),
            help="give the checkpoint that belongs to the config; nothing is drawn in its place",
        )
    canonical = canonical_names(backbone)
    found = model.state_dict()
    return {canonical[name]: tensor for name, tensor in found.items() if name in canonical}


def canonical_names(backbone: Backbone) -> Mapping[str, str]:
    """Every name of a base's parameters and buffers, ties included, to the canonical one."""
    model = backbone.model
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: backbone.names[id(tensor)] for name, tensor in named}


class _Drawn(Mapping[str, Tensor]):
    """Random matrices, a function of seed, name and index only, so any sharding draws the same.

    Uniform with the standard deviation of the config's initializer_range; vectors start as the
    model's own code starts them. A matrix is drawn when it is asked for, each time anew.
    """

    def __init__(self, backbone: Backbone, device: torch.device | str) -> None:
        self._parameters = dict(backbone.model.named_parameters())
        self._values, self._device = backbone.values, device
        self._seed = backbone.spec.seed
        self._deviation = getattr(backbone.config, "initializer_range", None) or 0.02

    def __getitem__(self, name: str) -> Tensor:
        if name in self._values:
            return self._values[name]
        like = self._parameters[name]
        return draw(like, self._deviation, self._seed, name, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._parameters), **dict.fromkeys(self._values)})

    def __len__(self) -> int:
        return len({*self._parameters, *self._values})


def draw(
    like: Tensor, deviation: float, seed: int, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """Uniform random numbers of mean 0, equal on every device.

    like         shape and dtype of the result
    deviation    standard deviation
    seed, name   key, in [0, 2**32), and what tells tensors of one key apart
    """
    flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
    width = 2 * math.sqrt(3) * deviation
    for start in range(0, like.numel(), PIECE):
        index = torch.arange(start, min(start + PIECE, like.numel()), device=device)
        flat[start : start + PIECE] = (uniform_at(index, (seed, site_id(name))) - 0.5) * width
    return flat.view(like.shape)
