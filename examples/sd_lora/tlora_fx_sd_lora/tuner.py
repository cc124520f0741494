"""SD-LoRA as a PEFT tuner: what one task trains beside what earlier tasks left.

In task t a linear computes

    W x  +  sum over k < t of  alpha_k  B_k A_k x / |B_k A_k|  +  alpha_t  B_t A_t x

where |.| is the Frobenius norm. All alpha, A_t and B_t are trained. The earlier A_k and B_k are
frozen, and stored with |B_k A_k| = 1 (`tasks.next_task`). No task is named at inference.

source   Wu et al. 2025, "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental
         Learning", ICLR
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn

KIND = "SDLORA"
PREFIX = "sdlora_"


@dataclass
class SDLoRAConfig(PeftConfig):
    """What PEFT writes into `adapter_config.json`; fields as `spec.SDLoRASpec` has them."""

    r: int = 8
    target_modules: Any = None
    exclude_modules: Any = None
    modules_to_save: list[str] | None = None
    earlier_ranks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = KIND
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            setattr(self, name, set(value) if isinstance(value, list) else value)


class SDLoRALinear(nn.Module, BaseTunerLayer):
    """A frozen linear and its directions.

    sdlora_A            [r, in], of this task
    sdlora_B            [out, r]
    sdlora_magnitudes   [tasks], this task's last
    sdlora_earlier_A    [sum of the earlier ranks, in], frozen; absent in the first task
    sdlora_earlier_B    [out, sum of the earlier ranks]
    """

    adapter_layer_names = ("sdlora_A", "sdlora_B", "sdlora_magnitudes")
    other_param_names = ("sdlora_earlier_A", "sdlora_earlier_B")
    # PEFT spells A and B so.
    sdlora_A: nn.ParameterDict  # noqa: N815
    sdlora_B: nn.ParameterDict  # noqa: N815
    sdlora_magnitudes: nn.ParameterDict
    sdlora_earlier_A: nn.ParameterDict  # noqa: N815
    sdlora_earlier_B: nn.ParameterDict  # noqa: N815

    def __init__(self, base_layer: nn.Linear, adapter_name: str, config: SDLoRAConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        for name in (*self.adapter_layer_names, *self.other_param_names):
            setattr(self, name, nn.ParameterDict({}))
        self.earlier_ranks: dict[str, tuple[int, ...]] = {}
        self._disable_adapters, self.merged_adapters = False, []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: SDLoRAConfig, **_: Any) -> None:
        """Add an adapter: A is drawn as LoRA's is, B and earlier directions are zeros."""
        layer: Any = self.get_base_layer()
        ranks = self.earlier_ranks[adapter_name] = tuple(config.earlier_ranks)
        down = torch.empty(config.r, layer.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        self.sdlora_A[adapter_name] = nn.Parameter(down)
        self.sdlora_B[adapter_name] = nn.Parameter(torch.zeros(layer.out_features, config.r))
        self.sdlora_magnitudes[adapter_name] = nn.Parameter(torch.ones(len(ranks) + 1))
        if ranks:
            a = torch.zeros(sum(ranks), layer.in_features)
            self.sdlora_earlier_A[adapter_name] = nn.Parameter(a)
            b = torch.zeros(layer.out_features, sum(ranks))
            self.sdlora_earlier_B[adapter_name] = nn.Parameter(b)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        # Last: PEFT makes a trained parameter of what it moves.
        for name in self.other_param_names:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Rows of the layer's result and of all active adapters; x [..., in]."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            if name in self.sdlora_A:
                branch = self._branch(name, x.to(self.sdlora_A[name].dtype))
                result = result + branch.to(result.dtype)
        return result

    def _branch(self, name: str, x: Tensor) -> Tensor:
        magnitudes = self.sdlora_magnitudes[name]
        branch: Tensor = F.linear(F.linear(x, self.sdlora_A[name]), self.sdlora_B[name])
        branch = branch * magnitudes[-1]
        if not self.earlier_ranks[name]:
            return branch
        # Detached wherever they stand: in a shared model they are parameters like any other.
        a, b = self.sdlora_earlier_A[name].detach(), self.sdlora_earlier_B[name].detach()
        scales = spread(magnitudes, self.earlier_ranks[name])
        return branch + F.linear(F.linear(x, a) * scales, b)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What an adapter adds to the weight [out, in]."""
        magnitudes = self.sdlora_magnitudes[adapter]
        delta: Tensor = magnitudes[-1] * (self.sdlora_B[adapter] @ self.sdlora_A[adapter])
        if self.earlier_ranks[adapter]:
            scales = spread(magnitudes, self.earlier_ranks[adapter])
            delta = (
                delta + (self.sdlora_earlier_B[adapter] * scales) @ self.sdlora_earlier_A[adapter]
            )
        return delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight; with `safe_merge`, refuse what is not finite."""
        layer: Any = self.get_base_layer()
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.sdlora_A:
                weight = layer.weight.data + self.get_delta_weight(name).to(layer.weight.dtype)
                if safe_merge and not torch.isfinite(weight).all():
                    raise ValueError(f"the adapter {name} makes weights that are not finite")
                layer.weight.data = weight
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take away what `merge` added."""
        layer: Any = self.get_base_layer()
        while self.merged_adapters:
            delta = self.get_delta_weight(self.merged_adapters.pop())
            layer.weight.data -= delta.to(layer.weight.dtype)


def spread(magnitudes: Tensor, ranks: Sequence[int]) -> Tensor:
    """Each earlier task's magnitude once for each row of its direction.

    magnitudes   [tasks]
    returns      [sum of ranks]
    """
    return torch.cat([magnitudes[task].expand(rank) for task, rank in enumerate(ranks)])


class SDLoRAModel(BaseTuner):
    """PEFT's view of the kind: linears become `SDLoRALinear`."""

    prefix: str = PREFIX
    tuner_layer_cls = SDLoRALinear
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **_: Any,
    ) -> None:
        if isinstance(target, SDLoRALinear):
            target.update_layer(adapter_name, peft_config)
            return
        if not isinstance(target, nn.Linear):
            raise TypeError(
                f"SD-LoRA adapts nn.Linear, and {current_key} is {type(target).__name__}"
            )
        layer = SDLoRALinear(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)


# `peft.utils.register_peft_method` takes only names of PEFT's own enum.
_tables: tuple[Any, ...] = (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
)
for _table, _value in zip(_tables, (SDLoRAConfig, SDLoRAModel, PREFIX), strict=True):
    _table[KIND] = _value
