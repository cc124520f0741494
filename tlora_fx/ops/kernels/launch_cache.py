"""Serve a call of an operator by what an earlier one of its kind started.

Between two calls for rows of equal length only addresses differ. Which plan, tile and kernel
serves a call, on which grid, follows from shapes, strides and settings: these are the key of a
recipe. The second call of a kind is written down: each launch, and each product of cuBLAS, with its
arguments as offsets into the call's own tensors. Later calls start the same with the addresses of
theirs. A recipe holds no address and no tensor, so it serves all layers of a shape.

Whatever cannot be told from the call's own tensors is not written down, and runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlora_fx.codegen.launching import KernelLaunch, Start, tape
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.device_tables import RowTables, SiteTables
from tlora_fx.ops.kernels.packed import ExtendedWeight, Packed, extended_weight_of
from tlora_fx.ops.kernels.support import KernelGroup
from tlora_fx.ops.tables import SiteGroup

logger = logging.getLogger(__name__)
_MAX_CALLS = 2048
_TRIES = 3
_ALIGNED = 15
_MAX_BOXES = 64
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


class NotRecordable(Exception):
    """A kernel was started with what none of the call's tensors holds."""


@dataclass(slots=True)
class Recording:
    """Recording of what a call starts, as it happens.

    entries   KernelLaunch of kernels and products
    fresh     tensors that the call made on its way
    fault     why it cannot be started again, or ""
    packs     indices of sites whose adapters are packed, and whether behind the weight too
    needs     the same of adapters that must be packed before
    """

    entries: list[KernelLaunch] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    fault: str = ""
    packs: list[tuple[int, bool]] = field(default_factory=list)
    needs: list[tuple[int, bool]] = field(default_factory=list)

    def note_new(self, make: Callable[[], Tensor]) -> Tensor:
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
            with _Recorder(self):
                yield
        finally:
            tape.started = before

    def recipe(self, tensors: Sequence[Tensor]) -> Recipe:
        """Recipe to do the same with other tensors in the place of these; raises NotRecordable."""
        if self.fault:
            raise NotRecordable(self.fault)
        held = _Addresses([*tensors, *self.fresh])
        steps = [
            _launch(launch, held) if launch.by_address else _call(launch, held)
            for launch in self.entries
        ]
        fresh = [(tensor.shape, tensor.dtype) for tensor in self.fresh]
        return Recipe(steps, fresh, self.packs, self.needs)


class Recordable(Protocol):
    """Interface of a call of an operator that can be recorded: see `launch.KernelCall`."""

    kernel_group: KernelGroup
    group: SiteGroup
    device: torch.device
    row: RowTables
    tables: list[SiteTables]
    token_index: Tensor
    recording: Recording | None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that a kernel fills."""

    def held(self, index: int) -> Packed:
        """The buffers of a site's packed adapters."""

    def is_packed(self, index: int, extended: ExtendedWeight | None) -> bool:
        """Whether they, and the extended weight, hold what is to be packed."""

    def note_packed(self, index: int, extended: ExtendedWeight | None) -> None:
        """Note that the buffers hold what is to be packed."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        arguments = (*args, *kwargs.values())
        if func._schema.is_mutable and not any(
            isinstance(value, list | tuple) for value in arguments
        ):
            again = _again(func, len(args), tuple(kwargs))
            recording.entries.append(KernelLaunch(again, arguments, by_address=False))
        elif func._schema.is_mutable or not _is_view(func, result):
            recording.fault = str(func)
        return result


def _is_view(func: Any, result: Any) -> bool:
    """Whether an operator that writes nothing makes no tensor but views; or none at all."""
    return not isinstance(result, Tensor | list | tuple) or all(
        returned.alias_info is not None for returned in func._schema.returns
    )


def _again(func: Any, count: int, names: tuple[str, ...]) -> Start:
    def start(_: int, arguments: Sequence[Any]) -> None:
        func(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

    return start


Step = Callable[[Sequence[Tensor], Sequence[int], int], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Launches of a call, to be started again with other tensors.

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


class _Addresses:
    """Finds addresses in a call's tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.spans = [(tensor.data_ptr(), _extent(tensor)) for tensor in tensors]

    def find(self, tensor: Tensor) -> tuple[int, int]:
        """The one tensor that an address lies in, and how many bytes behind its start."""
        address = tensor.data_ptr()
        same = [index for index, (start, _) in enumerate(self.spans) if start == address]
        holders = same or [
            index
            for index, (start, extent) in enumerate(self.spans)
            if start < address < start + extent
        ]
        if len(holders) != 1:
            raise NotRecordable(f"{len(holders)} tensors of the call hold an argument")
        return holders[0], address - self.spans[holders[0]][0]


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


def _launch(launch: KernelLaunch, held: _Addresses) -> Step:
    """A kernel's launch with addresses."""
    fixed: list[Any] = list(launch.arguments)
    moving: list[tuple[int, int, int]] = []
    boxes: list[tuple[int, int, int, Any, dict[int, Any]]] = []
    for index, value in enumerate(launch.arguments):
        if isinstance(value, Tensor):
            fixed[index] = 0
            if value.numel():
                moving.append((index, *held.find(value)))
        elif hasattr(value, "block_shape"):
            like = copy(value)
            like.base = fixed[index] = None
            boxes.append((index, *held.find(value.base), like, {}))
    start = launch.start

    def step(_: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        arguments = fixed.copy()
        for index, source, offset in moving:
            arguments[index] = addresses[source] + offset
        for index, source, offset, like, known in boxes:
            address = addresses[source] + offset
            box = known.get(address)
            if box is None:
                if len(known) >= _MAX_BOXES:
                    known.clear()
                box = known[address] = copy(like)
                box.base = _Base(address)
            arguments[index] = box
        start(stream, arguments)

    return step


def _call(launch: KernelLaunch, held: _Addresses) -> Step:
    """A product of torch's, or an interpreted kernel, with tensors."""
    moving: list[tuple[int, int, int, Geometry, Any]] = []
    for index, value in enumerate(launch.arguments):
        box = value if hasattr(value, "block_shape") else None
        tensor = value if box is None else value.base
        if isinstance(tensor, Tensor):
            like = copy(box)
            if like is not None:
                like.base = None
            moving.append((index, *held.find(tensor), _geometry(tensor), like))
    start, fixed = launch.start, list(launch.arguments)
    for index, *_ in moving:
        fixed[index] = None
    direct = [
        offset == 0 and geometry == _geometry(held.tensors[source])
        for _, source, offset, geometry, _ in moving
    ]

    def step(tensors: Sequence[Tensor], _: Sequence[int], stream: int) -> None:
        arguments = fixed.copy()
        for same, (index, source, offset, geometry, box) in zip(direct, moving, strict=True):
            value: Any = tensors[source]
            if not same:
                value = _seen(value, offset, geometry)
            if box is not None:
                like = copy(box)
                like.base = value
                value = like
            arguments[index] = value
        start(stream, arguments)

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


def serve(call: Recordable, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """function(call, *args), or what it started for arguments like these."""
    tensors, key = _described(call, function, args)
    known = call.kernel_group.recipes
    recipe = known.get(key, 0)  # until there is one: how often the key has come
    if isinstance(recipe, Recipe):
        if _started_again(call, recipe, tensors):
            return
    elif recipe == 0:
        # Not the first time: lengths that never come again are many.
        if len(known) >= _MAX_CALLS:
            known.clear()
        known[key] = 1
    elif recipe <= _TRIES:
        known[key] = recipe + 1
        _record(call, key, tensors, partial(function, call, *args))
        return
    function(call, *args)


def _described(
    call: Recordable, function: object, args: Sequence[Any]
) -> tuple[list[Tensor], object]:
    """All tensors whose addresses a kernel can get, and what launches depend on else.

    token_index comes first: it alone may begin anywhere.
    """
    group, tables = call.group, call.tables
    tensors = [call.token_index]
    plain: list[object] = [function, select.facts(), call.device.index, call.row.jobs]
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, list):
            present = [item for item in arg if item is not None]
            tensors += present
            if len(present) < len(arg):
                plain.append(tuple(item is None for item in arg))
            plain.append(len(arg))
        else:
            plain.append(arg)
    tensors += (*group.weights, *group.a, *group.b)
    for tensor in tensors:
        plain += (tensor.shape, tensor.stride())
    if group.drops:
        plain += [table.site for table in tables]
    # From here on tensors are ours, of shapes that follow from those above.
    for index in range(len(group.weights)):
        extended = _extended_weight(call, index)
        plain.append(None if extended is None else extended.place())
        if extended is not None and extended.copy is not None:
            tensors.append(extended.copy)
    tensors.append(call.row.words)
    for index, table in enumerate(tables):
        held = call.held(index)
        tensors += (table.words, held.a, held.b, held.flags)
    return tensors, tuple(plain)


def _record(
    call: Recordable, key: object, tensors: list[Tensor], start: Callable[[], None]
) -> None:
    call.recording = recording = Recording()
    try:
        with recording.on():
            start()
    finally:
        call.recording = None
    try:
        call.kernel_group.recipes[key] = recording.recipe(tensors)
    except NotRecordable as reason:
        logger.debug("not started again from a recipe: %s", reason)


def _started_again(call: Recordable, recipe: Recipe, tensors: list[Tensor]) -> bool:
    """Whether a recipe could serve this call."""
    for index, into_weight in recipe.needs:
        if not call.is_packed(index, _extended_weight(call, index) if into_weight else None):
            return False
    stream = _stream(call.device.index) if call.device.type == "cuda" else 0
    if not recipe.serve(tensors, call.empty, stream, 1):
        return False
    for index, into_weight in recipe.packs:
        call.note_packed(index, _extended_weight(call, index) if into_weight else None)
    return True


def _extended_weight(call: Recordable, index: int) -> ExtendedWeight | None:
    """The extended weight of a site, if it has one."""
    return extended_weight_of(call.group.weights[index], call.kernel_group.sites[index], make=False)
