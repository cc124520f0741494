"""The frozen linears, and what else trains many LoRA jobs on them: arms from public libraries.

Each arm is a function that takes a set of inputs and returns it built, or raises `CannotError`
where it does not do this load. Their adapters are of the linear's own type, which is the fastest
that these libraries offer; ours stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.site_inputs import Built, Inputs, ranks, tokens
from benchmarks.site_loads import ALPHA

Arm = Callable[[Inputs], Built]
Pairs = list[tuple[Tensor, Tensor]]


class CannotError(Exception):
    """An arm does not do this load; the message says why."""


def frozen(inputs: Inputs) -> Built:
    """The linears without adapters: forward, and dX only."""

    def forward() -> list[Tensor]:
        pairs = zip(inputs.inputs_of_sites, inputs.weights, strict=True)
        return [F.linear(x, weight) for x, weight in pairs]

    return Built(inputs, forward)


def loop(inputs: Inputs) -> Built:
    """One adapter after the other, each on its own tokens."""
    load, leaves = inputs.load, _leaves_of_jobs(inputs)
    jobs, own = len(load.ranks), tokens(load)

    def site(x: Tensor, weight: Tensor, pairs: Sequence[Tensor]) -> Tensor:
        parts = [
            F.linear(F.linear(F.dropout(x[rows], load.rate), a), b) * scale
            for rows, a, b, scale in zip(own, pairs[0::2], pairs[1::2], load.scales, strict=True)
        ]
        return F.linear(x, weight) + torch.cat(parts)

    def forward() -> list[Tensor]:
        sites = zip(inputs.inputs_of_sites, inputs.weights, _chunks(leaves, 2 * jobs), strict=True)
        return [site(*given) for given in sites]

    return Built(inputs, forward, leaves, lambda grads: _joined(grads, jobs))


def grouped(inputs: Inputs) -> Built:
    """`torch._grouped_mm` twice; ranks are padded to the largest."""
    if not hasattr(torch, "_grouped_mm"):
        raise CannotError("this torch has no _grouped_mm")
    load = inputs.load
    # Rows of 16 bytes, as the kernel demands.
    padded = max(8, -(-max(load.ranks) // 8) * 8)
    device = inputs.xs[0].device
    ends = torch.tensor([rows.stop for rows in tokens(load)], dtype=torch.int32, device=device)
    scales = torch.tensor(load.scales, dtype=inputs.xs[0].dtype, device=device)
    scale = scales.repeat_interleave(torch.tensor(load.lengths, device=device))[:, None]
    leaves: list[Tensor] = []
    for site in range(len(load.sites)):
        jobs = list(inputs.of_job(site))
        a = torch.stack([F.pad(a, (0, 0, 0, padded - len(a))) for _, a, _, _ in jobs])
        b = torch.stack([F.pad(b.t(), (0, padded - len(b))) for _, _, b, _ in jobs])
        leaves += [a.contiguous().requires_grad_(), b.contiguous().requires_grad_()]

    def forward() -> list[Tensor]:
        sites = zip(inputs.inputs_of_sites, inputs.weights, leaves[0::2], leaves[1::2], strict=True)
        return [
            F.linear(x, weight)
            + scale
            * torch._grouped_mm(
                torch._grouped_mm(F.dropout(x, load.rate), a.transpose(-2, -1), ends),
                b.transpose(-2, -1),
                ends,
            )
            for x, weight, a, b in sites
        ]

    def gradients(grads: Sequence[Tensor]) -> Pairs:
        return [
            (
                torch.cat([a[:rank] for a, rank in zip(da, load.ranks, strict=True)]),
                torch.cat([b[:, :rank].t() for b, rank in zip(db, load.ranks, strict=True)]),
            )
            for da, db in zip(grads[0::2], grads[1::2], strict=True)
        ]

    return Built(inputs, forward, leaves, gradients)


def stacked(inputs: Inputs) -> Built:
    """All adapters in two dense products with a mask between, added by `addmm`."""
    mask, leaves = _mask(inputs), _stacked_leaves(inputs)
    rate = inputs.load.rate

    def forward() -> list[Tensor]:
        sites = zip(inputs.inputs_of_sites, inputs.weights, leaves[0::2], leaves[1::2], strict=True)
        return [
            torch.addmm(F.linear(x, weight), F.linear(F.dropout(x, rate), a) * mask, b.t())
            for x, weight, a, b in sites
        ]

    return Built(inputs, forward, leaves, _stacked_gradients)


class ExpandFirst(torch.autograd.Function):
    """The low-rank product first, then the frozen one added into it by cuBLAS (beta = 1)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, mask: Tensor, rate: float
    ) -> Tensor:
        """y [M, out] from x [M, in], a [R, in], b [out, R] and the mask [M, R]."""
        dropped, keep = torch.native_dropout(x, rate, True) if rate else (x, None)
        hidden = (dropped @ a.t()).mul_(mask)
        ctx.save_for_backward(x if keep is None else dropped, weight, a, b, mask, hidden, keep)
        ctx.kept = 1 / (1 - rate)
        return (hidden @ b.t()).addmm_(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, a and b."""
        dropped, weight, a, b, mask, hidden, keep = ctx.saved_tensors
        (dy,) = grads
        inner = (dy @ b).mul_(mask)
        dx = inner @ a
        if keep is not None:
            dx = torch.ops.aten.native_dropout_backward(dx, keep, ctx.kept)
        dx.addmm_(dy, weight)
        return dx, None, inner.t() @ dropped, dy.t() @ hidden, None, None


def expand_first(inputs: Inputs) -> Built:
    """Stacked adapters; y and dX are written once, by `addmm_(beta=1)`."""
    mask, leaves = _mask(inputs), _stacked_leaves(inputs)

    def forward() -> list[Tensor]:
        sites = zip(inputs.inputs_of_sites, inputs.weights, leaves[0::2], leaves[1::2], strict=True)
        apply: Any = ExpandFirst.apply
        return [apply(x, weight, a, b, mask, inputs.load.rate) for x, weight, a, b in sites]

    return Built(inputs, forward, leaves, _stacked_gradients)


def peft_eager(inputs: Inputs) -> Built:
    """PEFT's own layer; it has one adapter at a time, so one job."""
    return _peft(inputs, lambda layer: layer)


def peft_compiled(inputs: Inputs) -> Built:
    """The same layer under `torch.compile`."""
    return _peft(inputs, torch.compile)


def _peft(inputs: Inputs, finish: Callable[[Any], Any]) -> Built:
    if len(inputs.load.ranks) > 1:
        raise CannotError("PEFT trains one adapter at a time")
    layers = [_peft_layer(inputs, site) for site in range(len(inputs.weights))]
    leaves = [layer.lora_A["default"].weight for layer in layers]
    leaves += [layer.lora_B["default"].weight for layer in layers]
    run = [finish(layer) for layer in layers]

    def forward() -> list[Tensor]:
        return [layer(x) for layer, x in zip(run, inputs.inputs_of_sites, strict=True)]

    def gradients(grads: Sequence[Tensor]) -> Pairs:
        count = len(layers)
        return [(da, db.t()) for da, db in zip(grads[:count], grads[count:], strict=True)]

    return Built(inputs, forward, leaves, gradients)


def _peft_layer(inputs: Inputs, site: int) -> Any:
    import peft

    weight = inputs.weights[site]
    with torch.device("meta"):
        base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    load = inputs.load
    config = peft.LoraConfig(
        r=load.ranks[0], lora_alpha=int(ALPHA), lora_dropout=load.rate, target_modules=["0"]
    )
    holder: Any = torch.nn.Sequential(base)
    model: Any = peft.get_peft_model(holder, config, autocast_adapter_dtype=False)
    layer = model.base_model.model[0]
    layer.lora_A["default"].weight.data = inputs.a[site].clone()
    layer.lora_B["default"].weight.data = inputs.b[site].t().contiguous()
    return layer.train()


def _leaves_of_jobs(inputs: Inputs) -> list[Tensor]:
    """A [r, in] and B [out, r] of every job of the first site, then of the next."""
    leaves: list[Tensor] = []
    for site in range(len(inputs.weights)):
        for _, a, b, _ in inputs.of_job(site):
            leaves += [a.clone().requires_grad_(), b.t().contiguous().requires_grad_()]
    return leaves


def _stacked_leaves(inputs: Inputs) -> list[Tensor]:
    """A [R, in] and B [out, R] of every site."""
    leaves: list[Tensor] = []
    for a, b in zip(inputs.a, inputs.b, strict=True):
        leaves += [a.clone().requires_grad_(), b.t().contiguous().requires_grad_()]
    return leaves


def _stacked_gradients(grads: Sequence[Tensor]) -> Pairs:
    return [(da, db.t()) for da, db in zip(grads[0::2], grads[1::2], strict=True)]


def _mask(inputs: Inputs) -> Tensor:
    """[M, R], each job's scale where its tokens meet its ranks."""
    x, load = inputs.xs[0], inputs.load
    mask = torch.zeros(load.tokens, sum(load.ranks), dtype=x.dtype, device=x.device)
    for own, rows, scale in zip(tokens(load), ranks(load), load.scales, strict=True):
        mask[own, rows] = scale
    return mask


def _chunks(values: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _joined(grads: Sequence[Tensor], jobs: int) -> Pairs:
    return [
        (torch.cat(list(own[0::2])), torch.cat([db.t() for db in own[1::2]]))
        for own in _chunks(grads, 2 * jobs)
    ]


PEERS: dict[str, Arm] = {
    "expand-first": expand_first,
    "stacked": stacked,
    "grouped-mm": grouped,
    "loop": loop,
    "peft": peft_eager,
    "peft-compiled": peft_compiled,
}
