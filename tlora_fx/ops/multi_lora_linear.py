"""`tlora_fx::multi_lora_linear`: frozen linears and the adapters of all jobs on them.

Graphs hold these operators, one output a site. They are made of the three in multi_lora_sites.py,
which also hand on what a backward reads again: those are what autograd, AOT and a pipeline that
runs dX and dA, dB apart see. Where a compiler traces them they are also given room (see room.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.multi_lora_sites import forward_of

_ROW = "Tensor segments, Tensor keys, Tensor token_index"
_CAPACITY = "ScalarType compute_dtype, int max_rank=0, bool drops=True"


def multi_lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor,
    compute_dtype: torch.dtype,
    max_rank: int = 0,
    drops: bool = True,
) -> Tensor:
    """Apply a frozen linear, and to each job's tokens its own adapter.

    x              float [..., in]; all but the last dimension enumerate tokens
    weight, bias   [out, in] and [out] or None, in x's dtype, frozen
    a, b           [R, in] and [R, out]: all jobs' A, and all jobs' B transposed
    ranks          int32 [J + 1] on the CPU, job j owns rows ranks[j]:ranks[j + 1] of a and b; rows
                   from ranks[J] on belong to nobody
    scales, rates  float64 [J] on the CPU: lora_alpha / r or alike, and dropout rates
    segments       int32 [J + 1] on the CPU
    keys           int64 [J, 2] on the CPU, (seed, step)
    token_index    int32, one a token; read only when some job drops
    site           int64 scalar on the CPU, `site_id` of the layer; where x is a piece of its input,
                   bits from 32 on are the piece's first column divided by 8
    compute_dtype  adapters are cast to it and multiplied in it
    max_rank       the largest rank that a job may have here; 0: the rows of a
    drops          whether a job may drop here; where False, rates must be 0
    returns        [..., out] in x's dtype; rows of job j hold
                   x Wᵀ + bias + scale_j * (drop_j(x) A_jᵀ) B_j
    raises         AdapterTableError, SegmentError, MaskKeyError, naming the site
    source         tLoRA, section 3.3
    """
    made: Tensor = torch.ops.tlora_fx.multi_lora_linear.default(
        x, weight, bias, a, b, ranks, scales, rates, segments, keys, token_index, site,
        compute_dtype, max_rank, drops,
    )  # fmt: skip
    return made


def multi_lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    ranks: Sequence[Tensor],
    scales: Sequence[Tensor],
    rates: Sequence[Tensor],
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    sites: Sequence[Tensor],
    compute_dtype: torch.dtype,
    max_rank: int = 0,
    drops: bool = True,
) -> list[Tensor]:
    """`multi_lora_linear` of several linears that read the same x: q, k, v, or gate, up.

    lists      an entry a linear
    max_rank   the largest rank that a job may have at any of them
    returns    what each linear gives
    raises     as `multi_lora_linear`
    """
    made: list[Tensor] = torch.ops.tlora_fx.multi_lora_linears.default(
        x, weights, biases, a, b, ranks, scales, rates, segments, keys, token_index, sites,
        compute_dtype, max_rank, drops,
    )  # fmt: skip
    return made


torch.library.define(
    "tlora_fx::multi_lora_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, Tensor ranks, Tensor scales, "
    f"Tensor rates, {_ROW}, Tensor site, {_CAPACITY}) -> Tensor",
)
torch.library.define(
    "tlora_fx::multi_lora_linears",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] a, Tensor[] b, Tensor[] ranks, "
    f"Tensor[] scales, Tensor[] rates, {_ROW}, Tensor[] sites, {_CAPACITY}) -> Tensor[]",
)


def _one(
    keyset: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    rates: Tensor,
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    site: Tensor,
    compute_dtype: torch.dtype,
    max_rank: int = 0,
    drops: bool = True,
) -> Tensor:
    made = forward_of(
        keyset, x, [weight], [bias], [a], [b], [ranks], [scales], [rates], segments, keys,
        token_index, [site], compute_dtype, max_rank, drops,
    )  # fmt: skip
    return made[0]


def _several(
    keyset: Any,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    a: list[Tensor],
    b: list[Tensor],
    ranks: list[Tensor],
    scales: list[Tensor],
    rates: list[Tensor],
    segments: Tensor,
    keys: Tensor,
    token_index: Tensor,
    sites: list[Tensor],
    compute_dtype: torch.dtype,
    max_rank: int = 0,
    drops: bool = True,
) -> list[Tensor]:
    made = forward_of(
        keyset, x, weights, biases, a, b, ranks, scales, rates, segments, keys, token_index, sites,
        compute_dtype, max_rank, drops,
    )  # fmt: skip
    return made[: len(weights)]


_library = torch.library.Library("tlora_fx", "IMPL")  # type: ignore[no-untyped-call]
for _name, _function in (("multi_lora_linear", _one), ("multi_lora_linears", _several)):
    _library.impl(  # type: ignore[no-untyped-call]
        _name, _function, "CompositeImplicitAutograd", with_keyset=True
    )
