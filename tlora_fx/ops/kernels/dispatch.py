"""Run a group of sites on generated kernels, forward and backward.

    fused     shrink, then one GEMM with the rank block in it
    sidecar   shrink, expand into the output, then cuBLAS adds the frozen product to it
    concat    cuBLAS over a longer sum, [x | S] [W | Bᵀ]ᵀ: x and S side by side, and the adapters
              in the columns behind the weight

and for dx likewise with dy, dS and A; concat has no mask, so it serves dx without dropout only.
Where x or dy has columns behind its rows (see packed.py), S and dS go there; else one site's x or
dy is copied while it is read. The selector takes one plan for each site and direction by the number
of tokens. Joined sites, whose weights, ys and dys stand side by side, take concat-K together, or,
where dx has masks, the sidecar plan with one product.

Where no job has an adapter at any of the sites, cuBLAS alone serves them.

Behind an operator of another library the adapters run as the sidecar plan without its frozen
product: shrink, and expand into what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.codegen.ahead import ahead
from tlora_fx.codegen.spec import MAX_SITES
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.added_gradients import targets_of, zeros_for
from tlora_fx.ops.kernels.launch import Gate, KernelCall
from tlora_fx.ops.kernels.packed import ExtendedWeight, Packed, extended_weight_of, stored_form
from tlora_fx.ops.kernels.select import Choice, Plan
from tlora_fx.ops.kernels.support import KernelGroup, Site
from tlora_fx.ops.tables import SiteGroup

_BYTES = 16


def forward(
    x: Tensor, biases: list[Tensor | None], group: SiteGroup, kernels: KernelGroup,
    tail_columns: int = 0, joined: bool = False,
) -> list[Tensor]:  # fmt: skip
    """y of each site, or all side by side, then S, then the dropout bits.

    tail_columns     columns at the end of x that are no input, for S
    joined   whether all y are one tensor
    """
    whole = plain(x)
    tokens = len(whole)
    call = KernelCall.open(kernels, group, tokens, x.device)
    outers = [site.outer for site in kernels.sites]
    widths = [sum(outers)] if joined else outers
    wide = [call.empty(tokens, count, dtype=x.dtype) for count in widths]
    s, bits = kernels.low_rank_rows(x, call.empty), kernels.bits(x, call.empty)
    with call.on_device():
        if tokens and call.is_vacant:
            rows = whole[:, : group.inner]
            columns = zip(biases, group.weights, _columns(wide, kernels.sites), strict=True)
            for bias, weight, y in columns:
                _product(rows, weight.t(), bias, y)
        elif tokens:
            beside = _side_by_side(biases, kernels.sites) if joined else None
            call.serve(_forward, whole, tail_columns, biases, beside, wide, s, bits)
    shapes = [(*x.shape[:-1], count) for count in widths]
    return [*(y.view(shape) for y, shape in zip(wide, shapes, strict=True)), *s, *bits]


def gated_forward(
    gate: Tensor, up: Tensor, activation: str, opened: Callable[[Tensor], Tensor],
    biases: list[Tensor | None], group: SiteGroup, kernels: KernelGroup, tail_columns: int,
) -> list[Tensor]:  # fmt: skip
    """y of one site, S and the dropout bits, and x = activation(gate) * up, [..., in + tails].

    opened   the same activation for torch, where no kernel makes x
    """
    rows, beside = plain(gate), plain(up)
    call, tokens = KernelCall.open(kernels, group, len(rows), gate.device), len(rows)
    (site,) = kernels.sites
    whole = call.empty(tokens, group.inner + tail_columns, dtype=gate.dtype)
    y = call.empty(tokens, site.outer, dtype=gate.dtype)
    s, bits = kernels.low_rank_rows(gate, call.empty), kernels.bits(gate, call.empty)
    x = whole[:, : group.inner]
    with call.on_device():
        made = has_tail_columns(whole, tail_columns, site.tail) and not (
            call.is_vacant or select.is_strict()
        )
        if not made:
            torch.mul(opened(rows), beside, out=x)
        if tokens and call.is_vacant:
            _product(x, group.weights[0].t(), biases[0], y)
        elif tokens:
            parts = (activation, [rows, beside]) if made else ("", None)
            call.serve(_forward, whole, tail_columns, biases, None, [y], s, bits, *parts)
    shape = gate.shape[:-1]
    return [y.view(*shape, site.outer), *s, *bits, whole.view(*shape, group.inner + tail_columns)]


def _forward(
    call: KernelCall,
    whole: Tensor,
    tail_columns: int,
    biases: list[Tensor | None],
    beside: Tensor | None,
    wide: list[Tensor],
    s: list[Tensor],
    bits: list[Tensor],
    activation: str = "",
    gated: list[Tensor] | None = None,
) -> None:
    sites, rows = call.kernel_group.sites, whole[:, : call.group.inner]
    together = joint(call) if len(wide) < len(sites) else None
    if together is not None and has_tail_columns(whole, tail_columns, together.tails):
        packed = call.pack(dict(enumerate(together.extended_weights)))
        call.shrink(rows, packed, s, bits, whole, together.step, copies=False)
        left = whole[:, : rows.shape[1] + together.tails]
        _product(left, together.upper.t(), beside, wide[0])
        return
    step = max(site.tail for site in sites)
    behind = has_tail_columns(whole, tail_columns, step * len(sites))
    wide = _columns(wide, sites)
    extended_weights = [call.extended(index, behind) for index in range(len(sites))]
    choices = [
        call.choose("forward", index, buffer is not None, behind)
        for index, buffer in enumerate(extended_weights)
    ]
    needed: dict[int, ExtendedWeight | None] = {}
    for index, buffer in enumerate(extended_weights):
        later = call.choose("input_gradient", index, buffer is not None, behind).plan
        concat = "concat" in (choices[index].plan, later)
        needed[index] = buffer if concat else None
    packed = call.pack(needed)
    extended = None
    if any(choice.plan == "concat" for choice in choices):
        extended = (
            whole if behind else call.empty(len(rows), rows.shape[1] + step, dtype=rows.dtype)
        )
    gate = Gate(activation, *gated) if gated else None
    call.shrink(rows, packed, s, bits, extended, step, copies=not behind, gate=gate)
    for index, (choice, y) in enumerate(zip(choices, wide, strict=True)):
        bias, weight = biases[index], call.group.weights[index]
        if choice.plan == "fused":
            call.forward(index, rows, bias, s[index], packed[index], y, choice.tile)
        elif choice.plan == "sidecar":
            call.expand([index], [s[index]], [packed[index].b], bias, y, accumulate=False)
            y.addmm_(rows, weight.t())
        else:
            assert extended is not None
            left = _beside(extended, rows.shape[1], index * step, sites[index].tail)
            right = _extended_weight(call, index, extended_weights[index])[: sites[index].outer].t()
            _product(left, right, bias, y)


@dataclass(frozen=True, slots=True)
class Joint:
    """Weights that stand in one buffer, one below the other.

    extended_weights   of the sites
    step    columns of each site's adapters
    upper   [sum of O, I + tails], the weights and Bᵀ behind each
    left    [sum of O + tails, I], the weights, then A of each site
    """

    extended_weights: list[ExtendedWeight]
    step: int
    upper: Tensor
    left: Tensor

    @property
    def tails(self) -> int:
        """Columns of all sites' adapters."""
        return self.step * len(self.extended_weights)


def joint(call: KernelCall) -> Joint | None:
    """The buffer of weights that `join` put together, None where it does not serve this call."""
    if not select.may_join():
        return None
    sites, weights, inner = call.kernel_group.sites, call.group.weights, call.group.inner
    step, outer, extended_weights = 0, 0, []
    for index, (weight, site) in enumerate(zip(weights, sites, strict=True)):
        buffer = extended_weight_of(weight, site, make=False)
        if buffer is None or not buffer.step:
            return None
        step = buffer.step
        if (buffer.first, buffer.beside) != (outer, inner + step * index):
            return None
        if index and buffer.buffer(weight).data_ptr() != weights[0].data_ptr():
            return None
        outer += site.outer
        extended_weights.append(buffer)
    if extended_weights[0].below != outer:  # other weights stand in the buffer, too
        return None
    whole, tails = extended_weights[0].buffer(weights[0]), step * len(extended_weights)
    return Joint(
        extended_weights, step, whole[:outer, : inner + tails], whole[: outer + tails, :inner]
    )


def _product(left: Tensor, right: Tensor, bias: Tensor | None, y: Tensor) -> None:
    if bias is None:
        torch.mm(left, right, out=y)
    else:
        torch.addmm(bias, left, right, out=y)


def _side_by_side(biases: list[Tensor | None], sites: Sequence[Site]) -> Tensor | None:
    """The biases of all sites in one, zero where a site has none."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    parts = [
        present[0].new_zeros(site.outer) if bias is None else bias
        for bias, site in zip(biases, sites, strict=True)
    ]
    return torch.cat(parts)


def _columns(values: list[Tensor], sites: Sequence[Site]) -> list[Tensor]:
    """A tensor a site: views of one that holds all side by side, if there is but one."""
    if len(values) == len(sites):
        return values
    outers = [site.outer for site in sites]
    return list(values[0][:, : sum(outers)].split_with_sizes(outers, 1))


def _beside(extended: Tensor, columns: int, first: int, tail: int) -> Tensor:
    """x and a site's S side by side: S of all but the first site moves up to x for its product.

    A product takes the columns that it sums over in one piece, and sites run one after another.
    """
    if first:
        behind = extended[:, columns:]
        behind[:, :tail].copy_(behind[:, first : first + tail])
    return extended[:, : columns + tail]


def _extended_weight(call: KernelCall, index: int, buffer: ExtendedWeight | None) -> Tensor:
    """[O + T, I + T] of a site, whatever the order of its strides."""
    site, weight = call.kernel_group.sites[index], call.group.weights[index]
    assert buffer is not None
    upright = buffer.buffer(stored_form(weight, site))
    whole = upright if site.layout == "out_in" else upright.t()
    return whole[: site.outer + site.tail, : site.inner + site.tail]


def input_gradient(
    dys: list[Tensor],
    group: SiteGroup,
    s: list[Tensor],
    bits: list[Tensor],
    need_dx: bool,
    tail_columns: int = 0,
) -> list[Tensor]:
    """dx or [0], then dS of each site, then dB's parts.

    dys    of each site, or one that holds all side by side
    tail_columns   columns at the end of each dy that are no gradient, for dS
    """
    first = dys[0]
    kernels = KernelGroup.of(first, group)
    wholes = [plain(dy) for dy in dys]
    tokens = len(wholes[0])
    call = KernelCall.open(kernels, group, tokens, first.device)
    dx = call.empty(*((tokens, group.inner) if need_dx else (0,)), dtype=first.dtype)
    ds = [call.empty(*rows.shape, dtype=rows.dtype) for rows in s]
    parts = kernels.gradient_parts(first, call.empty)
    with call.on_device():
        if tokens and call.is_vacant:
            if need_dx:
                _frozen_input_gradient(call, wholes, dx)
        elif tokens:
            out = dx if need_dx else None
            for db in _added_to(call, group):
                call.serve(_input_gradient, wholes, tail_columns, s, bits, out, ds, parts, db)
    return [dx.view(*first.shape[:-1], group.inner) if need_dx else dx, *ds, *parts]


def _added_to(call: KernelCall, group: SiteGroup) -> list[list[Tensor]]:
    """What `lora_b_backward` adds dB to, [] where it leaves parts; one, or all that rows may have.

    Kernels add dB of a short row where `adapter_gradients` will add dA.
    """
    targets = targets_of([*group.a, *group.b])
    if targets is None or not call.is_short:
        return [[]]
    # Whether gradients are added follows from a row's memory: all kernels are asked for.
    return [targets[len(group.a) :], *([[]] if ahead.is_on else [])]


def _frozen_input_gradient(call: KernelCall, wholes: list[Tensor], dx: Tensor) -> None:
    """dx of sites that nobody adapts."""
    sites = call.kernel_group.sites
    dys = [dy[:, : site.outer] for dy, site in zip(_columns(wholes, sites), sites, strict=True)]
    (first, weight), *others = zip(dys, call.group.weights, strict=True)
    torch.mm(first, weight, out=dx)
    for dy, weight in others:
        dx.addmm_(dy, weight)


def _input_gradient(
    call: KernelCall,
    wholes: list[Tensor],
    tail_columns: int,
    s: list[Tensor],
    bits: list[Tensor],
    dx: Tensor | None,
    ds: list[Tensor],
    parts: list[Tensor],
    db: list[Tensor],
) -> None:
    sites = call.kernel_group.sites
    if len(wholes) < len(sites):
        _joined_input_gradient(call, wholes[0], tail_columns, s, bits, dx, ds, parts, db)
        return
    extended: dict[int, tuple[Tensor, Tensor]] = {}
    rows, choices, packed = [], [], []
    lefts: list[Tensor | None] = []
    copies = []
    for index, (whole, site) in enumerate(zip(wholes, sites, strict=True)):
        dy = whole[:, : site.outer]
        behind = has_tail_columns(whole, tail_columns, site.tail)
        buffer = None if dx is None else call.extended(index, behind)
        choice = call.choose("input_gradient", index, buffer is not None, behind)
        concat = dx is not None and choice.plan == "concat"
        held, left = call.packed(index, buffer if concat else None), None
        if concat:
            columns = site.outer + site.tail
            left = whole if behind else call.empty(len(dy), columns, dtype=dy.dtype)
            right = _extended_weight(call, index, buffer)[:, : site.inner]
            extended[index] = left[:, :columns], right
        rows.append(dy)
        choices.append(choice)
        packed.append(held)
        lefts.append(left)
        copies.append(not behind)
    tails = [(site.outer, site.tail) for site in sites]
    call.lora_b_backward(rows, s, packed, parts, ds, lefts, copies, tails, db)
    if dx is not None:
        _add_up(call, rows, choices, packed, ds, bits, dx, extended)


def _joined_input_gradient(
    call: KernelCall,
    whole: Tensor,
    tail_columns: int,
    s: list[Tensor],
    bits: list[Tensor],
    dx: Tensor | None,
    ds: list[Tensor],
    parts: list[Tensor],
    db: list[Tensor],
) -> None:
    """All dys stand side by side in `whole`."""
    sites = call.kernel_group.sites
    outer, rows = sum(site.outer for site in sites), _columns([whole], sites)
    together = None if dx is None else joint(call)
    concat = None if call.group.drops else together
    if concat is not None and not has_tail_columns(whole, tail_columns, concat.tails):
        concat = None
    extended_weights = concat.extended_weights if concat is not None else [None] * len(sites)
    step = concat.step if concat is not None else 0
    packed = [call.packed(index, buffer) for index, buffer in enumerate(extended_weights)]
    lefts = [None if concat is None else whole] * len(sites)
    tails = [(outer + step * index, step) for index in range(len(sites))]
    call.lora_b_backward(rows, s, packed, parts, ds, lefts, [False] * len(sites), tails, db)
    if dx is None:
        return
    if together is None:
        choices = [
            call.choose("input_gradient", index, extended=False) for index in range(len(sites))
        ]
        _add_up(call, rows, choices, packed, ds, bits, dx, {})
    elif concat is not None:
        torch.mm(whole[:, : outer + concat.tails], concat.left, out=dx)
    else:
        _expand_all(call, ["sidecar"] * len(sites), packed, ds, bits, dx)
        dx.addmm_(whole[:, :outer], together.left[:outer])


def _add_up(
    call: KernelCall,
    rows: list[Tensor],
    choices: list[Choice],
    packed: list[Packed],
    ds: list[Tensor],
    bits: list[Tensor],
    dx: Tensor,
    extended: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """dx as the sum over the sites: expanded branches first, so that GEMMs add to what is there."""
    plans = [choice.plan for choice in choices]
    written = _expand_all(call, plans, packed, ds, bits, dx)
    for index, (dy, plan) in enumerate(zip(rows, plans, strict=True)):
        if plan == "sidecar":
            dx.addmm_(dy, call.group.weights[index])
        elif plan == "fused":
            call.input_gradient(
                index, dy, ds[index], packed[index], bits[index], dx, written,
                choices[index].tile,
            )  # fmt: skip
        elif written:
            dx.addmm_(*extended[index])
        else:
            torch.mm(*extended[index], out=dx)
        written = True


def _expand_all(
    call: KernelCall,
    plans: list[Plan],
    packed: list[Packed],
    ds: list[Tensor],
    bits: list[Tensor],
    dx: Tensor,
) -> bool:
    """The branches of sites of the sidecar plan, summed in dx; returns whether there are any."""
    written = False
    for indices in _together(call, plans):
        drops = call.kernel_group.sites[indices[0]].drops
        masks = [bits[index] for index in indices] if drops else None
        low, high = [ds[index] for index in indices], [packed[index].a for index in indices]
        call.expand(indices, low, high, None, dx, written, masks)
        written = True
    return written


def _together(call: KernelCall, plans: list[Plan]) -> list[list[int]]:
    """The sites of the sidecar plan, those together whose branches one kernel can add up."""
    groups: dict[int, list[list[int]]] = {}
    for index, plan in enumerate(plans):
        if plan == "sidecar":
            same_block = groups.setdefault(call.kernel_group.sites[index].rank_block, [[]])
            if len(same_block[-1]) == MAX_SITES:
                same_block.append([])
            same_block[-1].append(index)
    return [indices for same_block in groups.values() for indices in same_block]


def adapter_gradients(
    x: Tensor, group: SiteGroup, bits: list[Tensor], ds: list[Tensor], db_parts: list[Tensor]
) -> list[Tensor]:
    """da of each site, then db; zeros where they were added to what there is."""
    kernels = KernelGroup.of(x, group)
    rows = plain(x)
    tokens = len(rows)
    call = KernelCall.open(kernels, group, tokens, x.device)
    leaves = [*group.a, *group.b]
    targets = targets_of(leaves)
    if targets is None:
        found = [call.empty(*leaf.shape, dtype=leaf.dtype) for leaf in leaves]
        if not tokens or call.is_vacant:
            return [each.zero_() for each in found]
        _start(call, rows, bits, ds, db_parts, found, adds=False)
        return found
    if tokens and not call.is_vacant:
        # Whether gradients are added follows from a row's memory: all kernels are asked for.
        for adds in (True, False) if ahead.is_on else (True,):
            _start(call, rows, bits, ds, db_parts, targets, adds=adds)
    return [zeros_for(target) for target in targets]


def _start(
    call: KernelCall,
    rows: Tensor,
    bits: list[Tensor],
    ds: list[Tensor],
    db_parts: list[Tensor],
    found: list[Tensor],
    *,
    adds: bool,
) -> None:
    da, db = found[: len(ds)], found[len(ds) :]
    with call.on_device():
        call.serve(_adapter_gradients, rows, bits, ds, db_parts, da, db, adds)


def _adapter_gradients(
    call: KernelCall,
    rows: Tensor,
    bits: list[Tensor],
    ds: list[Tensor],
    db_parts: list[Tensor],
    da: list[Tensor],
    db: list[Tensor],
    adds: bool,
) -> None:
    if call.is_short:
        call.whole_gradients(rows, ds, bits, db_parts, da, db, adds)
        return
    total = torch.promote_types(torch.float32, rows.dtype)
    parts = [
        call.empty(site.chunks(call.tokens, call.row.jobs), site.width, site.inner, dtype=total)
        for site in call.kernel_group.sites
    ]
    call.lora_a_backward(rows, ds, bits, parts)
    call.sum_gradients(parts, db_parts, da, db, adds)


def has_tail_columns(whole: Tensor, tail_columns: int, columns: int) -> bool:
    """Whether so many columns stand behind each row of [tokens, n + tail_columns].

    Kernels write all of a row's tail columns, up to where the next row begins.
    """
    return tail_columns >= columns and whole.stride(0) == whole.shape[1]


def plain(value: Tensor) -> Tensor:
    """[tokens, columns] with rows, and addresses of rows, that bulk copies take."""
    rows = value.reshape(-1, value.shape[-1])
    step, unit = rows.stride()
    if unit == 1 and step >= rows.shape[1] and not (step | rows.data_ptr()) % _BYTES:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def add_forward(y: Tensor, x: Tensor, group: SiteGroup, kernels: KernelGroup) -> list[Tensor]:
    """y [..., out] and every job's branch; S, and the dropout bits."""
    rows, before = plain(x), plain(y)
    call = KernelCall.open(kernels, group, len(rows), x.device)
    total = call.empty(*before.shape, dtype=y.dtype)
    (s,), (bits,) = kernels.low_rank_rows(x, call.empty), kernels.bits(x, call.empty)
    with call.on_device():
        if len(rows):
            call.serve(_add_forward, rows, before, s, bits, total)
    return [total.view(y.shape), s, bits]


def _add_forward(
    call: KernelCall, rows: Tensor, before: Tensor, s: Tensor, bits: Tensor, total: Tensor
) -> None:
    (packed,) = call.pack({0: None})
    call.shrink(rows, [packed], [s], [bits], None)
    call.expand([0], [s], [packed.b], None, total, accumulate=True, before=before)


def add_input_gradient(
    dy: Tensor, group: SiteGroup, s: Tensor, bits: Tensor, need_dx: bool
) -> list[Tensor]:
    """Contribution of the branches to dx, or [0]; dS; the parts of dB."""
    kernels, rows = KernelGroup.of(dy, group), plain(dy)
    call = KernelCall.open(kernels, group, len(rows), dy.device)
    dx = call.empty(*((len(rows), group.inner) if need_dx else (0,)), dtype=dy.dtype)
    ds = call.empty(*s.shape, dtype=s.dtype)
    (parts,) = kernels.gradient_parts(dy, call.empty)
    with call.on_device():
        if len(rows):
            out = dx if need_dx else None
            for db in _added_to(call, group):
                call.serve(_add_input_gradient, rows, s, bits, out, ds, parts, db)
    return [dx.view(*dy.shape[:-1], group.inner) if need_dx else dx, ds, parts]


def _add_input_gradient(
    call: KernelCall,
    rows: Tensor,
    s: Tensor,
    bits: Tensor,
    dx: Tensor | None,
    ds: Tensor,
    parts: Tensor,
    db: list[Tensor],
) -> None:
    packed = call.packed(0)
    call.lora_b_backward([rows], [s], [packed], [parts], [ds], [None], [False], [(0, 0)], db)
    if dx is not None:
        mask = [bits] if call.kernel_group.sites[0].drops else None
        call.expand([0], [ds], [packed.a], None, dx, accumulate=False, bits=mask)
