"""Attention as one operator, put into models through transformers' AttentionInterface.

The row's boundaries are not taken from what a model passes on, but from the row that is being
traced, so a model that drops keyword arguments on the way is packed as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.errors import AttentionNotPackable

IMPLEMENTATION = "tlora_fx"

_ROW: ContextVar[dict[str, Tensor]] = ContextVar("row")
_CALLS: ContextVar[list[str]] = ContextVar("calls")


def register() -> None:
    """Make `attn_implementation="tlora_fx"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


def current_row() -> dict[str, Tensor]:
    """The tables of the row that is being traced."""
    return _ROW.get()


@contextmanager
def row_of(tables: dict[str, Tensor]) -> Iterator[list[str]]:
    """Within this, attention reads these row tables; yields the list of its calls."""
    row, calls = _ROW.set(tables), _CALLS.set([])
    try:
        yield _CALLS.get()
    finally:
        _ROW.reset(row)
        _CALLS.reset(calls)


@contextmanager
def unpacked_lines() -> Iterator[None]:
    """Within this, transformers takes each line of a padded batch for one sequence.

    It looks for packed sequences in position_ids. In batch form there are none, which its own
    check finds when it runs, but cannot find while it is traced.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    kept = getattr(masking_utils, name, None)
    if kept is None:
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, kept)


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
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of attention.

    query        [1, H, T, D]
    key, value   [1, H_kv, T, D]
    returns      [1, T, H, D] and no weights
    raises       AttentionNotPackable for masks, biases or caches that packing cannot honour
    """
    where = type(module).__name__
    if attention_mask is not None or rest.get("position_bias") is not None:
        raise AttentionNotPackable(
            "a base's attention adds a mask or bias of its own",
            module=where,
            help="set base.attention: batch to run it on padded rows",
        )
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise AttentionNotPackable(
            "a base's attention reads other tokens than the row's own",
            module=where,
            expected=f"keys of {query.shape[2]} tokens",
            found=tuple(key.shape),
            help="set base.attention: batch, or take a decoder-only base",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    row = _ROW.get()
    _CALLS.get().append(where)
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
        bool(causal),
        -1 if sliding_window is None else int(sliding_window),
        float(softcap or 0.0),
        s_aux,
        float(dropout),
    )
    return out.unsqueeze(0), None
