"""How a group of sites runs on generated kernels, forward and backward.

    fused     shrink, then one GEMM with the rank block in it
    sidecar   shrink, expand into the output, then cuBLAS adds the frozen product to it
    concat    cuBLAS over a longer sum, [x | S] [W | Bᵀ]ᵀ: x and S side by side, and the adapters
              in the room behind the weight

and for dx likewise with dy, dS and A; concat has no mask, so it serves dx without dropout only.
Where x or dy has room behind its rows (see ops/room.py), S and dS go there; else one site's x or
dy is copied while it is read. The selector takes one plan for each site and direction by the number
of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_fx.codegen.spec import MOST_SITES
from tlora_fx.ops.kernels.dispatch import Run
from tlora_fx.ops.kernels.packed import Packed, Room, stored_form
from tlora_fx.ops.kernels.select import Choice, Plan
from tlora_fx.ops.kernels.support import Served
from tlora_fx.ops.site_group import SiteGroup

_BYTES = 16


def forward(
    x: Tensor, biases: list[Tensor | None], group: SiteGroup, served: Served, room: int = 0
) -> list[Tensor]:
    """y of each site, then S, then the dropout bits.

    room   columns at the end of x that are no input, for S
    """
    whole = plain(x)
    tokens = len(whole)
    run = Run.open(served, group, tokens, x.device)
    wide = [run.empty(tokens, site.outer, dtype=x.dtype) for site in served.sites]
    s = [run.empty(tokens, site.width, dtype=x.dtype) for site in served.sites]
    octets = -(-group.inner // 8)
    bits = [
        run.empty(*((tokens, octets) if site.drops else (0,)), dtype=torch.uint8)
        for site in served.sites
    ]
    with run.on_device():
        if tokens:
            run.serve(_forward, whole, room, biases, wide, s, bits)
    shapes = [(*x.shape[:-1], site.outer) for site in served.sites]
    return [*(y.view(shape) for y, shape in zip(wide, shapes, strict=True)), *s, *bits]


def _forward(
    run: Run,
    whole: Tensor,
    room: int,
    biases: list[Tensor | None],
    wide: list[Tensor],
    s: list[Tensor],
    bits: list[Tensor],
) -> None:
    sites, rows = run.served.sites, whole[:, : run.group.inner]
    step = max(site.tail for site in sites)
    behind = has_room(whole, room, step * len(sites))
    rooms = [run.room(place, behind) for place in range(len(sites))]
    choices = [run.choose("forward", k, own is not None, behind) for k, own in enumerate(rooms)]
    packed = []
    for place, own in enumerate(rooms):
        later = run.choose("input_gradient", place, own is not None, behind).plan
        packed.append(run.pack(place, own if "concat" in (choices[place].plan, later) else None))
    extended = None
    if any(choice.plan == "concat" for choice in choices):
        extended = whole if behind else run.empty(len(rows), rows.shape[1] + step, dtype=rows.dtype)
    run.shrink(rows, packed, s, bits, extended, step, copies=not behind)
    for place, (choice, y) in enumerate(zip(choices, wide, strict=True)):
        bias, weight = biases[place], run.group.weights[place]
        if choice.plan == "fused":
            run.forward(place, rows, bias, s[place], packed[place], y, choice.tile)
        elif choice.plan == "sidecar":
            run.expand([place], [s[place]], [packed[place].b], bias, y, accumulate=False)
            y.addmm_(rows, weight.t())
        else:
            assert extended is not None
            left = _beside(extended, rows.shape[1], place * step, sites[place].tail)
            right = _extended_weight(run, place, rooms[place])[: sites[place].outer].t()
            if bias is None:
                torch.mm(left, right, out=y)
            else:
                torch.addmm(bias, left, right, out=y)


def _beside(extended: Tensor, columns: int, first: int, tail: int) -> Tensor:
    """x and a site's S side by side: S of all but the first site moves up to x for its product.

    A product takes the columns that it sums over in one piece, and sites run one after another.
    """
    if first:
        behind = extended[:, columns:]
        behind[:, :tail].copy_(behind[:, first : first + tail])
    return extended[:, : columns + tail]


def _extended_weight(run: Run, place: int, room: Room | None) -> Tensor:
    """[O + T, I + T] of a site, whatever the order of its strides."""
    site, weight = run.served.sites[place], run.group.weights[place]
    assert room is not None
    upright = room.buffer(stored_form(weight, site))
    whole = upright if site.layout == "out_in" else upright.t()
    return whole[: site.outer + site.tail, : site.inner + site.tail]


def input_gradient(
    dys: list[Tensor],
    group: SiteGroup,
    s: list[Tensor],
    bits: list[Tensor],
    need_dx: bool,
    room: int = 0,
) -> list[Tensor]:
    """dx or [0], then dS of each site, then dB's parts.

    room   columns at the end of each dy that are no gradient, for dS
    """
    first = dys[0]
    served = Served.of(first, group)
    wholes = [plain(dy) for dy in dys]
    tokens = len(wholes[0])
    run = Run.open(served, group, tokens, first.device)
    dx = run.empty(*((tokens, group.inner) if need_dx else (0,)), dtype=first.dtype)
    ds = [run.empty(*one.shape, dtype=one.dtype) for one in s]
    total = torch.promote_types(torch.float32, first.dtype)
    parts = [
        run.empty(site.chunks(tokens, served.jobs), site.width, site.outer, dtype=total)
        for site in served.sites
    ]
    with run.on_device():
        if tokens:
            out = dx if need_dx else None
            run.serve(_input_gradient, wholes, room, s, bits, out, ds, parts)
    return [dx.view(*first.shape[:-1], group.inner) if need_dx else dx, *ds, *parts]


def _input_gradient(
    run: Run,
    wholes: list[Tensor],
    room: int,
    s: list[Tensor],
    bits: list[Tensor],
    dx: Tensor | None,
    ds: list[Tensor],
    parts: list[Tensor],
) -> None:
    extended: dict[int, tuple[Tensor, Tensor]] = {}
    rows, choices, packed = [], [], []
    for place, (whole, site) in enumerate(zip(wholes, run.served.sites, strict=True)):
        dy = whole[:, : site.outer]
        behind = has_room(whole, room, site.tail)
        own = None if dx is None else run.room(place, behind)
        choice = run.choose("input_gradient", place, own is not None, behind)
        concat = dx is not None and choice.plan == "concat"
        held, left = run.packed(place, own if concat else None), None
        if concat:
            columns = site.outer + site.tail
            left = whole if behind else run.empty(len(dy), columns, dtype=dy.dtype)
            extended[place] = left[:, :columns], _extended_weight(run, place, own)[:, : site.inner]
        run.lora_b_backward(place, dy, s[place], held, parts[place], ds[place], left, not behind)
        rows.append(dy)
        choices.append(choice)
        packed.append(held)
    if dx is not None:
        _add_up(run, rows, choices, packed, ds, bits, dx, extended)


def _add_up(
    run: Run,
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
    written = False
    for places in _together(run, plans):
        drops = run.served.sites[places[0]].drops
        masks = [bits[place] for place in places] if drops else None
        low, high = [ds[place] for place in places], [packed[place].a for place in places]
        run.expand(places, low, high, None, dx, written, masks)
        written = True
    for place, (dy, plan) in enumerate(zip(rows, plans, strict=True)):
        if plan == "sidecar":
            dx.addmm_(dy, run.group.weights[place])
        elif plan == "fused":
            run.input_gradient(
                place, dy, ds[place], packed[place], bits[place], dx, written,
                choices[place].tile,
            )  # fmt: skip
        elif written:
            dx.addmm_(*extended[place])
        else:
            torch.mm(*extended[place], out=dx)
        written = True


def _together(run: Run, plans: list[Plan]) -> list[list[int]]:
    """The sites of the sidecar plan, those together whose branches one kernel can add up."""
    groups: dict[int, list[list[int]]] = {}
    for place, plan in enumerate(plans):
        if plan == "sidecar":
            found = groups.setdefault(run.served.sites[place].rank_block, [[]])
            if len(found[-1]) == MOST_SITES:
                found.append([])
            found[-1].append(place)
    return [one for found in groups.values() for one in found]


def adapter_gradients(
    x: Tensor, group: SiteGroup, bits: list[Tensor], ds: list[Tensor], db_parts: list[Tensor]
) -> list[Tensor]:
    """da of each site, then db."""
    served = Served.of(x, group)
    rows = plain(x)
    tokens = len(rows)
    run = Run.open(served, group, tokens, x.device)
    da = [run.empty(*a.shape, dtype=a.dtype) for a in group.a]
    db = [run.empty(*b.shape, dtype=b.dtype) for b in group.b]
    if not tokens:
        return [one.zero_() for one in (*da, *db)]
    with run.on_device():
        run.serve(_adapter_gradients, rows, bits, ds, db_parts, da, db)
    return [*da, *db]


def _adapter_gradients(
    run: Run,
    rows: Tensor,
    bits: list[Tensor],
    ds: list[Tensor],
    db_parts: list[Tensor],
    da: list[Tensor],
    db: list[Tensor],
) -> None:
    total = torch.promote_types(torch.float32, rows.dtype)
    parts = [
        run.empty(site.chunks(run.tokens, run.row.jobs), site.width, site.inner, dtype=total)
        for site in run.served.sites
    ]
    run.lora_a_backward(rows, ds, bits, parts)
    for place in range(len(parts)):
        run.sum_gradients(place, parts[place], db_parts[place], da[place], db[place])


def has_room(whole: Tensor, room: int, columns: int) -> bool:
    """Whether so many columns stand behind each row of [tokens, n + room].

    Kernels write all of a row's room, up to where the next row begins.
    """
    return room >= columns and whole.stride(0) == whole.shape[1]


def plain(value: Tensor) -> Tensor:
    """[tokens, columns] with rows, and addresses of rows, that bulk copies take."""
    rows = value.reshape(-1, value.shape[-1])
    step, unit = rows.stride()
    if unit == 1 and step >= rows.shape[1] and not (step | rows.data_ptr()) % _BYTES:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
