"""Attention to what is kept in pages equals attention to the whole sequence."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.ops import packed_attention
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.paged_attention import KeyValuePages, RowPages

PAGE = 4


def attention(q, k, v, rule, sinks):
    """One whole sequence by the operator that trains."""
    length = torch.tensor([0, len(q)], dtype=torch.int32)
    out, _ = packed_attention(
        *(q, k, v, length, torch.tensor(len(q), dtype=torch.int32), length),
        *(torch.zeros(1, 2, dtype=torch.int64), torch.arange(len(q), dtype=torch.int32), None),
        *(rule.scale, rule.causal, rule.window, rule.softcap, sinks, rule.dropout),
    )
    return out


@given(data=st.data())
def test_the_last_tokens_attend_as_in_whole_sequences(data):
    """Of sequences in scattered pages, some of which hold NaN beyond the sequences' ends."""
    lengths = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    groups, share = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 1)]))
    width, values_width = data.draw(st.sampled_from([(4, 4), (6, 2)]))
    rule = AttentionRule(
        0.4, True, data.draw(st.sampled_from([-1, 1, 3, 50])),
        data.draw(st.sampled_from([0.0, 1.5])), 0.0,
    )  # fmt: skip
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    heads = groups * share
    sinks = torch.randn(heads).double() if data.draw(st.booleans()) else None
    whole = [
        (
            torch.randn(length, heads, width).double(),
            torch.randn(length, groups, width).double(),
            torch.randn(length, groups, values_width).double(),
        )
        for length in lengths
    ]
    needs = [-(-length // PAGE) for length in lengths]
    free = torch.randperm(sum(needs) + 2).tolist()
    tables = [[free.pop() for _ in range(need)] for need in needs]
    cache = KeyValuePages(sum(needs) + 2, PAGE)
    for pool in cache._pool(0, whole[0][1], whole[0][2]):
        pool.fill_(torch.nan)

    def slots(of, positions):
        return [of[at // PAGE] * PAGE + at % PAGE for at in positions]

    def call(*parts):
        bounds = torch.tensor([0, len(parts[0])], dtype=torch.int32)
        return packed_attention(
            *parts, bounds, bounds[1], bounds, torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(len(parts[0]), dtype=torch.int32), None, rule.scale, True, rule.window,
            rule.softcap, sinks, 0.0,
        )[0]  # fmt: skip

    for of, (q, k, v) in zip(tables, whole, strict=True):
        if len(q) > 1:
            kept = torch.tensor(slots(of, range(len(q) - 1)))
            with cache.row(RowPages(kept)):
                before = call(q[:-1], k[:-1], v[:-1])
            torch.testing.assert_close(before, attention(q, k, v, rule, sinks)[:-1])
    width_of_tables = max(needs)
    row = RowPages(
        torch.tensor([slots(of, [n - 1])[0] for of, n in zip(tables, lengths, strict=True)]),
        torch.tensor([of + [0] * (width_of_tables - len(of)) for of in tables], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        max(lengths),
    )
    last = [torch.cat([parts[part][-1:] for parts in whole]) for part in range(3)]
    padded = [torch.cat([each, each[:1]]) for each in last]
    with cache.row(row):
        out = call(*padded)

    for number, (q, k, v) in enumerate(whole):
        expected = attention(q, k, v, rule, sinks)[-1]
        torch.testing.assert_close(out[number], expected, rtol=0, atol=1e-12)
    assert not out[len(whole) :].any()
