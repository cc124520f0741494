"""The operators of fused graphs, as `torch.ops.tlora_fx.*`: importing this registers them."""

from tlora_fx.ops import compile_caches as _compile_caches
from tlora_fx.ops import flops as _flops  # noqa: F401  (registers the formulas)
from tlora_fx.ops.attention import packed_attention, packed_attention_backward
from tlora_fx.ops.keyed_dropout import keyed_dropout
from tlora_fx.ops.multi_lora_add import multi_lora_add
from tlora_fx.ops.multi_lora_linear import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.nano_batches import nano_join, nano_split, nano_tables
from tlora_fx.ops.philox import (
    keep_mask,
    keep_scale,
    random_uniform,
    site_id,
    token_scale,
    uniform_at,
)
from tlora_fx.ops.quantized import quantized_linear, quantized_linear_backward
from tlora_fx.ops.segment_sums import segment_spread, segment_sum
from tlora_fx.ops.segments import segment_read, segment_switch, segment_write
from tlora_fx.ops.tensor_groups import forget_groups, use_group
from tlora_fx.ops.tensor_parallel import tp_copy, tp_cross_entropy, tp_reduce

__all__ = [
    "forget_groups",
    "keep_mask",
    "keep_scale",
    "keyed_dropout",
    "multi_lora_add",
    "multi_lora_linear",
    "multi_lora_linears",
    "nano_join",
    "nano_split",
    "nano_tables",
    "packed_attention",
    "packed_attention_backward",
    "quantized_linear",
    "quantized_linear_backward",
    "random_uniform",
    "segment_read",
    "segment_spread",
    "segment_sum",
    "segment_switch",
    "segment_write",
    "site_id",
    "token_scale",
    "tp_copy",
    "tp_cross_entropy",
    "tp_reduce",
    "uniform_at",
    "use_group",
]

_compile_caches.mark_compile_caches()
