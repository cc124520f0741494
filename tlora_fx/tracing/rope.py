"""Rotary embeddings whose frequencies depend on the whole row.

longrope takes its long frequencies when any position of the batch is beyond the original length.
A job's neighbours must not switch it, so both sets are computed and each job's segment takes the
one that the job alone would take. Dynamic NTK keeps state between steps and is refused.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.errors import BaseRefused
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.attention import current_row

LONG = "tlora_long_inv_freq"


def prepare_rope(backbone: Backbone) -> None:
    """Make every longrope module of a base run per job segment.

    raises    BaseRefused for dynamic NTK and for longrope per layer type
    """
    for path, module in backbone.model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
        if any("dynamic" in str(kind) for kind in kinds):
            raise BaseRefused(
                "the base scales its rotary embedding with dynamic NTK",
                module=path,
                found="frequencies that depend on the longest sequence ever seen",
                help="use a base with default, linear, yarn, llama3 or longrope scaling",
            )
        if "longrope" in kinds and isinstance(rope_type, dict):
            raise BaseRefused(
                "the base uses longrope for some of its layer types only",
                module=path,
                help="use a base with one rotary embedding",
            )
        if rope_type == "longrope":
            _split(backbone, path, module)


def _split(backbone: Backbone, path: str, module: nn.Module) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    limit = original_length(config)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=limit + 1)
    twin = long.to("meta")
    module.register_buffer(LONG, twin, persistent=False)
    backbone.names[id(twin)] = f"{path}.{LONG}"
    backbone.values[f"{path}.{LONG}"] = long
    raw = inspect.unwrap(type(module).forward)

    def forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            short = raw(self, x, position_ids)
            kept = self._buffers["inv_freq"]
            self._buffers["inv_freq"] = self._buffers[LONG]
            try:
                stretched = raw(self, x, position_ids)
            finally:
                self._buffers["inv_freq"] = kept
            segments = current_row()["segments"]
            switch = torch.ops.tlora_fx.segment_switch
            return tuple(
                switch(s, t, position_ids, segments, limit)
                for s, t in zip(short, stretched, strict=True)
            )

    module.forward = types.MethodType(forward, module)


def has_longrope(model: nn.Module) -> bool:
    """Whether a base's rotary frequencies depend on the longest sequence of a batch."""
    return any(getattr(module, "rope_type", None) == "longrope" for module in model.modules())


def original_length(config: Any) -> int:
    """The longest sequence that takes a longrope base's short frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    length = parameters.get("original_max_position_embeddings")
    return int(length or config.original_max_position_embeddings)
