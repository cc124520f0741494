"""The launches of one call of an operator: kernels found, tables on the device, adapters packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlora_fx.codegen.kernels import emitter, shrink
from tlora_fx.codegen.launching import KernelLaunch, Start, tape
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import MOST_SITES, KernelSpec, Kind, Tile
from tlora_fx.errors import AdapterTableError
from tlora_fx.ops.adapter_tables import check_fit
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.device_tables import (
    RowTables,
    SiteTables,
    check_masks,
    row_tables,
    site_tables,
)
from tlora_fx.ops.kernels.packed import Packed, Room, contents, packed_for, room_of, stored_form
from tlora_fx.ops.kernels.select import Choice, Plan
from tlora_fx.ops.kernels.support import SMALL_RANK, Served, Site
from tlora_fx.ops.site_group import SiteGroup, named

# The launchers of the kernels of a site, by kind, site and tile.


@lru_cache(maxsize=4096)
def kernel(kind: Kind, site: Site, tile: Tile | None, **fields: Any) -> Callable[..., None]:
    """The launcher of a kernel; `fields` of its spec beside those that the site gives."""
    return load(spec_of(kind, site, tile, **fields)).launch


@lru_cache(maxsize=4096)
def loaded(spec: KernelSpec) -> Callable[..., None]:
    """The launcher of a spec."""
    return load(spec).launch


@lru_cache(maxsize=4096)
def spec_of(kind: Kind, site: Site, tile: Tile | None, **fields: Any) -> KernelSpec:
    """A kernel's spec."""
    given: dict[str, Any] = {
        "inner": site.inner,
        "outer": site.outer,
        "dtype": site.dtype,
        "rank_block": site.rank_block,
        "job_capacity": site.job_capacity,
        "arch": site.arch,
    }
    return KernelSpec(kind, **given | fields, tile=tile)


@cache
def bare_spec(kind: Kind, site: Site) -> KernelSpec:
    """A spec that tells no more than what a rule for tiles reads."""
    return KernelSpec(
        kind, site.inner, site.outer, site.dtype, rank_block=site.rank_block, arch=site.arch
    )


# Start what a call of an operator starts without deciding it again.
#
# Between two calls for rows of equal length only addresses differ. The second call of a kind is
# written down: each launch, and each product of cuBLAS, with its arguments as places in the call's
# own tensors. Later calls start the same with the addresses of theirs. A recipe holds no address
# and no tensor, so it serves all layers of a shape.
#
# Whatever cannot be told from the call's own tensors is not written down, and runs as it is.


_ALIGNED = 15
_MOST_BOXES = 64
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


class NotTold(Exception):
    """Something was started with what none of the call's tensors holds."""


@dataclass(slots=True)
class Recording:
    """What a call starts, as it happens.

    entries   Started of kernels and products
    fresh     tensors that the call made on its way
    fault     why it cannot be started again, or ""
    packs     places of sites whose adapters are packed, and whether into the weight's room too
    needs     the same of adapters that must be packed before
    """

    entries: list[KernelLaunch] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    fault: str = ""
    packs: list[tuple[int, bool]] = field(default_factory=list)
    needs: list[tuple[int, bool]] = field(default_factory=list)

    def made(self, make: Callable[[], Tensor]) -> Tensor:
        """A new tensor, noted as one."""
        with tape.away():
            tensor = make()
        self.fresh.append(tensor)
        return tensor

    @contextmanager
    def on(self) -> Iterator[None]:
        """Write down what this thread starts."""
        before, tape.started = tape.started, self.entries
        try:
            with _Watch(self):
                yield
        finally:
            tape.started = before

    def recipe(self, tensors: Sequence[Tensor]) -> Recipe:
        """How to do the same with other tensors in the place of these; raises NotTold."""
        if self.fault:
            raise NotTold(self.fault)
        places = _Places([*tensors, *self.fresh])
        steps = [
            _launch(one, places) if one.by_address else _call(one, places) for one in self.entries
        ]
        fresh = [(one.shape, one.dtype) for one in self.fresh]
        return Recipe(steps, fresh, self.packs, self.needs)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down torch's own operators where they write into given tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result, recording = func(*args, **kwargs), self.recording
        if tape.started is None:
            return result
        given = (*args, *kwargs.values())
        if func._schema.is_mutable and not any(isinstance(one, list | tuple) for one in given):
            again = _again_replaying(func, len(args), tuple(kwargs))
            recording.entries.append(KernelLaunch(again, given, by_address=False))
        elif func._schema.is_mutable or not _is_view(func, result):
            recording.fault = str(func)
        return result


def _is_view(func: Any, result: Any) -> bool:
    """Whether an operator that writes nothing makes no tensor but views; or none at all."""
    return not isinstance(result, Tensor | list | tuple) or all(
        one.alias_info is not None for one in func._schema.returns
    )


def _again_replaying(func: Any, count: int, names: tuple[str, ...]) -> Start:
    def start(_: int, given: Sequence[Any]) -> None:
        func(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return start


Step = Callable[[Sequence[Tensor], Sequence[int], int], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a call starts.

    steps          in order
    fresh          shape and type of the tensors that the call makes on its way
    packs, needs   as in Recording
    """

    steps: list[Step]
    fresh: list[tuple[torch.Size, torch.dtype]]
    packs: list[tuple[int, bool]]
    needs: list[tuple[int, bool]]

    def serve(
        self, tensors: list[Tensor], make: Callable[..., Tensor], stream: int, loose: int
    ) -> bool:
        """Start all; False where an address is not what kernels were compiled for.

        tensors   the call's; `loose` of them, the first, may begin anywhere
        make      gives a tensor of a shape and type
        """
        for shape, dtype in self.fresh:
            tensors.append(make(*shape, dtype=dtype))
        addresses = [tensor.data_ptr() for tensor in tensors]
        low = 0
        for address in addresses[loose:]:
            low |= address
        if low & _ALIGNED:
            return False
        for step in self.steps:
            step(tensors, addresses, stream)
        return True


class _Places:
    """Finds addresses in a call's tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.spans = [(one.data_ptr(), _extent(one)) for one in tensors]

    def find(self, tensor: Tensor) -> tuple[int, int]:
        """The one tensor that an address lies in, and how many bytes behind its start."""
        address = tensor.data_ptr()
        same = [place for place, (start, _) in enumerate(self.spans) if start == address]
        found = same or [
            place
            for place, (start, extent) in enumerate(self.spans)
            if start < address < start + extent
        ]
        if len(found) != 1:
            raise NotTold(f"{len(found)} tensors of the call hold an argument")
        return found[0], address - self.spans[found[0]][0]


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Base:
    """Stands for the tensor of a descriptor, of which Triton reads the address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _launch(one: KernelLaunch, places: _Places) -> Step:
    """A kernel's launch with addresses."""
    fixed: list[Any] = list(one.arguments)
    moving: list[tuple[int, int, int]] = []
    boxes: list[tuple[int, int, int, Any, dict[int, Any]]] = []
    for place, value in enumerate(one.arguments):
        if isinstance(value, Tensor):
            fixed[place] = 0
            if value.numel():
                moving.append((place, *places.find(value)))
        elif hasattr(value, "block_shape"):
            like = copy(value)
            like.base = fixed[place] = None
            boxes.append((place, *places.find(value.base), like, {}))
    start = one.start

    def step(_: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        given = fixed.copy()
        for place, source, offset in moving:
            given[place] = addresses[source] + offset
        for place, source, offset, like, known in boxes:
            address = addresses[source] + offset
            box = known.get(address)
            if box is None:
                if len(known) >= _MOST_BOXES:
                    known.clear()
                box = known[address] = copy(like)
                box.base = _Base(address)
            given[place] = box
        start(stream, given)

    return step


def _call(one: KernelLaunch, places: _Places) -> Step:
    """A product of torch's, or an interpreted kernel, with tensors."""
    moving: list[tuple[int, int, int, Geometry, Any]] = []
    for place, value in enumerate(one.arguments):
        box = value if hasattr(value, "block_shape") else None
        tensor = value if box is None else value.base
        if isinstance(tensor, Tensor):
            like = copy(box)
            if like is not None:
                like.base = None
            moving.append((place, *places.find(tensor), _geometry(tensor), like))
    start, fixed = one.start, list(one.arguments)
    for place, *_ in moving:
        fixed[place] = None
    direct = [
        offset == 0 and geometry == _geometry(places.tensors[source])
        for _, source, offset, geometry, _ in moving
    ]

    def step(tensors: Sequence[Tensor], _: Sequence[int], stream: int) -> None:
        given = fixed.copy()
        for same, (place, source, offset, geometry, box) in zip(direct, moving, strict=True):
            value: Any = tensors[source]
            if not same:
                value = _seen(value, offset, geometry)
            if box is not None:
                like = copy(box)
                like.base = value
                value = like
            given[place] = value
        start(stream, given)

    return step


def _seen(tensor: Tensor, offset: int, geometry: Geometry) -> Tensor:
    """A view of a tensor's storage that begins `offset` bytes behind it."""
    dtype, shape, stride = geometry
    if dtype == tensor.dtype:
        first = tensor.storage_offset() + offset // tensor.element_size()
        return tensor.as_strided(shape, stride, first)
    first = tensor.storage_offset() * tensor.element_size() + offset
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), first // view.element_size(), shape, stride)


# Serve a call by what an earlier one of its kind started, or note what it starts.
#
# Which plan, tile and kernel serves a call, on which grid, follows from shapes, strides and
# settings. These are the key under which recipes (see replaying.py) are kept, with the group's
# shapes.


logger = logging.getLogger("tlora_fx.kernels")
_MOST = 2048
_TRIES = 3
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def serve(run: Run, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """function(run, *args), or what it started for arguments like these."""
    tensors, key = _described(run, function, args)
    known = run.served.recipes
    found = known.get(key, 0)
    if isinstance(found, Recipe):
        if _again(run, found, tensors):
            return
    elif found == 0:
        # Not the first time: lengths that never come again are many.
        if len(known) >= _MOST:
            known.clear()
        known[key] = 1
    elif found <= _TRIES:
        known[key] = found + 1
        _record(run, key, tensors, partial(function, run, *args))
        return
    function(run, *args)


def _described(run: Run, function: object, args: Sequence[Any]) -> tuple[list[Tensor], object]:
    """All tensors whose addresses a kernel can get, and what launches depend on else.

    token_index comes first: it alone may begin anywhere.
    """
    group, tables = run.group, run.tables
    tensors = [run.token_index]
    plain: list[object] = [function, select.facts(), run.device.index, run.row.jobs]
    for one in args:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, list):
            here = [each for each in one if each is not None]
            tensors += here
            if len(here) < len(one):
                plain.append(tuple(each is None for each in one))
            plain.append(len(one))
        else:
            plain.append(one)
    tensors += (*group.weights, *group.a, *group.b)
    for one in tensors:
        plain += (one.shape, one.stride())
    if group.drops:
        plain += [one.site for one in tables]
    # From here on tensors are ours, of shapes that follow from those above.
    for place in range(len(group.weights)):
        room = _room(run, place)
        plain.append(None if room is None else room.copy is None)
        if room is not None and room.copy is not None:
            tensors.append(room.copy)
    tensors.append(run.row.words)
    for place, one in enumerate(tables):
        held = run.held(place)
        tensors += (one.words, held.a, held.b, held.flags)
    return tensors, tuple(plain)


def _record(run: Run, key: object, tensors: list[Tensor], call: Callable[[], None]) -> None:
    run.recording = recording = Recording()
    try:
        with recording.on():
            call()
    finally:
        run.recording = None
    try:
        run.served.recipes[key] = recording.recipe(tensors)
    except NotTold as reason:
        logger.debug("not started again from a recipe: %s", reason)


def _again(run: Run, recipe: Recipe, tensors: list[Tensor]) -> bool:
    """Whether a recipe could serve this call."""
    for place, roomy in recipe.needs:
        if not run.is_packed(place, _room(run, place) if roomy else None):
            return False
    stream = _stream(run.device.index) if run.device.type == "cuda" else 0
    if not recipe.serve(tensors, run.empty, stream, 1):
        return False
    for place, roomy in recipe.packs:
        run.note_packed(place, _room(run, place) if roomy else None)
    return True


def _room(run: Run, place: int) -> Room | None:
    """The room of a site's weight, if it has one."""
    return room_of(run.group.weights[place], run.served.sites[place], make=False)


_HERE = nullcontext()
_HOPPER = 90
_MANY_TOKENS = 1 << 20

# Makes the tensors that kernels fill; tests put NaN into them.
empty: Callable[..., Tensor] = torch.empty


@dataclass(slots=True)
class Run:
    """One call on a group of sites.

    row, tables   on the device, of the row and of each site
    token_index   int32 [tokens]
    gpu           the device's name, "" for the CPU
    capturing     whether a CUDA graph is captured
    recording     what is written down of this call, if anything
    helds         the sites' packed adapters that were asked for
    """

    served: Served
    group: SiteGroup
    tokens: int
    device: torch.device
    row: RowTables
    tables: list[SiteTables]
    token_index: Tensor
    gpu: str
    capturing: bool = False
    recording: Recording | None = None
    helds: dict[int, Packed] = field(default_factory=dict)

    @classmethod
    def open(cls, served: Served, group: SiteGroup, tokens: int, device: torch.device) -> Run:
        """Check and mirror all tables; raises as `multi_lora_linear`, naming the site."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        try:
            row = row_tables(group.segments, group.keys, tokens, device, capturing)
        except Exception:
            with named(group.sites[0]):
                raise
        tables = []
        for place, site in enumerate(served.sites):
            own = group.ranks[place], group.scales[place], group.rates[place], group.sites[place]
            try:
                found = site_tables(own, site.rows, site.rank_block, device, capturing)
                _check(found, row, group, tokens)
            except Exception:
                with named(group.sites[place]):
                    raise
            tables.append(found)
        index = group.token_index.reshape(-1)
        if index.dtype != torch.int32:
            index = index.to(torch.int32)
        return cls(served, group, tokens, device, row, tables, index, gpu_name(device), capturing)

    def on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        if self.device.type != "cuda" or self.device.index == torch._C._cuda_getDevice():
            return _HERE
        return torch.cuda.device(self.device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that a kernel fills."""
        if self.recording is None:
            return empty(shape, dtype=dtype, device=self.device)
        return self.recording.made(partial(empty, shape, dtype=dtype, device=self.device))

    def serve(self, function: Callable[..., None], *args: Any) -> None:
        """function(self, *args), or what it started for arguments like these; see replaying.py.

        args   tensors, lists of tensors or None, and plain values

        The function may change nothing but what its kernels write, and what `pack` notes.
        """
        if self.capturing:
            function(self, *args)
        else:
            serve(self, function, args)

    def choose(
        self, direction: select.Direction, place: int, room: bool, behind: bool = False
    ) -> select.Choice:
        """The plan of a site; `behind` tells whether x or dy has room behind its rows."""
        site = self.served.sites[place]
        sharing = len(self.served.sites)
        return select.choose(direction, site, self.tokens, room, self.gpu, sharing, behind)

    def room(self, place: int, behind: bool = False) -> Room | None:
        """Where concat-K can have a site's weight.

        Without room `behind` x or dy it would copy them, which pays for one site at most.
        """
        if len(self.served.sites) > 1 and not behind:
            return None
        weight, site = self.group.weights[place], self.served.sites[place]
        return room_of(weight, site, select.may_copy_weights())

    def pack(self, place: int, room: Room | None = None) -> Packed:
        """Pack a site's adapters, and into the tail of its weight's room."""
        site, tables = self.served.sites[place], self.tables[place]
        a, b = self.group.a[place].contiguous(), self.group.b[place].contiguous()
        held = self.held(place)
        tail, fields = None, {}
        if room is not None:
            stored = stored_form(self.group.weights[place], site)
            whole = room.buffer(stored)
            tail = whole[: stored.shape[0] + site.tail]
            fields = {"extend": "tail", "weight_layout": site.layout}
        launch = kernel("pack", site, None, adapter_dtype=site.adapter_dtype, **fields)
        launch(
            a, b, tables.ranks, tables.slots, self.row.jobs, held.a, held.b, held.flags, tail
        )  # fmt: skip
        self.note_packed(place, room)
        if self.recording is not None:
            self.recording.packs.append((place, room is not None))
        return held

    def held(self, place: int) -> Packed:
        """The buffers of a site's packed adapters, whatever they hold."""
        if (held := self.helds.get(place)) is None:
            a, b = self.group.a[place], self.group.b[place]
            held = packed_for(a, b, self.served.sites[place], self.row.jobs)
            self.helds[place] = held
        return held

    def note_packed(self, place: int, room: Room | None) -> None:
        """Note that buffers, and a room, hold the adapters as they are now."""
        held = self.held(place)
        held.holds = contents(held, self.group.a[place], self.group.b[place], self.tables[place])
        if room is not None:
            room.holds = held.holds

    def is_packed(self, place: int, room: Room | None) -> bool:
        """Whether a site's adapters, and its weight's room, hold what is to be packed."""
        held = self.held(place)
        now = contents(held, self.group.a[place], self.group.b[place], self.tables[place])
        return held.holds == now and (room is None or room.holds == now)

    def packed(self, place: int, room: Room | None = None) -> Packed:
        """What the forward packed, packed again where something has changed since."""
        current = self.is_packed(place, room)
        if self.recording is not None:
            self.recording.needs.append((place, room is not None))
            self.recording.fault = self.recording.fault if current else "adapters changed"
        return self.held(place) if current else self.pack(place, room)

    def shrink(
        self,
        rows: Tensor,
        packed: Sequence[Packed],
        s: Sequence[Tensor],
        bits: Sequence[Tensor],
        extended: Tensor | None = None,
        step: int = 0,
        copies: bool = True,
    ) -> None:
        """S and the bits of all sites; in `extended` also x and S side by side.

        step     columns from one site's S to the next one's there
        copies   whether x is not there yet
        """
        for places in self.together():
            first = self.served.sites[places[0]]
            fields: dict[str, Any] = {"dropout": first.drops, "sites": len(places)}
            tail: dict[str, Any] = {}
            if extended is not None:
                fields["extend"] = "copy" if copies else "tail"
                tail = {
                    "extended": extended,
                    "ranks": [self.tables[place].ranks for place in places],
                    "tail_offsets": [step * place for place in places],
                    "tail_widths": [self.served.sites[place].tail for place in places],
                }
            width = max(self.served.sites[place].width for place in places)
            whole = extended is not None and len(places) > 1
            spec = spec_of("shrink", first, None, **fields)
            tile = self.tile("shrink", first, len(places))
            if tile is None and not select.is_strict():
                # Few programs of a whole row each would wait long: they leave shares of S.
                tile = shrink.tile_for(spec, _MANY_TOKENS if whole else self.tokens, width)
            if tile is not None and (whole or tile.slab >= first.inner):
                tile = replace(tile, slab=0)
            slabs = -(-first.inner // tile.slab) if tile and tile.slab else 0
            wide = torch.promote_types(torch.float32, rows.dtype)
            sums = [s[place] for place in places]
            if slabs:
                sums = [self.empty(slabs, *one.shape, dtype=wide) for one in sums]
            kernel("shrink", first, tile, **fields)(
                rows,
                [packed[place].a for place in places],
                [packed[place].flags for place in places],
                self.row.segments,
                self.row.keys,
                self.token_index,
                [self.tables[place].slots for place in places],
                [self.tables[place].scales for place in places],
                [self.tables[place].thresholds for place in places],
                [self.tables[place].site for place in places],
                self.row.jobs,
                sums,
                [bits[place] for place in places],
                **tail,
            )
            for place, parts in zip(places, sums if slabs else [], strict=slabs > 0):
                self._finish(place, replace(spec, tile=tile), parts, packed[place], s[place], tail)

    def _finish(
        self, place: int, spec: KernelSpec, parts: Tensor, packed: Packed, s: Tensor,
        tail: dict[str, Any],
    ) -> None:  # fmt: skip
        """S of a site out of the shares that `shrink` left."""
        tables = self.tables[place]
        own = shrink.finish(replace(spec, outer=self.served.sites[place].outer))
        behind = {"ranks": tables.ranks, "extended": tail["extended"]} if tail else {}
        loaded(own)(
            parts, packed.flags, self.row.segments, tables.slots, tables.scales, self.row.jobs, s,
            **behind,
        )  # fmt: skip

    def together(self) -> list[list[int]]:
        """Sites whose kernels share one read of x."""
        groups: dict[int, list[list[int]]] = {}
        for place, site in enumerate(self.served.sites):
            open_groups = groups.setdefault(site.rank_block, [[]])
            # With masks of a fourth site registers do not suffice.
            crowded = site.drops and site.rank_block > SMALL_RANK and site.arch != _HOPPER
            if len(open_groups[-1]) == MOST_SITES - crowded:
                open_groups.append([])
            open_groups[-1].append(place)
        return [one for found in groups.values() for one in found]

    def forward(
        self, place: int, rows: Tensor, bias: Tensor | None, s: Tensor, packed: Packed, y: Tensor,
        tile: Tile | None,
    ) -> None:  # fmt: skip
        """y = x Wᵀ + bias + S B in one GEMM."""
        site, tables = self.served.sites[place], self.tables[place]
        weight = stored_form(self.group.weights[place], site)
        fields = {"bias": bias is not None, "weight_layout": site.layout}
        kernel("forward", site, tile, **fields)(
            rows, weight, bias, s, packed.b, self.row.segments, tables.slots, self.row.jobs, y
        )

    def input_gradient(
        self, place: int, dy: Tensor, ds: Tensor, packed: Packed, bits: Tensor, dx: Tensor,
        accumulate: bool, tile: Tile | None,
    ) -> None:  # fmt: skip
        """dx = dy W + mask∘(dS A), or added to dx, in one GEMM."""
        site, tables = self.served.sites[place], self.tables[place]
        weight = stored_form(self.group.weights[place], site)
        fields = {
            "dropout": site.drops, "accumulate": accumulate, "weight_layout": site.layout,
        }  # fmt: skip
        kernel("input_gradient", site, tile, **fields)(
            dy, weight, ds, packed.a, self.row.segments, tables.slots, tables.thresholds, bits,
            self.row.jobs, dx,
        )  # fmt: skip

    def lora_b_backward(
        self, place: int, dy: Tensor, s: Tensor, packed: Packed, db_parts: Tensor, ds: Tensor,
        extended: Tensor | None, copies: bool = True,
    ) -> None:  # fmt: skip
        """dS, and dB's parts, by one read of dy; in `extended` also dy and dS side by side.

        copies   whether dy is not there yet
        """
        site, tables = self.served.sites[place], self.tables[place]
        tile = self.tile("lora_b_backward", site) or emitter("lora_b_backward").default_tile(
            bare_spec("lora_b_backward", site)
        )
        slabs = -(-site.outer // tile.slab)
        parts = self.empty(slabs, self.tokens, site.width, dtype=db_parts.dtype)
        copied = extended if copies else None
        copy = {} if copied is None else {"extend": "copy"}
        kernel("lora_b_backward", site, tile, **copy)(
            dy, s, packed.b, self.row.segments, tables.slots, self.row.jobs, parts, db_parts,
            copied,
        )  # fmt: skip
        rule = emitter("sum_ds").default_tile(bare_spec("sum_ds", site))
        tail = {} if extended is None else {"extended": extended, "ranks": tables.ranks}
        fields = {} if extended is None else {"extend": "tail"}
        kernel("sum_ds", site, replace(rule, slab=tile.slab), **fields)(
            parts, packed.flags, self.row.segments, tables.slots, tables.scales, self.row.jobs,
            ds, **tail,
        )  # fmt: skip

    def lora_a_backward(
        self, rows: Tensor, ds: Sequence[Tensor], bits: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> None:
        """dA's parts of all sites by one read of x."""
        for places in self.together():
            first = self.served.sites[places[0]]
            fields = {"dropout": first.drops, "sites": len(places)}
            kernel(
                "lora_a_backward", first, self.tile("lora_a_backward", first, len(places)), **fields
            )(
                rows,
                [ds[place] for place in places],
                [bits[place] for place in places],
                self.row.segments,
                [self.tables[place].slots for place in places],
                [self.tables[place].thresholds for place in places],
                self.row.jobs,
                [parts[place] for place in places],
            )

    def sum_gradients(
        self, place: int, da_parts: Tensor, db_parts: Tensor, da: Tensor, db: Tensor
    ) -> None:
        """dA and dB from their parts, in the order of chunks."""
        site, tables = self.served.sites[place], self.tables[place]
        kernel("sum_gradients", site, None, adapter_dtype=site.adapter_dtype)(
            da_parts, db_parts, self.row.segments, tables.ranks, tables.slots, self.row.jobs, da,
            db,
        )  # fmt: skip

    def expand(
        self, places: Sequence[int], s: Sequence[Tensor], packed_rows: Sequence[Tensor],
        bias: Tensor | None, out: Tensor, accumulate: bool, bits: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """out = bias + the sum of S B over some sites, or added to out; with bits their masks.

        s, packed_rows, bits   of these sites only
        """
        site, tables = self.served.sites[places[0]], [self.tables[place] for place in places]
        columns = out.shape[1]
        fields = {
            "bias": bias is not None, "accumulate": accumulate, "dropout": bits is not None,
            "inner": columns, "outer": columns, "sites": len(places),
        }  # fmt: skip
        wide = replace(site, inner=columns, outer=columns)
        tile = self.tile("expand", wide) if len(places) == 1 else None
        slots, thresholds = [one.slots for one in tables], [one.thresholds for one in tables]
        given: list[Any] = [s, packed_rows, slots, thresholds, bits]
        if len(places) == 1:
            given = [None if one is None else one[0] for one in given]
        own, rows, slot, threshold, mask = given
        kernel("expand", site, tile, **fields)(
            own, rows, bias, self.row.segments, slot, threshold, mask, self.row.jobs, out
        )

    def tile(self, kind: Kind, site: Site, sites: int = 1) -> Tile | None:
        """The measured tile of a kernel that serves so many sites, of which this is one."""
        return select.tile_for(kind, site, self.tokens, self.gpu, sites)


def _check(found: SiteTables, row: RowTables, group: SiteGroup, tokens: int) -> None:
    """What a site's tables must be to a row's, and to what the graph was made for."""
    if found.jobs != row.jobs:
        raise AdapterTableError(
            "a site's tables and the row's segments are of other numbers of jobs",
            expected=f"{row.jobs} jobs",
            found=f"{found.jobs} jobs",
        )
    check_fit(found.max_rank, found.drops, group.max_rank, group.drops)
    if found.drops:
        check_masks(row, group.keys, group.token_index, tokens)


@cache
def gpu_name(device: torch.device) -> str:
    """The device's name, "" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


# How a group of sites runs on generated kernels, forward and backward.
#
#     fused     shrink, then one GEMM with the rank block in it
#     sidecar   shrink, expand into the output, then cuBLAS adds the frozen product to it
#     concat    cuBLAS over a longer sum, [x | S] [W | Bᵀ]ᵀ: x and S side by side, and the adapters
#               in the room behind the weight
#
# and for dx likewise with dy, dS and A; concat has no mask, so it serves dx without dropout only.
# Where x or dy has room behind its rows (see ops/room.py), S and dS go there; else one site's x or
# dy is copied while it is read. The selector takes one plan for each site and direction by the
# number of tokens.


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
