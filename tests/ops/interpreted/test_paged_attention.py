"""The kernel that reads pages gives what gathered pages give in float64."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.kernels import paged_attention
from tlora_fx.ops.paged_attention import RowPages, attend_pages

LENGTHS = (1, 63, 64, 65, 200)
PAGE = 128


@pytest.mark.parametrize(
    ("heads", "widths", "window", "longest", "dtype"),
    [
        ((4, 1), (32, 32), -1, 200, torch.float32),
        ((6, 2), (24, 16), 7, 256, torch.float32),
        ((2, 2), (16, 40), 100, 200, torch.float16),
        # Two shares of a sequence, and eight, of which most are empty.
        ((4, 2), (16, 16), -1, 1100, torch.float32),
        ((4, 2), (16, 16), 3, 5000, torch.float32),
    ],
)
def test_a_row_of_single_tokens(heads, widths, window, longest, dtype):
    """Of sequences in scattered pages, which hold NaN beyond the sequences' ends."""
    torch.manual_seed(0)
    pages = 2 * len(LENGTHS)
    tables = torch.randperm(pages).to(torch.int32).view(len(LENGTHS), 2)
    q = torch.randn(len(LENGTHS), heads[0], widths[0])
    keys, values = (torch.randn(pages, PAGE, heads[1], width) for width in widths)
    for of, length in zip(tables.tolist(), LENGTHS, strict=True):
        for at in range(length, 2 * PAGE):
            for pool in (keys, values):
                pool[of[at // PAGE], at % PAGE] = torch.nan
    q, keys, values = (each.to(dtype) for each in (q, keys, values))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    found = paged_attention.attend(q, keys, values, tables, lengths, longest, 0.3, window)

    row = RowPages(torch.zeros(len(LENGTHS), dtype=torch.int64), tables, lengths, max(LENGTHS))
    rule = AttentionRule(0.3, True, window, 0.0, 0.0)
    exact = attend_pages(*(each.double() for each in (q, keys, values)), row, rule, None)
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-3
    )
