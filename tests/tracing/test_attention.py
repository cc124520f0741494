"""What transformers calls in place of attention, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import error_of, tokens
from tlora_fx.errors import AttentionNotPackable
from tlora_fx.ir.graph import TABLES
from tlora_fx.model.batch import pack
from tlora_fx.tracing.attention import attend, row_of


@pytest.fixture
def row():
    """Two sequences of three and two tokens, as tables."""
    packed = pack([tokens([3, 2])])
    return {name: getattr(packed, name) for name in TABLES}


def heads(count: int, length: int = 5):
    """Random [1, heads, T, D]."""
    return torch.randn(1, count, length, 4, dtype=torch.float64)


def test_attention_stays_inside_sequences(row):
    """Grouped heads, causal: equal to each sequence by itself."""
    q, k, v = heads(4), heads(2), heads(2)

    with row_of(row):
        out, weights = attend(nn.Identity(), q, k, v, None)

    assert weights is None
    for start, stop in ((0, 3), (3, 5)):
        expected = nn.functional.scaled_dot_product_attention(
            *(x[:, :, start:stop] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[:, start:stop], expected.transpose(1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": torch.zeros(1, 1, 5, 5)},
        {"position_bias": torch.zeros(1, 1, 5, 5)},
        {"key": heads(2, 7), "value": heads(2, 7)},
    ],
)
def test_masks_biases_and_other_keys_are_refused(row, changes):
    """Packing cannot honour them; the error names the module."""
    given = {
        "module": nn.Identity(), "query": heads(4), "key": heads(2), "value": heads(2),
        "attention_mask": None, **changes,
    }  # fmt: skip

    with row_of(row):
        text = error_of(lambda: attend(**given), AttentionNotPackable)

    assert "Identity" in text
    assert "batch" in text
