"""The operators of fused graphs, as `torch.ops.tlora_fx.*`: importing this registers them."""

from tlora_fx.ops import flops as _flops  # noqa: F401  (registers the formulas)
from tlora_fx.ops.attention import packed_attention, packed_attention_backward
from tlora_fx.ops.cross_entropy import cross_entropy, cross_entropy_backward
from tlora_fx.ops.dora import dora_scale, norms_kept
from tlora_fx.ops.dropout import keep_mask, keep_scale, keyed_dropout
from tlora_fx.ops.expert_lora import multi_lora_experts
from tlora_fx.ops.experts import expert_linear, expert_outer
from tlora_fx.ops.float8 import float8_input_gradient, float8_linear, float8_rows
from tlora_fx.ops.gated import multi_lora_gated_linear
from tlora_fx.ops.job_operator import JobOperator, register_operator
from tlora_fx.ops.lora import multi_lora_add, multi_lora_linear, multi_lora_linears
from tlora_fx.ops.noise import embedding_noise
from tlora_fx.ops.parallel import (
    nano_join,
    nano_split,
    nano_tables,
    tp_argmax,
    tp_copy,
    tp_cross_entropy,
    tp_reduce,
    use_group,
)
from tlora_fx.ops.philox import uniform_at, uniform_rows
from tlora_fx.ops.quantized import quantized_linear, quantized_linear_backward
from tlora_fx.ops.segments import (
    segment_read,
    segment_spread,
    segment_sum,
    segment_switch,
    segment_write,
    sequence_conv1d,
    sequence_cumsum,
)
from tlora_fx.ops.tables import site_id, token_bounds, without_dropout
from tlora_fx.ops.torch_compile import mark_compile_caches

__all__ = [
    "JobOperator",
    "cross_entropy",
    "cross_entropy_backward",
    "dora_scale",
    "embedding_noise",
    "expert_linear",
    "expert_outer",
    "float8_input_gradient",
    "float8_linear",
    "float8_rows",
    "keep_mask",
    "keep_scale",
    "keyed_dropout",
    "multi_lora_add",
    "multi_lora_experts",
    "multi_lora_gated_linear",
    "multi_lora_linear",
    "multi_lora_linears",
    "nano_join",
    "nano_split",
    "nano_tables",
    "norms_kept",
    "packed_attention",
    "packed_attention_backward",
    "quantized_linear",
    "quantized_linear_backward",
    "register_operator",
    "segment_read",
    "segment_spread",
    "segment_sum",
    "segment_switch",
    "segment_write",
    "sequence_conv1d",
    "sequence_cumsum",
    "site_id",
    "token_bounds",
    "tp_argmax",
    "tp_copy",
    "tp_cross_entropy",
    "tp_reduce",
    "uniform_at",
    "uniform_rows",
    "use_group",
    "without_dropout",
]

mark_compile_caches()
