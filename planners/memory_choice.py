"""What fits into a device's memory: keep gathered weights, keep activations, or neither.

A bound by counting, without a measurement: all values of a layer's graph with a token dimension
are taken as kept.
"""

from __future__ import annotations

import torch

from tlora_fx.ir.graph import Block
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes.lower_loss import HEAD

# What the allocator, libraries and what is not counted here may take.
USABLE = 0.85


def choose(
    model: SuperModel, replicas: int, memory_bytes: int | None, row_tokens: int
) -> tuple[bool, bool]:
    """Whether gathered weights are kept, and whether layers are computed again.

    memory_bytes   of one device; None for unknown
    row_tokens     of the longest row
    """
    if memory_bytes is None:
        return False, False
    usable = USABLE * memory_bytes - trained_bytes(model)
    base, activations = base_bytes(model), activation_bytes(model, row_tokens)
    if base + activations <= usable:
        return True, False
    return False, base / replicas + activations > usable


def base_bytes(model: SuperModel) -> int:
    """The frozen base, as it is stored."""
    parameters = model.net.parameters()
    return sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)


def trained_bytes(model: SuperModel) -> int:
    """Adapters with gradients and two moments of AdamW."""
    trained = [p for p in model.net.parameters() if p.requires_grad]
    return sum(4 * p.numel() * p.element_size() for p in trained)


def activation_bytes(model: SuperModel, row_tokens: int) -> int:
    """What all layers together keep of one row, at most."""
    blocks = [block for block in model.group.blocks.values() if block.name != HEAD]
    return sum(len(block.instances) * _kept_bytes(block, row_tokens) for block in blocks)


def _kept_bytes(block: Block, row_tokens: int) -> int:
    values = [node.meta.get("val") for node in block.graph.nodes if node.op == "call_function"]
    kept = 0
    for value in values:
        if isinstance(value, torch.Tensor) and any(_is_token(size) for size in value.shape):
            sizes = (row_tokens if _is_token(size) else int(size) for size in value.shape)
            numel = 1
            for size in sizes:
                numel *= size
            kept += numel * value.element_size()
    return kept


def _is_token(size: object) -> bool:
    return isinstance(size, torch.SymInt)
