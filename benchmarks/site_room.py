"""Our operator where x and dy come with room behind their rows.

Compiled layers leave room for what concat-K puts behind x and dy (ops/kernels/packed.py): whoever
produces x writes it into wider rows, at no cost of its own. Here the inputs lie in such rows from
the start, and the three operators below autograd are called as compiled code calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.site_arms import Arm
from benchmarks.site_inputs import Built, Inputs
from benchmarks.site_ours import Tables, ours
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.packed import tail_columns_of

ops = torch.ops.tlora_fx


def extend_weight(
    inputs: Inputs, context: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Built:
    """Ours, on weights, x and dy with room."""
    from tlora_fx.ops.kernels import extend_weight as around

    tail = tail_columns_of(sum(inputs.load.ranks))
    built = ours(
        inputs, weights=[around(weight, tail) if tail else weight for weight in inputs.weights]
    )
    count, tables = len(inputs.weights), Tables(inputs)
    a, b = built.leaves[:count], built.leaves[count:]
    groups: list[Any] = []
    for x, (_, outers) in zip(inputs.xs, inputs.load.groups, strict=True):
        start = sum(len(group[1]) for group in groups)
        own = range(start, start + len(outers))
        room = 0 if inputs.load.rate else tail
        dys = [_wide(inputs.dys[site], room) for site in own]
        groups.append((_wide(x.detach(), tail * len(own)), own, dys, tail * len(own), room))

    def forward() -> list[Tensor]:
        ys: list[Tensor] = []
        for x, group in zip(inputs.xs, groups, strict=True):
            wide, own, dys, behind, room = group
            given = [[held[site] for site in own] for held in (built.weights, a, b, tables.sites)]
            ys += _Group.apply(
                x, (wide, dys, behind, room, tables), *given[0], *given[1], *given[2], *given[3]
            )  # type: ignore[no-untyped-call]
        return ys

    return Built(inputs, forward, built.leaves, built.gradients, context, built.weights)


def forced(plan: Any) -> Arm:
    """The same with one plan for every site and direction that can take it."""
    return lambda inputs: extend_weight(inputs, lambda: select.force_plan(plan))


ARMS: dict[str, Arm] = {"ours-room": extend_weight} | {
    f"ours-room-{plan}": forced(plan) for plan in select.PLANS
}


class _Group(torch.autograd.Function):
    """Sites that read one x, as `multi_lora_linears` runs them in compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: tuple[Any, ...], *flat: Tensor) -> tuple[Tensor, ...]:
        wide, _, behind, _, tables = given
        count = len(flat) // 4
        weights, a, b, sites = (list(flat[count * i : count * (i + 1)]) for i in range(4))
        shared = tables.of_sites(a, b, sites, x.dtype)
        made = ops.multi_lora_forward(wide, weights, [None] * count, *shared, behind)
        ctx.given, ctx.parts = given, (weights, shared, made[count : 2 * count], made[2 * count :])
        return tuple(made[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wide, dys, behind, room, _ = ctx.given
        weights, shared, s, bits = ctx.parts
        count = len(weights)
        dx, *rest = ops.multi_lora_input_gradient(dys, weights, *shared, s, bits, True, room)
        x = wide[:, : wide.shape[1] - behind]
        dys = [dy[:, : dy.shape[1] - room] for dy in dys]
        leaves = ops.multi_lora_adapter_gradients(
            dys, x, weights, *shared, s, bits, rest[:count], rest[count:]
        )
        none = [None] * count
        return (dx, None, *none, *leaves, *none)


def _wide(rows: Tensor, columns: int) -> Tensor:
    """The rows with so many columns behind them."""
    return torch.cat([rows, rows.new_zeros(len(rows), columns)], 1)
