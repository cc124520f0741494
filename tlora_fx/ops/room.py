"""Room behind the rows of x and dy, for the plan concat-K (see kernels/plans.py).

That plan multiplies [x | S] by a weight with adapters behind it, which is nearly free where S can
stand right behind x and costs a copy of x where it cannot. Under torch.compile whoever produces x
can leave the room: a `cat` with an empty tensor becomes, in Inductor, a producer that writes into
a wider buffer. (A `pad` would be a kernel of its own behind a norm: its sizes differ from those of
the norm's sum.) What is produced by no generated code, attention's output for one, is copied.

Decided when a graph is traced, by shapes, strides and settings, never by the number of tokens. The
operator takes the wider tensor and `room`, the number of columns at its end that are its to write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora_fx.ops.kernels import packed, select, support
from tlora_fx.ops.kernels.support import Site
from tlora_fx.ops.site_group import SiteGroup

# Wider tails cost more multiplications than the other plans cost writes.
WIDEST_TAIL = 128


def tail_of(rows: int) -> int:
    """Columns behind x for adapters of so many rows; 0 where there are too many of them."""
    tail = support.tail_of(rows)
    return tail if tail <= WIDEST_TAIL else 0


def around(weight: Tensor, adapter_rows: int) -> Tensor:
    """A frozen weight with room for adapters of so many rows, where kernels can use it.

    weight    [out, in]
    returns   a view of a buffer of its own with the same numbers, or the weight itself
    """
    tail = tail_of(adapter_rows)
    served = weight.device.type == "cuda" or support.mode() == "interpret"
    rows, columns = weight.shape
    fits = weight.stride() == (columns, 1) and not (rows | columns) % support.GRANULE
    if not tail or not served or not fits or select.is_strict():
        return weight
    return packed.with_room(weight, tail)


def behind_x(x: Tensor, group: SiteGroup) -> int:
    """Columns of room that the traced graph shall have behind x; 0: none."""
    sites = _sites(x, group)
    return max((site.tail for site in sites), default=0) * len(sites)


def behind_dy(dy: Tensor, group: SiteGroup) -> int:
    """The same behind each dy; concat-K has no mask, so it gives no dx where jobs drop."""
    sites = () if group.drops else _sites(dy, group)
    return max((site.tail for site in sites), default=0)


def widen(value: Tensor, room: int) -> Tensor:
    """The same with so many columns more, which hold anything."""
    return torch.cat([value, value.new_empty(*value.shape[:-1], room)], -1) if room else value


def narrow(value: Tensor, room: int) -> Tensor:
    """What `widen` was given, as a view."""
    return value[..., : value.shape[-1] - room] if room else value


def is_traced() -> bool:
    """Whether a compiler traces what runs; torch.export is none, what it gives runs as it is."""
    tracing = torch._guards.TracingContext.try_get() is not None
    return tracing and not torch.compiler.is_exporting()


def _sites(like: Tensor, group: SiteGroup) -> tuple[Site, ...]:
    """The sites of a group whose weights all have room, () where concat-K is not to be had."""
    if not is_traced() or select.is_strict():
        return ()
    known = support.served(like, group)
    if known is None:
        return ()
    for site, weight in zip(known.sites, group.weights, strict=True):
        if not tail_of(site.rows) or not _is_roomy(weight, site):
            return ()
    return known.sites


def _is_roomy(weight: Tensor, site: Site) -> bool:
    """Whether a weight's strides tell that adapters can stand behind it."""
    stored = packed.stored_form(weight, site)
    return select.may_copy_weights() or stored.stride(0) - stored.shape[1] >= site.tail
