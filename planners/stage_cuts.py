"""Cuts of layers into stages that make the slowest stage as fast as possible.

Layers differ: adapters cost more where ranks are large, and below the lowest adapter there is no
backward at all. A cut by cost puts more of the cheap layers into one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import inf

from torch import nn

from tlora_fx.errors import NoStage
from tlora_fx.ir.graph import HEAD, LOSS
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.stages import legal_cuts

# Sums of the same costs in another order differ by rounding.
ROUNDING = 1 + 1e-9


def cut_layers(
    costs: Sequence[float], stages: int, legal: Collection[int] | None = None
) -> tuple[int, ...]:
    """Cuts into runs of layers whose dearest is as cheap as can be.

    Of all such cuts, those whose stages differ least.

    costs     of each layer, forward and backward, in any unit; what stands before the first layer
              and behind the last counts with these
    stages    how many runs
    legal     where a run may begin; everywhere by default
    returns   the first layer of each run but the first
    raises    NoStage where there are fewer places than stages
    """
    allowed = sorted(set(range(1, len(costs)) if legal is None else legal))
    if len(allowed) < stages - 1 or not costs:
        raise NoStage(
            f"{len(costs)} layers cannot be cut into {stages} stages",
            expected=f"at least {stages - 1} places to cut",
            found=len(allowed),
            help="plan fewer stages",
        )
    sums = [0.0, *accumulate(costs)]
    ends = [*allowed, len(costs)]
    dearest, _ = _best(sums, ends, stages, max, lambda cost: cost)
    limit = dearest * ROUNDING
    _, cuts = _best(
        sums, ends, stages, float.__add__, lambda cost: cost * cost if cost <= limit else inf
    )
    return cuts


def balanced_cuts(
    model: SuperModel, stages: int, costs: Sequence[float] | None = None, *, recompute: bool = False
) -> tuple[int, ...]:
    """Cuts of a model, where a single value crosses.

    costs     of each layer; by default products of matrices by `layer_products`
    raises    NoStage
    """
    if costs is None:
        costs = layer_products(model, recompute=recompute)
    return cut_layers(costs, stages, legal_cuts(model))


def layer_products(model: SuperModel, *, recompute: bool = False) -> list[float]:
    """Multiply-adds of each layer for one token, forward and backward, in its matrices.

    A frozen matrix costs its size in the forward, and again in the backward of its input; an
    adapter costs it a third time. Jobs have equal shares of the tokens. The loss, which computes
    its logits twice, counts with the last layer. Attention itself is left out: it is the same in
    every layer.

    model       weights are not needed
    recompute   layers are computed again in the backward
    """
    costs: list[float] = []
    learns = _root_trains(model)
    for path in model.layer_order():
        layer = model.net.get_submodule(path)
        frozen, adapters = _sizes(layer, len(model.jobs))
        learns = learns or adapters > 0
        forward = frozen + adapters
        again = forward if recompute else 0.0
        costs.append(forward + (again + frozen + 2 * adapters if learns else 0.0))
    if costs and HEAD in model.group.blocks:
        frozen, adapters = _sizes(model.net.get_submodule(LOSS), len(model.jobs))
        costs[-1] += 3 * frozen + 4 * adapters
    return costs


def _best(
    sums: Sequence[float],
    ends: Sequence[int],
    stages: int,
    join: Callable[[float, float], float],
    price: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest runs by dynamic programming: what they cost, and where they begin.

    sums   cost of all layers before each
    ends   where a run may end
    """
    rows: list[dict[int, tuple[float, tuple[int, ...]]]] = [
        {end: (price(sums[end]), ()) for end in ends}
    ]
    for _ in range(1, stages):
        before, row = rows[-1], {}
        for end in ends:
            choices = [
                (join(cost, price(sums[end] - sums[start])), (*cuts, start))
                for start, (cost, cuts) in before.items()
                if start < end
            ]
            if choices:
                row[end] = min(choices)
        rows.append(row)
    return rows[-1][ends[-1]]


def _sizes(module: nn.Module, jobs: int) -> tuple[float, float]:
    """Numbers in frozen matrices, and in the adapters of a token of an average job."""
    frozen = adapters = 0.0
    for leaf in module.parameters():
        if leaf.requires_grad:
            adapters += leaf.numel() / jobs
        elif leaf.dim() > 1:
            frozen += leaf.numel()
    return frozen, adapters


def _root_trains(model: SuperModel) -> bool:
    """Whether a tensor trains that the root reads by itself."""
    paths = (str(node.target) for node in model.group.root.nodes if node.op == "get_attr")
    parts = (path.rpartition(".") for path in paths)
    tensors = (getattr(model.net.get_submodule(module), name) for module, _, name in parts)
    return any(tensor.requires_grad for tensor in tensors)
