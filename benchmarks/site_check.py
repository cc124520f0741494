"""Whether an arm's numbers are right, and what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.site_inputs import Built, Inputs, tokens
from benchmarks.site_loads import Load
from benchmarks.site_ours import SEED, STEP
from tlora_fx.ops import keep_mask, keep_scale

# Beyond it an arm computes something else, so its time would say nothing. Products of halves whose
# inner results are rounded once come to a few times 2**-9 or 2**-12.
LIMITS = {
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
    torch.float32: 5e-3,
    torch.float64: 1e-10,
}
KINDS = ("y", "dx", "da", "db")

Results = dict[str, list[Tensor]]


def reference(inputs: Inputs) -> Results:
    """Every y, dx, da and db in float64, each job by itself, with our keyed dropout masks."""
    found: Results = {kind: [] for kind in KINDS}
    first = 0
    for x, (_, outers) in zip(inputs.xs, inputs.load.groups, strict=True):
        own = range(first, first + len(outers))
        wide = x.detach().double().requires_grad_()
        pairs = [_wide_pair(inputs, site) for site in own]
        ys = [_site(inputs, site, wide, *pair) for site, pair in zip(own, pairs, strict=True)]
        leaves = [wide, *(leaf for pair in pairs for leaf in pair)]
        dys = [inputs.dys[site].double() for site in own]
        dx, *grads = torch.autograd.grad(ys, leaves, dys)
        found["y"] += [y.detach() for y in ys]
        found["dx"].append(dx)
        found["da"] += grads[0::2]
        found["db"] += grads[1::2]
        first += len(outers)
    return found


def _wide_pair(inputs: Inputs, site: int) -> tuple[Tensor, Tensor]:
    a, b = (value[site].double().requires_grad_() for value in (inputs.a, inputs.b))
    return a, b


def _site(inputs: Inputs, site: int, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    load = inputs.load
    dropped = x * _keep(load, site, x) * keep_scale(load.rate) if load.rate else x
    parts = []
    parts_a, parts_b = (torch.split(one, list(load.ranks)) for one in (a, b))
    jobs = zip(tokens(load), parts_a, parts_b, load.scales, strict=True)
    for own, own_a, own_b, scale in jobs:
        parts.append(scale * (dropped[own] @ own_a.t()) @ own_b)
    return F.linear(x, inputs.weights[site].double()) + torch.cat(parts)


def _keep(load: Load, site: int, x: Tensor) -> Tensor:
    jobs = len(load.ranks)
    rates = torch.full((jobs,), load.rate, dtype=torch.float64)
    segments = torch.tensor([0, *(own.stop for own in tokens(load))], dtype=torch.int32)
    keys = torch.tensor([[SEED + job, STEP] for job in range(jobs)])
    index = torch.cat([torch.arange(n, dtype=torch.int32) for n in load.lengths]).to(x.device)
    return keep_mask(rates, segments, keys, index, site, x.shape[1])


def results(built: Built) -> Results:
    """What an arm computes, in the order of the reference."""
    with built.context():
        ys, grads = built.step()
    count = len(built.inputs.xs)
    pairs = built.gradients(grads[count:])
    return {
        "y": list(ys),
        "dx": list(grads[:count]),
        "da": [da for da, _ in pairs],
        "db": [db for _, db in pairs],
    }


def errors(found: Results, expected: Results) -> dict[str, float]:
    """By kind the largest ‖found - expected‖ / ‖expected‖; kinds that an arm lacks are left out."""
    return {
        kind: max(_error(*pair) for pair in zip(found[kind], expected[kind], strict=True))
        for kind in KINDS
        if found[kind]
    }


def _error(found: Tensor, expected: Tensor) -> float:
    difference = (found.detach().double() - expected).norm() / expected.norm()
    # A NaN loses every comparison, and would be left out by max.
    return float(difference.nan_to_num(float("inf")))


def saved_bytes(built: Built) -> int:
    """Bytes that live from forward to backward on the inputs' device, parameters not counted.

    Whole storages are counted, once each: a view keeps all of what it looks at.
    """
    device = built.inputs.xs[0].device
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with built.context(), saved_tensors_hooks(note, lambda tensor: tensor):
        # The outputs hold what was saved, so no address is used twice while it is noted.
        ys = built.forward()
    parameters = {storage.data_ptr() for storage in _storages(built)}
    del ys
    return sum(size for at, size in kept.items() if at not in parameters)


def _storages(built: Built) -> Iterator[torch.UntypedStorage]:
    fixed: Sequence[Tensor] = [*built.inputs.weights, *built.inputs.a, *built.inputs.b]
    for tensor in [*fixed, *built.weights, *built.leaves]:
        yield tensor.untyped_storage()


def least_saved_bytes(load: Load, dtype: torch.dtype) -> int:
    """What must be kept: each x once; S, a bit an element of x if it drops, and token indices."""
    block = 16 if max(load.ranks) <= 32 else 64
    padded = -(-max(load.ranks) // block) * block
    row = 4 + dtype.itemsize * sum(inner for inner, _ in load.groups)
    for inner, _ in load.sites:
        row += dtype.itemsize * padded + (-(-inner // 8) if load.rate else 0)
    return load.tokens * row
