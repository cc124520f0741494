"""`tlora_fx::multi_lora_add`: the adapters of all jobs, added to what any frozen operator gave.

For operators whose product is another library's, such as a quantised base's. As in
multi_lora_linear.py, graphs hold an operator of one output, made of those which also hand on what
a backward reads again:

    multi_lora_add_forward          y with the branches; S and the dropout bits
    multi_lora_add_input_gradient   what the branches add to dx; dS, and parts of dB
    multi_lora_adapter_gradients    dA and dB, as of multi_lora_linear
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import AdapterTableError
from tlora_fx.ops.adapter_tables import check_adapters
from tlora_fx.ops.kernels import added, loop
from tlora_fx.ops.kernels.support import Served, served
from tlora_fx.ops.multi_lora_sites import served_by_kernels
from tlora_fx.ops.site_group import SCHEMA, SiteGroup, tokens_of


def multi_lora_add(
    y: Tensor,
    x: Tensor,
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
    """Add to each job's tokens what its own adapter makes of them.

    y        float [..., out], what the frozen operator made of x
    x        [..., in], of y's dtype; all but the last dimension enumerate tokens
    returns  [..., out] in y's dtype; rows of job j hold y + scale_j * (drop_j(x) A_jᵀ) B_j
    raises   AdapterTableError, SegmentError, MaskKeyError

    The other arguments are those of `multi_lora_linear`. The gradient of y is that of the result.
    """
    made: Tensor = torch.ops.tlora_fx.multi_lora_add.default(
        y, x, a, b, ranks, scales, rates, segments, keys, token_index, site, compute_dtype,
        max_rank, drops,
    )  # fmt: skip
    return made


torch.library.define(
    "tlora_fx::multi_lora_add",
    "(Tensor y, Tensor x, Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor rates, "
    "Tensor segments, Tensor keys, Tensor token_index, Tensor site, ScalarType compute_dtype, "
    "int max_rank=0, bool drops=True) -> Tensor",
)


@torch.library.impl("tlora_fx::multi_lora_add", "CompositeImplicitAutograd")
def _one(
    y: Tensor,
    x: Tensor,
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
    made: list[Tensor] = torch.ops.tlora_fx.multi_lora_add_forward.default(
        y, x, [a], [b], [ranks], [scales], [rates], segments, keys, token_index, [site],
        compute_dtype, max_rank, drops,
    )  # fmt: skip
    return made[0]


def _check(y: Tensor, x: Tensor, group: SiteGroup) -> None:
    """Refuse what metadata alone shows to be wrong; raises AdapterTableError."""
    if y.shape[:-1] != x.shape[:-1] or y.dtype != x.dtype:
        raise AdapterTableError(
            "adapters must be added to what was made of their own input",
            expected=f"y {[*x.shape[:-1], 'out']} {x.dtype}",
            found=f"y {list(y.shape)} {y.dtype}",
        )
    standing = x.new_empty((), device="meta").expand(y.shape[-1], x.shape[-1])
    check_adapters(x, standing, None, group.a[0], group.b[0])


@torch.library.custom_op(
    "tlora_fx::multi_lora_add_forward",
    mutates_args=(),
    schema=f"(Tensor y, Tensor x, {SCHEMA}) -> Tensor[]",
)
def multi_lora_add_forward(y: Tensor, x: Tensor, *tables: Any) -> list[Tensor]:
    """Add the adapters of all jobs.

    returns   the sum [..., out]; S and the dropout bits, [0] where no kernel serves
    raises    as `multi_lora_add`
    """
    group = SiteGroup([], *tables)
    _check(y, x, group)
    made = y.clone(memory_format=torch.contiguous_format)
    known = served(x, group)
    if known is not None:
        return [made, *added.forward(made, x, group, known)]
    rows = x.reshape(-1, x.shape[-1])
    if len(rows):
        loop.add_branches(made.view(-1, y.shape[-1]), rows, group.tables(0, len(rows)), group, 0)
    return [made, x.new_empty(0), x.new_empty(0)]


@multi_lora_add_forward.register_fake
def _forward_fake(y: Tensor, x: Tensor, *tables: Any) -> list[Tensor]:
    group = SiteGroup([], *tables)
    _check(y, x, group)
    known, made = served(x, group), y.new_empty(y.shape)
    if known is None:
        return [made, x.new_empty(0), x.new_empty(0)]
    return [made, *known.low_rank_rows(x), *known.bits(x)]


@torch.library.custom_op(
    "tlora_fx::multi_lora_add_input_gradient",
    mutates_args=(),
    schema=f"(Tensor dy, {SCHEMA}, Tensor[] s, Tensor[] bits, bool need_dx) -> Tensor[]",
)
def multi_lora_add_input_gradient(dy: Tensor, *rest: Any) -> list[Tensor]:
    """What the branches add to the gradient of x.

    dy        [..., out]
    s, bits   as the forward gave them
    returns   dx [..., in], or [0] unless need_dx; dS [tokens, rank]; parts of dB, which only
              `multi_lora_adapter_gradients` reads
    raises    as `multi_lora_add`
    """
    *tables, s, bits, need_dx = rest
    group = SiteGroup([], *tables)
    if served_by_kernels(s):
        return added.input_gradient(dy, group, s[0], bits[0], need_dx)
    rows = dy.reshape(-1, dy.shape[-1])
    dx = rows.new_zeros(len(rows), group.inner) if need_dx else None
    ds = loop.add_branch_gradients(dx, rows, group.tables(0, len(rows)), group, 0)
    shaped = dy.new_empty(0) if dx is None else dx.view(*dy.shape[:-1], group.inner)
    return [shaped, ds, dy.new_empty(0)]


@multi_lora_add_input_gradient.register_fake
def _input_gradient_fake(dy: Tensor, *rest: Any) -> list[Tensor]:
    *tables, s, _, need_dx = rest
    group = SiteGroup([], *tables)
    dx = dy.new_empty(*dy.shape[:-1], group.inner) if need_dx else dy.new_empty(0)
    if served_by_kernels(s):
        return [dx, torch.empty_like(s[0]), *Served.of(dy, group).gradient_parts(dy)]
    ds = dy.new_empty(tokens_of(dy), group.capacity(0), dtype=group.compute_dtype)
    return [dx, ds, dy.new_empty(0)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, x, *tables = inputs
    group = SiteGroup([], *tables)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    lists = [getattr(group, name)[0] for name in ("a", "b", "ranks", "scales", "rates", "sites")]
    ctx.save_for_backward(x, *lists, group.segments, group.keys, group.token_index, *output[1:])
    ctx.settings = group.compute_dtype, group.max_rank, group.drops


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, a, b, ranks, scales, rates, site, segments, keys, token_index, s, bits = ctx.saved_tensors
    dy, ops = grads[0], torch.ops.tlora_fx
    nothing: tuple[Any, ...] = ([None], [None], [None], None, None, None, [None], None, None, None)
    if dy is None:
        return None, None, [None], [None], *nothing
    need_y, need_x, *need = ctx.needs_input_grad
    row = segments, keys, token_index
    tables = [a], [b], [ranks], [scales], [rates], *row, [site], *ctx.settings
    dx, ds, parts = ops.multi_lora_add_input_gradient.default(dy, *tables, [s], [bits], need_x)
    da, db = None, None
    if any(map(_any, need[:2])):
        da, db = ops.multi_lora_adapter_gradients.default(
            [dy], x, [], *tables, [s], [bits], [ds], [parts]
        )
    return dy if need_y else None, dx if need_x else None, [da], [db], *nothing


def _any(needs: bool | list[bool]) -> bool:
    return any(needs) if isinstance(needs, list) else needs


multi_lora_add_forward.register_autograd(_backward, setup_context=_setup)
