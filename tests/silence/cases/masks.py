"""Masks and arguments that go through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.silence.modules import HIDDEN, Attention, Cases, Decoder, Make, distance, eager, seeded


def through(
    attend: Callable[..., Any], rest: Callable[[Tensor], dict[str, Any]] = lambda x: {}, **more: Any
) -> Make:
    """A decoder whose attention asks transformers' interface."""
    return seeded(lambda: Decoder(make=lambda: Attention(attend, rest, **more)))


class NotCausal(Attention):
    """Says of itself that it sees all tokens."""

    is_causal = False


def masked(create: str, **options: Any) -> Make:
    """A mask that transformers' masking_utils make, which leaves it out for strange attention."""

    def mask(config: Any, x: Tensor) -> Tensor | None:
        from transformers import masking_utils

        made: Any = getattr(masking_utils, create)(
            config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, **options
        )
        return made

    def make() -> nn.Module:
        from transformers import LlamaConfig

        config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=2)
        config.sliding_window, config.attention_chunk_size = 4, 4
        config._attn_implementation = "eager"
        return Decoder(
            make=lambda: Attention(eager(lambda far: far >= 0), mask=mask, config=config)
        )

    return seeded(make)


MASKS: Cases = {
    "a window that is handed on": through(
        eager(lambda far: (far >= 0) & (far < 4)), lambda x: {"sliding_window": 4}
    ),
    "sees all, and says so": seeded(
        lambda: Decoder(make=lambda: NotCausal(eager(lambda far: far == far)))
    ),
    "sees all, by argument": through(eager(lambda far: far == far), lambda x: {"is_causal": False}),
    "a mask that is handed on": through(
        eager(),
        mask=lambda config, x: torch.where(distance(x) >= 0, 0.0, -torch.inf).to(x.dtype),
    ),
    "a window that eager alone knows": through(eager(lambda far: (far >= 0) & (far < 4))),
    "causal of masking_utils": masked("create_causal_mask"),
    "window of masking_utils": masked("create_sliding_window_causal_mask"),
    "chunks of masking_utils": masked("create_chunked_causal_mask"),
    "all of masking_utils": masked("create_bidirectional_mask"),
    "an and-mask": masked(
        "create_causal_mask", and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0
    ),
    "an or-mask": masked("create_causal_mask", or_mask_function=lambda b, h, q, k: k < 3),
    "an or-mask of both": masked(
        "create_causal_mask", or_mask_function=lambda b, h, q, k: q // 4 == k // 4
    ),
}


def handed(name: str, how: Callable[[Any, Tensor], Any], value: Any) -> Make:
    """An argument of attention that eager honours."""
    return through(
        eager(bias=lambda rest, far: how(rest[name], far)), lambda x, value=value: {name: value(x)}
    )


ARGUMENTS: Cases = {
    "block_indices": handed(
        "block_indices",
        lambda kept, far: torch.where(far % kept == 0, 0.0, -1e9).to(torch.float64),
        lambda x: 2,
    ),
    "indices": handed("indices", lambda n, far: -0.1 * (far % n), lambda x: 3),
    "head_mask": handed("head_mask", lambda n, far: n * far, lambda x: 0.1),
    "relative_bias": handed("relative_bias", lambda n, far: n * far, lambda x: -0.2),
    "position_bias": handed("position_bias", lambda n, far: n * far, lambda x: -0.2),
    "softcap": handed("softcap", lambda n, far: 0.0 * far, lambda x: 0.5),
    "sinks": handed("sinks", lambda n, far: n[:, None, None] * 0.1 * far,
                    lambda x: x.new_ones(2)),
    "an argument of no meaning": handed("strange", lambda n, far: n * far, lambda x: 0.3),
    "another scale": handed("scale", lambda n, far: n * far, lambda x: 0.3),
}  # fmt: skip
