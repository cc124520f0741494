"""Adapters as kernels read them, and columns for them behind weights, x and dy.

`pack` runs in every forward: optimizers write through views of a bank, which no version counter
sees. The backward of that step finds what the forward packed. Buffers belong to the pair (a, b)
and go when one of them does.

The plan concat-K (see dispatch.py) multiplies [x | S] by a weight with adapters behind it, which
is nearly free where S can stand right behind x and costs a copy of x where it cannot. Under
torch.compile whoever produces x can leave columns (see ops/tail_columns.py). What is produced by no
generated code, attention's output for one, is copied. This is decided when a graph is traced, by
shapes, strides and settings, never by the number of tokens. The operator takes the wider tensor and
`tail_columns`, the number of columns at its end that are its to write.

Weights that read one x, such as q, k and v, can stand in one buffer (`join`), one below the other:

    W_q | B_q
    W_k |     B_k
    W_v |         B_v
    A_q
    A_k
    A_v

Then [x | S_q S_k S_v] times its upper rows gives all y side by side in one product, and the dys,
side by side with all dS behind them, times its left columns give dx in another: no sum of three is
written three times, and narrow outputs leave no GPU half empty. Gate and up stand so too. Where
each site has at most 32 rows of adapters, these take whole rank blocks, and the buffer as many
multiples of 64 columns as hold those of all: one for q, k and v of a job of rank 16, whose products
then sum over 48 columns more. With 64 for each site they would multiply 3 % more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.kernels import select, support
from tlora_fx.ops.kernels.device_tables import SiteTables
from tlora_fx.ops.kernels.support import Site
from tlora_fx.ops.tables import SiteGroup
from tlora_fx.ops.tail_columns import teach_inductor

Key = tuple[object, ...]
# Wider tails cost more multiplications than the other plans cost writes.
WIDEST_TAIL = 128
# The same of the tails of joined weights, all of which each product sums over, and of wide ones.
WIDEST_JOINED_TAIL = 256
WIDEST_TAIL_OF_WIDE = 128


@dataclass(slots=True, eq=False, weakref_slot=True)
class Packed:
    """The packed adapters of a site.

    a, b     [P, in] and [P, out] in the compute dtype, a job's rows at its slots
    flags    float32 [P / rank block, strips], NaN where a block was not finite
    holds    what was packed; see `contents`
    """

    a: Tensor
    b: Tensor
    flags: Tensor
    holds: object = None


@dataclass(slots=True)
class ExtendedWeight:
    """A weight in a buffer with T more rows and columns, where adapters stand behind it.

    shape     of the buffer, [O + T, I + T], or [I + T, O + T] for a weight stored by columns
    below     rows from the weight's first to those of its adapters
    beside    columns from the weight's first to those of its adapters
    first     row of the buffer in which the weight begins, 0 unless it was joined behind others
    copy      the buffer, where it is ours and not the weight's own
    of        the weight that was copied, and its version
    step      where several weights share the buffer, the columns of each one's adapters; else 0
    holds     the packed adapters that its tail holds; see `contents`
    """

    shape: tuple[int, int]
    below: int
    beside: int
    first: int = 0
    copy: Tensor | None = None
    of: tuple[weakref.ref[Tensor], object] | None = None
    step: int = 0
    holds: object = None

    def tail(self, site: Site) -> int:
        """Rows and columns of a site's adapters in this buffer."""
        return self.step or site.tail

    def buffer(self, stored: Tensor) -> Tensor:
        """The buffer that a weight, as it is stored, lies in."""
        if self.copy is not None:
            return self.copy
        return stored.as_strided(self.shape, (self.shape[1], 1), 0)

    def around(self, stored: Tensor, site: Site) -> bool:
        """Whether a weight lies in this buffer, and the buffer is as large as its site needs."""
        (rows, columns), tail = self.shape, self.tail(site)
        bytes_there = stored.untyped_storage().nbytes() // stored.element_size()
        return (
            (stored.stride(), stored.storage_offset()) == ((columns, 1), self.first * columns)
            and bytes_there == rows * columns
            and _holds(tail, site)
            and rows - self.first - self.below >= tail
            and columns - self.beside >= tail
        )

    def place(self) -> Key:
        """Offsets and strides of a weight and its adapters, as far as launches depend on them."""
        return self.copy is None, self.first, self.below, self.beside, self.step


_packed: dict[Key, Packed] = {}
_extended: dict[Key, ExtendedWeight] = {}
_lock = threading.Lock()


def packed_for(a: Tensor, b: Tensor, site: Site, jobs: int) -> Packed:
    """The buffers of a pair of adapters; what they hold is in `holds`."""
    key = (a.data_ptr(), b.data_ptr(), a.device, site, jobs)
    held = _packed.get(key)
    if held is None:
        rows, dtype = site.packed_rows(jobs), getattr(torch, site.dtype)
        held = Packed(
            a.new_empty(rows, site.inner, dtype=dtype),
            b.new_empty(rows, site.outer, dtype=dtype),
            a.new_empty(rows // site.rank_block, site.strips, dtype=torch.float32),
        )
        with _lock:
            _packed[key] = held
        for tensor in (a, b):
            weakref.finalize(tensor, _packed.pop, key, None)
    return held


def contents(held: Packed, a: Tensor, b: Tensor, tables: SiteTables) -> object:
    """Key of what buffers hold after these adapters were packed: equal for the same adapters.

    Buffers and tables are told apart by references that do not keep them: numbers, such as their
    addresses, may be given to others once they are gone.
    """
    holders = weakref.ref(held), weakref.ref(tables)
    return stamp_of(a), stamp_of(b), tables.stamps, *holders


def stamp_of(value: Tensor) -> object:
    """The version of a tensor on a device; those of inference mode have none."""
    try:
        return value._version
    except RuntimeError:
        return None


def extend_weight(weight: Tensor, rows: int) -> Tensor:
    """The same weight inside a buffer with space for `rows` rows of adapters.

    weight    [out, in], stored by rows, or by columns as GPT-2's Conv1D is
    returns   a view of shape and order of strides as before; what the buffer holds behind it
              belongs to the kernels, so the plan concat-K needs no copy of this weight
    """
    turned = weight.stride(1) != 1
    stored = weight.t() if turned else weight
    first, second = stored.shape
    buffer = stored.new_zeros(first + rows, second + rows)
    buffer[:first, :second] = stored
    with _lock:
        _extended[_address_of(buffer)] = ExtendedWeight(
            (first + rows, second + rows), first, second
        )
    view = buffer[:first, :second]
    return view.t() if turned else view


def join(weights: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The same weights in one buffer, with space for `rows` rows of adapters of each.

    weights   [out, in] of linears that read one x, stored by rows
    returns   views of shapes as before
    """
    outers, inner = [weight.shape[0] for weight in weights], weights[0].shape[1]
    outer, more = sum(outers), joined_columns(rows, len(weights))
    step = columns_each(more, len(weights))
    shape = outer + more, inner + more
    buffer = weights[0].new_zeros(shape)
    views, first = [], 0
    for index, weight in enumerate(weights):
        view = buffer[first : first + len(weight), :inner]
        view.copy_(weight)
        below, beside = outer - first + step * index, inner + step * index
        with _lock:
            _extended[_address_of(view)] = ExtendedWeight(shape, below, beside, first, step=step)
        views.append(view)
        first += len(weight)
    return views


def joined_columns(rows: int, count: int) -> int:
    """Columns behind an x that `count` joined weights read, each with so many rows of adapters."""
    few = rows <= support.SMALL_RANK
    tail = -(-rows // support.GRANULE) * support.GRANULE if few else support.tail_of(rows)
    return support.tail_of(tail * count)


def columns_each(columns: int, count: int) -> int:
    """Columns of each weight's adapters among those of all of them."""
    return columns // count // support.GRANULE * support.GRANULE


def step_of(weights: Sequence[Tensor]) -> int:
    """Columns of each one's adapters where `join` made these weights, in this order; else 0.

    As far as strides tell: fake tensors have neither addresses nor the size of their storage, so
    calls make sure by `extended_weight_of`.
    """
    row, gap, offset = weights[0].stride(0), _gap(weights[0]), 0
    if len(weights) == 1 or gap != support.tail_of(gap) or gap > WIDEST_JOINED_TAIL:
        return 0
    for weight in weights:
        if weight.stride() != (row, 1) or weight.storage_offset() != offset:
            return 0
        offset += weight.shape[0] * row
    return columns_each(gap, len(weights))


def _holds(tail: int, site: Site) -> bool:
    """Whether a site's adapters fit a tail, which is written by whole rank blocks."""
    return tail >= site.rows and not tail % site.rank_block


def extended_weight_of(weight: Tensor, site: Site, make: bool) -> ExtendedWeight | None:
    """The buffer that a weight lies in, with space for the site's adapters.

    make   where there is none, keep a copy of the weight in one
    """
    stored = stored_form(weight, site)
    around = _extended.get(_address_of(weight))
    if around is not None and around.around(stored, site):
        return around
    first, second = stored.shape
    key = (*_address_of(weight), first, second, site.tail)
    copied = _extended.get(key)
    if copied is not None and copied.of is not None:
        source, version = copied.of
        if source() is weight and version == stamp_of(weight):
            return copied
    if not make:
        return None
    buffer = stored.new_zeros(first + site.tail, second + site.tail)
    buffer[:first, :second] = stored
    copy = ExtendedWeight((first + site.tail, second + site.tail), first, second, copy=buffer)
    copy.of = weakref.ref(weight), stamp_of(weight)
    with _lock:
        _extended[key] = copy
    weakref.finalize(weight, _extended.pop, key, None)
    return copy


def stored_form(weight: Tensor, site: Site) -> Tensor:
    """A weight with its rows contiguous: [O, I], or [I, O] where it is stored by columns."""
    return weight if site.layout == "out_in" else weight.t()


def _address_of(weight: Tensor) -> Key:
    return weight.data_ptr(), weight.device, weight.dtype


def tail_columns_of(rows: int) -> int:
    """Columns behind x for adapters of so many rows; 0 where there are too many of them."""
    tail = support.tail_of(rows)
    return tail if tail <= WIDEST_TAIL else 0


def extended_weight(weight: Tensor, adapter_rows: int) -> Tensor:
    """A frozen weight with space for adapters of so many rows, where kernels can use it.

    weight    [out, in]
    returns   a view of a buffer of its own with the same numbers, or the weight itself
    """
    tail = _tail_behind(weight, adapter_rows)
    return extend_weight(weight, tail) if tail else weight


def extended_weights(weights: Sequence[Tensor], adapter_rows: Sequence[int]) -> list[Tensor]:
    """`extended_weight` of linears that read one x, joined where that pays.

    Narrow ones, such as q, k and v, or wide ones, such as gate and up. Not both: autograd would
    keep narrow ones' y by keeping all, or have wide ones copied.
    """
    tails = [_tail_behind(*pair) for pair in zip(weights, adapter_rows, strict=True)]
    kinds = {(w.dtype, w.shape[1], w.device, is_wide(w)) for w in weights}
    most = WIDEST_TAIL_OF_WIDE if is_wide(weights[0]) else WIDEST_JOINED_TAIL
    rows = max(adapter_rows)
    fits = all(tails) and joined_columns(rows, len(tails)) <= most
    if len(weights) > 1 and len(kinds) == 1 and fits:
        return join(weights, rows)
    return [extended_weight(*pair) for pair in zip(weights, adapter_rows, strict=True)]


def is_wide(weight: Tensor) -> bool:
    """Whether a linear has more outputs than inputs."""
    return weight.shape[0] > weight.shape[1]


def _tail_behind(weight: Tensor, adapter_rows: int) -> int:
    """Rows and columns that a weight gets for adapters; 0 where it stays as it is."""
    # A piece of a sharded weight stands where FSDP2 wants it.
    whole = type(weight) in (Tensor, torch.nn.Parameter)
    able = whole and (weight.device.type == "cuda" or kernel_mode() == "interpret")
    rows, columns = weight.shape
    fits = weight.stride() == (columns, 1) and not (rows | columns) % support.GRANULE
    return tail_columns_of(adapter_rows) if able and fits and not select.is_strict() else 0


def joins(x: Tensor, group: SiteGroup) -> bool:
    """Whether the traced graph shall have all y, and all dy, side by side."""
    return _are_joined(_sites(x, group), group)


def behind_x(x: Tensor, group: SiteGroup) -> int:
    """Columns that the traced graph shall have behind x; 0: none."""
    sites = _sites(x, group)
    if _are_joined(sites, group):
        return _gap(group.weights[0])
    return max((site.tail for site in sites), default=0) * len(sites)


def behind_dy(dy: Tensor, group: SiteGroup, joined: bool = False) -> int:
    """The same behind each dy, or behind all; concat-K has no mask, so not where jobs drop."""
    sites = () if group.drops else _sites(dy, group)
    if joined:
        return _gap(group.weights[0]) if _are_joined(sites, group) else 0
    return max((site.tail for site in sites), default=0)


def _are_joined(sites: Sequence[Site], group: SiteGroup) -> bool:
    """Whether weights stand in one buffer, and all sites' adapters fit behind them."""
    step = step_of(group.weights) if sites else 0
    return step > 0 and all(_holds(step, site) for site in sites)


def _gap(stored: Tensor) -> int:
    """Columns between the end of a weight's row and the next one."""
    return stored.stride(0) - stored.shape[1]


def widen(values: list[Tensor], tail_columns: int) -> Tensor:
    """Tensors side by side, and so many columns behind them, which hold anything."""
    if len(values) == 1 and not tail_columns:
        return values[0]
    teach_inductor()
    widened: Tensor = torch.ops.tlora_fx.append_tail_columns.default(values, tail_columns)
    return widened


def narrow(value: Tensor, tail_columns: int) -> Tensor:
    """Input of `widen`, as a view of its result."""
    return value[..., : value.shape[-1] - tail_columns] if tail_columns else value


def is_traced() -> bool:
    """Whether a compiler traces what runs; torch.export is none, what it gives runs as it is."""
    tracing = torch._guards.TracingContext.try_get() is not None
    return (tracing and not torch.compiler.is_exporting()) or _as_compiled


_as_compiled = False


@contextmanager
def as_compiled(on: bool = True) -> Iterator[None]:
    """Whether inside, what runs as it is starts the kernels that it would start compiled."""
    global _as_compiled  # noqa: PLW0603  (backwards have a thread of their own)
    before, _as_compiled = _as_compiled, on
    try:
        yield
    finally:
        _as_compiled = before


def _sites(like: Tensor, group: SiteGroup) -> tuple[Site, ...]:
    """The sites of a group whose weights all are extended, () where concat-K is not to be had."""
    if not is_traced() or select.is_strict():
        return ()
    kernels = support.kernel_group(like, group)
    if kernels is None:
        return ()
    for site, weight in zip(kernels.sites, group.weights, strict=True):
        if not tail_columns_of(site.rows) or not _can_extend(weight, site):
            return ()
    return kernels.sites


def _can_extend(weight: Tensor, site: Site) -> bool:
    """Whether a weight's strides tell that adapters can stand behind it."""
    stored = stored_form(weight, site)
    return select.may_copy_weights() or _gap(stored) >= site.tail


def forget() -> None:
    """Drop all buffers; weights that `extend_weight` made keep theirs."""
    with _lock:
        _packed.clear()
        for key in [
            key for key, tail_columns in _extended.items() if tail_columns.copy is not None
        ]:
            del _extended[key]
