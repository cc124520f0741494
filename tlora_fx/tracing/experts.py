"""Mixtures of experts as two operators, put into models through transformers' ExpertsInterface.

What a model's own code does with a token for each expert by its number (`one_hot`, `nonzero`, a
loop over the experts that were hit) cannot be traced. Routing stays the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IMPLEMENTATION = "tlora_fx"


def use_expert_products(model: nn.Module) -> None:
    """Let a throw-away copy of a base call `routed` in place of its experts' forward."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, routed)
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = IMPLEMENTATION


def routed(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls in place of a mixture's experts.

    module    holds their matrices and how these lie
    hidden    [T, H]
    index     [T, K], the experts of each token
    weights   [T, K], what each of them counts
    returns   [T, H]
    """
    x = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden, index)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _product(module, "down_proj", x, index)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return (x * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _product(module: Any, name: str, x: Tensor, index: Tensor) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    weight = getattr(module, name)
    product: Tensor = torch.ops.tlora_fx.expert_linear(x, weight, bias, index, module.is_transposed)
    return product
