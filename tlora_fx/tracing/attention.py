"""Attention as one operator, put into models through transformers' AttentionInterface.

The row's boundaries are not taken from what a model passes on, but from the row that is being
traced, so a model that drops keyword arguments on the way is packed as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tlora_fx.errors import AttentionNotPackable
from tlora_fx.tracing.masks import BATCH_HELP, DeclaredMask, MaskRule, declared_mask

#: How the attention that ours stands for reads what it is handed: "eager" takes the mask alone,
#: "sdpa" the mask or, without one, is_causal, and all others is_causal and sliding_window.
Reading = Literal["eager", "sdpa", "keywords"]

IMPLEMENTATION = "tlora_fx"
READINGS: tuple[Reading, ...] = ("eager", "sdpa", "keywords")

# Arguments on their way through attention that do not change what it computes of one row.
HARMLESS = {
    "output_attentions": "weights are returned or not",
    "output_hidden_states": "for the model, not for attention",
    "output_router_logits": "for the model; a router's loss is refused",
    "return_dict": "for the model",
    "num_items_in_batch": "for the model's own loss",
    "logits_to_keep": "for the head",
    "use_cache": "nothing is cached in training",
    "cache_position": "nothing is cached in training",
    "position_ids": "rotary embeddings are in q and k already",
    "position_embeddings": "rotary embeddings are in q and k already",
    "cu_seq_lens_q": "where sequences lie is known from the row",
    "cu_seq_lens_k": "where sequences lie is known from the row",
    "max_length_q": "where sequences lie is known from the row",
    "max_length_k": "where sequences lie is known from the row",
    "layer_idx": "for a cache",
    "training": "dropout is given as a rate",
    "deterministic": "a kernel's order of sums",
}

_ROW: ContextVar[dict[str, Tensor]] = ContextVar("row")


def register() -> None:
    """Make our implementations known to transformers, one for each reading."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for reading in READINGS:
        name = f"{IMPLEMENTATION}_{reading}"
        AttentionInterface.register(name, partial(attend, reading=reading))
        AttentionMaskInterface.register(name, declared_mask)


def packed_implementation(replaced: str) -> str:
    """The name of ours that stands for one of transformers'."""
    if replaced.startswith(IMPLEMENTATION):
        return replaced
    reading = replaced if replaced in READINGS else "keywords"
    return f"{IMPLEMENTATION}_{reading}"


def current_row() -> dict[str, Tensor]:
    """The tables of the row that is being traced."""
    return _ROW.get()


@contextmanager
def row_of(tables: dict[str, Tensor]) -> Iterator[None]:
    """Make attention read these row tables, within this context."""
    row = _ROW.set(tables)
    try:
        yield
    finally:
        _ROW.reset(row)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    reading: Reading = "sdpa",
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention that transformers calls in place of its own.

    query        [1, H, T, D]
    key, value   [1, H_kv, T, D]
    reading      how the implementation that this stands for would take its mask
    returns      [1, T, H, D] and no weights
    raises       AttentionNotPackable for masks, biases, caches or arguments that packing cannot
                 honour
    """
    where = type(module).__name__
    _require_understood(where, rest)
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise AttentionNotPackable(
            "a base's attention reads other tokens than the row's own",
            module=where,
            expected=f"keys of {query.shape[2]} tokens",
            found=tuple(key.shape),
            help="set base.attention: batch, or take a decoder-only base",
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    keywords = MaskRule(causal, -1 if sliding_window is None else int(sliding_window))
    rule = _rule_of(where, attention_mask, keywords, reading)
    row = _ROW.get()
    out, _ = torch.ops.tlora_fx.packed_attention(
        query.transpose(1, 2).squeeze(0),
        key.transpose(1, 2).squeeze(0),
        value.transpose(1, 2).squeeze(0),
        row["cu_seqlens"],
        row["max_seqlen"],
        row["segments"],
        row["keys"],
        row["token_index"],
        None,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        rule.causal,
        rule.window,
        float(softcap or 0.0),
        s_aux,
        float(dropout),
    )
    return out.unsqueeze(0), None


def _require_understood(where: str, rest: Mapping[str, Any]) -> None:
    """Refuse arguments of attention that might change what it computes."""
    for name, value in rest.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise AttentionNotPackable(
                f"a base hands its attention an argument that packed rows do not honour: {name}",
                module=where,
                found=type(value).__name__,
                help=BATCH_HELP,
            )


def _rule_of(where: str, mask: Tensor | None, keywords: MaskRule, reading: Reading) -> MaskRule:
    """What tokens see, as the implementation that ours stands for would have it.

    keywords   what is_causal and sliding_window say
    """
    if mask is None:
        if reading == "eager":
            raise AttentionNotPackable(
                "a base hands its attention no mask, and its eager attention hides nothing",
                module=where,
                help=BATCH_HELP,
            )
        return MaskRule(keywords.causal) if reading == "sdpa" else keywords
    if not isinstance(mask, DeclaredMask):
        raise AttentionNotPackable(
            "a base's attention adds a mask or bias of its own", module=where, help=BATCH_HELP
        )
    if mask.rule is None:
        raise AttentionNotPackable(
            "a base's mask is not one that packed attention has",
            module=where,
            found=mask.trouble,
            help=BATCH_HELP,
        )
    # Without padding sdpa leaves a mask out that can be skipped, and goes by is_causal.
    skipped = reading == "sdpa" and mask.skippable and mask.rule.causal != keywords.causal
    if skipped or (reading == "keywords" and mask.rule != keywords):
        raise AttentionNotPackable(
            "a base's mask contradicts its attention's is_causal or sliding_window",
            module=where,
            expected=f"{keywords}, by its arguments",
            found=f"{mask.rule}, by its mask",
            help=BATCH_HELP,
        )
    return mask.rule
