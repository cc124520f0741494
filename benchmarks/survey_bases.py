"""A small base of each causal language model that transformers has, by rules for fields' names.

A config's own defaults are shrunk, and those of the configs within it. What a family needs besides
stands in EXCEPTIONS.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tlora_fx.tracing.experts import RouterWeight

LAYERS, WIDTH, HEADS, HEAD, WINDOW, VOCABULARY = 4, 32, 4, 8, 8, 61
#: Models of images and text that have no causal class; they train on text alone.
ON_TEXT = ("llava", "qwen2_5_vl", "qwen2_vl")
#: Samples' ids begin here; those below are for special tokens.
FIRST_ID = 16
#: Names of fields to their small value, the first that fits. None: the default stays.
RULES: tuple[tuple[str, int | None], ...] = (
    (r".*vocab.*", VOCABULARY),
    (r".*(token_id|token_index)s?", None),
    (r".*(max_position|n_positions|n_ctx|max_seq_len|context_length|model_max_length).*", 128),
    (r"(num_|n_|decoder_|encoder_)?(hidden_)?layers?", LAYERS),
    (r"num_(hidden|decoder|encoder)_layers|n_layers?", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|num_query_groups)", HEADS // 2),
    (r"(.*_)?(num_)?(attention_)?(n_)?heads?", HEADS),
    (r".*(index|indexer)_topk", 4),
    (r".*(experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts)", 2),
    (r"num_kv_shared_layers|num_layers_per_stack", 2),
    (r"hidden_size_per_layer_input", HEAD),
    (r"topk_group", 1),
    (r"n_group|num_expert_group", 2),
    (r".*(n_shared_experts|num_shared_experts)", 1),
    (r".*(num_experts|routed_experts|local_experts|expert_num)", 4),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r".*(head_dim|rank|kv_channels|rotary_dim|d_head|attention_head_size|dim_head)", HEAD),
    (r".*(sliding_window|window_size|local_attention|attention_chunk_size|floor_scale)(_size)?",
     WINDOW),
    (r".*(state_size|d_state)", HEAD),
    (r".*(chunk_size|chunk_length|block_size)", WINDOW),
    (r".*(intermediate|ffn|feed_forward|inner|dff|dim_ff|mlp).*(size|dim|mlp)?", 48),
    (r"(.*_)?(hidden_size(_global)?|d_model|n_embd|(embedding|embed)_(size|dim))", WIDTH),
    (r"(.*_)?(emb_dim|proj_dim|width)", WIDTH),
)  # fmt: skip
#: Fields that some configs leave open and their models need.
NEEDED = {"head_dim": HEAD, "num_key_value_heads": HEADS // 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
# Its layers of full attention have wider heads.
_UNLIKE_HEADS = {"per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}}
_EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
_ASSISTANT = {**_UNLIKE_HEADS, "num_kv_shared_layers": LAYERS, "num_hidden_layers": LAYERS}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_DOTS = {"per_layer_config": {}, "head_dim": 2 * HEAD}
_ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
_INDEXER = {
    "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 8, "indexer_kv_heads": 1,
    "indexer_n_heads": 4, "hc_lowrank": 8, "ngram_vocab_size_base": 64, "ple_embed_dim": 32,
}  # fmt: skip
#: Fields that a type of model needs besides.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {
            "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH, "per_layer_config": {},
        },
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "dots3_note_text": _DOTS,
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 2},
    "deepseek_v4": {
        "head_dim": 16, "qk_rope_head_dim": 8,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "doge": {"keep_window_size": 128},
    "dots1": _EXPERTS,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma4": {"text_config": _UNLIKE_HEADS},
    "gemma4_text": _UNLIKE_HEADS,
    "gemma4_unified": {"text_config": _UNLIKE_HEADS},
    "gemma4_unified_text": _UNLIKE_HEADS,
    "gemma4_assistant": {
        "text_config": {
            **_ASSISTANT, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16)},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"mamba_headdim": 16},
}  # fmt: skip


def architectures() -> list[str]:
    """Types of transformers' causal language models, without encoder-decoders; and ON_TEXT."""
    types = (type_ for type_, config in CONFIG_MAPPING.items() if _is_causal(config))
    return sorted([*types, *ON_TEXT])


def factory_of(config: PreTrainedConfig) -> Any:
    """The class by which transformers makes or loads a base."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def _is_causal(config: type[PreTrainedConfig]) -> bool:
    if config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    try:
        return not config().is_encoder_decoder
    except Exception:  # noqa: BLE001  (its defaults contradict each other)
        return True


def small_config(type_: str) -> PreTrainedConfig:
    """The config of a base of four layers, without dropout."""
    kind = CONFIG_MAPPING[type_]
    config = kind(**_merged(_small_fields(kind), EXCEPTIONS.get(type_, {})))
    for part in [config, *(getattr(config, name) for name in kind.sub_configs)]:
        for name, value in vars(part or config).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    config.use_cache = False
    return config


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) else value
    return merged


def _small_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a config to give it, as far as they are not its defaults."""
    try:
        default = kind()
    except Exception:  # noqa: BLE001  (its defaults contradict each other)
        default = None
    values = vars(default) if default is not None else _declared(kind)
    depth = next((v for n, v in values.items() if _is_count(v) and _small(n) == LAYERS), 0)
    special = iter(range(FIRST_ID))
    fields: dict[str, Any] = {}
    for name, value in values.items():
        part = kind.sub_configs.get(name)
        if isinstance(value, PreTrainedConfig):
            fields[name] = {"model_type": value.model_type, **_small_fields(type(value))}
        elif part is not None and part is not AutoConfig:
            fields[name] = _small_fields(part)
        elif value is not None and re.fullmatch(r".*_token_(id|index)", name):
            fields[name] = next(special)
        elif value is not None or name in NEEDED:
            fields |= _shrunk(name, value, depth)
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = HEADS
    return fields


def _shrunk(name: str, value: Any, depth: int) -> dict[str, Any]:
    """A field with its small value; nothing where it stays as it is."""
    small = _small(name)
    if value is None:
        return {name: NEEDED[name]}
    if name == "per_layer_config":
        return {name: {}}
    if _is_count(value) and small is not None and value > 0:
        return {name: min(value, small)}
    if isinstance(value, list | tuple) and len(value) == depth > 0:
        kinds = list(dict.fromkeys(min(v, small) if small and _is_count(v) else v for v in value))
        return {name: [kinds[place % len(kinds)] for place in range(LAYERS)]}
    return {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _declared(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _small(name: str) -> int | None:
    return next((small for rule, small in RULES if re.fullmatch(rule, name)), None)


def make_base(config: PreTrainedConfig) -> Any:
    """A base in float64 whose parts all matter: each weight is drawn, also gates and biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = factory_of(config).from_config(
            config, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                _disturb(parameter)
    return model.double()


class _Wide:
    """The package torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def full(size: Any, value: Any, **options: Any) -> Tensor:
        """XGLM fills a tensor without a dtype with float64's least number."""
        dtype = torch.float64 if isinstance(value, float) else None
        return torch.full(size, value, **{"dtype": dtype, **options})


def widen() -> None:
    """Let transformers compute in float64 also where its code asks for float32.

    It acts on modules that this process has imported: a base is made before.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and getattr(module, "torch", None) is torch:
            module.torch = _Wide()  # type: ignore[attr-defined]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    RouterWeight.float = lambda self: self.type(torch.float64)  # type: ignore[method-assign]


def _disturb(parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        return
    scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
    parameter += torch.randn_like(parameter) * scale * 0.5
