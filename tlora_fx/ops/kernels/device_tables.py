"""Copies of the small CPU tables on the device, made once and kept while the tables live.

Rows and banks carry their tables on the CPU, where operators check them without waiting for the
device. Kernels read these copies. A table has one copy for as long as it is used, in one place, so
that a captured CUDA graph may be replayed with other jobs: change the table in place, `refresh`
it, and replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor

from tlora_fx.errors import TableNotOnDevice, TloraError
from tlora_fx.ops.dropout import keep_scale, threshold_of
from tlora_fx.ops.tables import (
    check_keys,
    check_rates,
    check_scales,
    check_token_index,
    covering,
    is_dropping,
    rank_bounds,
    token_bounds,
)

# Triton compiles anew for a pointer that is not a multiple of 16 bytes.
_ALIGNED = 4
# A model has a few hundred sites; a step a few rows.
_MAX_COPIES = 4096
# Rows of a block of packed adapters, which nobody reads here.
_SMALL_BLOCK = 16


@dataclass(slots=True, eq=False, weakref_slot=True)
class Mirror:
    """One device buffer made of some CPU tables.

    sources   the tables, kept alive so that no other takes their address
    stamps    what they held when they were copied
    words     int32 on the device
    """

    sources: tuple[Tensor, ...]
    stamps: tuple[object, ...]
    words: Tensor
    captured: bool = False


@dataclass(slots=True, eq=False)
class RowTables(Mirror):
    """Tables of a row.

    segments   int32 [J + 1], token offsets
    keys       int32 [J, 2], seed and step as bits
    bounds     the segments on the host
    keys_fit   whether keys were a pair for each job
    """

    segments: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    bounds: list[int] = field(default_factory=list)
    keyed: bool = False

    @property
    def jobs(self) -> int:
        """Number of jobs, J."""
        return len(self.bounds) - 1


@dataclass(slots=True, eq=False)
class SiteTables(Mirror):
    """Tables of a site.

    ranks, slots   int32 [J + 1], rows of a and b, and of the packed adapters
    thresholds     int32 [J] of the 16-bit dropout values, 0 keeps all
    scales         float32 [J], scale times one over the keep rate
    site           id in dropout masks, and from bit 32 on where x begins (see dropout.keep_rows)
    max_rank       the largest rank of a job
    drops          whether any job does
    evaluates      made in `without_dropout`: no job does, whatever its rate
    """

    ranks: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    thresholds: Tensor = field(init=False)
    scales: Tensor = field(init=False)
    site: int = 0
    jobs: int = 0
    max_rank: int = 0
    drops: bool = False
    evaluates: bool = False


Key = tuple[object, ...]
Cache = OrderedDict[Key, Any]
_rows: OrderedDict[Key, RowTables] = OrderedDict()
_offsets: OrderedDict[Key, Mirror] = OrderedDict()
_sites: OrderedDict[Key, SiteTables] = OrderedDict()
# By a table's address: the caches and keys of its copies.
_holders: dict[int, dict[tuple[int, Key], Cache]] = {}


def row_tables(
    segments: Tensor, keys: Tensor, tokens: int, device: torch.device, capturing: bool
) -> RowTables:
    """The copies of a row's tables.

    raises   SegmentError where they do not cover the tokens; TableNotOnDevice
    """
    key = (segments.data_ptr(), keys.data_ptr(), segments.shape[0], tokens, device)
    stamps = stamp(segments), stamp(keys)
    mirror = _rows.get(key)
    if mirror is None or mirror.stamps != stamps:
        with _Uploads(capturing) as uploads:
            mirror = _uploaded_row(mirror, segments, keys, tokens, device, stamps, uploads)
        _keep(_rows, key, mirror)
    mirror.captured |= capturing
    return mirror


def site_tables(
    tables: Sequence[Tensor], rows: int, rank_block: int, device: torch.device, capturing: bool
) -> SiteTables:
    """The copies of a site's tables.

    tables   ranks, scales, rates, site
    rows     of a and b
    raises   AdapterTableError, SegmentError, MaskKeyError, TableNotOnDevice
    """
    ranks, scales, rates, site = tables
    key = (
        ranks.data_ptr(), scales.data_ptr(), rates.data_ptr(), site.data_ptr(), ranks.shape[0],
        is_dropping(), rows, rank_block, device,
    )  # fmt: skip
    stamps = stamp(ranks), stamp(scales), stamp(rates), stamp(site)
    mirror = _sites.get(key)
    if mirror is None or mirror.stamps != stamps:
        with _Uploads(capturing) as uploads:
            mirror = _uploaded_site(mirror, tables, rows, rank_block, device, stamps, uploads)
        _keep(_sites, key, mirror)
    mirror.captured |= capturing
    return mirror


def offsets_on(table: Tensor, rows: int, device: torch.device) -> Tensor:
    """The copy of a table of offsets into so many rows: int32 [J + 1].

    raises   SegmentError where it does not cover the rows; TableNotOnDevice
    """
    capturing = _is_capturing(device)
    key = (table.data_ptr(), table.shape[0], rows, device)
    stamps = (stamp(table),)
    mirror = _offsets.get(key)
    if mirror is None or mirror.stamps != stamps:
        with _Uploads(capturing) as uploads:
            mirror = _uploaded_offsets(mirror, table, rows, device, uploads)
        _keep(_offsets, key, mirror)
    mirror.captured |= capturing
    return mirror.words


def segments_on(segments: Tensor, tokens: int, device: torch.device) -> Tensor:
    """The copy of a row's segments, in tokens: int32 [J + 1].

    raises   SegmentError where they do not cover the tokens; TableNotOnDevice
    """
    # A row whose jobs do not drop needs no keys, and segments are none.
    return row_tables(segments, segments, tokens, device, _is_capturing(device)).segments


def adapters_on(
    ranks: Tensor, scales: Tensor, rates: Tensor, site: Tensor, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The copies of a site's ranks, int32 [J + 1], and scales, float32 [J].

    rows     of a and b
    raises   as `site_tables`
    """
    tables = ranks, scales, rates, site
    copies = site_tables(tables, rows, _SMALL_BLOCK, device, _is_capturing(device))
    return copies.ranks, copies.scales


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refresh(*tables: Tensor) -> None:
    """Bring tables that were changed in place to the device copies that captured graphs read.

    tables   CPU tables of rows (segments, keys, target_segments) or of sites (ranks, scales, rates)
    raises   as the operators do for tables that do not fit
    """
    with _Uploads(False) as uploads:
        for key, cache in _held(tables):
            mirror = cache[key]
            stamps = tuple(map(stamp, mirror.sources))
            if cache is _rows:
                segments, keys = mirror.sources
                tokens, device = cast("int", key[3]), mirror.words.device
                _uploaded_row(mirror, segments, keys, tokens, device, stamps, uploads)
            elif cache is _offsets:
                (table,) = mirror.sources
                rows = cast("int", key[2])
                _uploaded_offsets(mirror, table, rows, mirror.words.device, uploads)
            else:
                rows, block = cast("tuple[int, int]", key[-3:-1])
                device = mirror.words.device
                _uploaded_site(mirror, mirror.sources, rows, block, device, stamps, uploads)


def release(*tables: Tensor) -> None:
    """Drop the device copies of tables that a captured graph read which is gone."""
    for key, cache in _held(tables):
        _drop(cache, key)


def forget() -> None:
    """Drop all copies that no captured graph reads."""
    for cache in (_rows, _offsets, _sites):
        mirrors: Cache = cast("Cache", cache)
        for key in [key for key, mirror in mirrors.items() if not mirror.captured]:
            _drop(mirrors, key)


def check_masks(row: RowTables, keys: Tensor, token_index: Tensor, tokens: int) -> None:
    """Refuse keys and token indices that a site which drops cannot use; raises MaskKeyError."""
    if not row.keyed:
        check_keys(keys, row.jobs)
    if token_index.numel() != tokens:
        check_token_index(token_index, tokens)


def stamp(table: Tensor) -> object:
    """Equal for a table whose content is what it was; an inference tensor has no version."""
    try:
        return table._version
    except RuntimeError:
        return tuple(table.flatten().tolist())


def _uploaded_row(
    mirror: RowTables | None,
    segments: Tensor,
    keys: Tensor,
    tokens: int,
    device: torch.device,
    stamps: tuple[object, ...],
    uploads: _Uploads,
) -> RowTables:
    bounds = token_bounds(segments, tokens)
    jobs = len(bounds) - 1
    pairs = [(0, 0)] * jobs
    keyed = True
    try:
        pairs = check_keys(keys, jobs)
    except TloraError:
        # Rows whose jobs do not drop may come without keys: `check_masks` asks where they do.
        keyed = False
    signed = [word - (1 << 32) if word >> 31 else word for pair in pairs for word in pair]
    words, starts = _laid_out([bounds, signed])
    if mirror is None:
        buffer = torch.empty(len(words), dtype=torch.int32, device=device)
        mirror = RowTables((segments, keys), stamps, buffer)
        mirror.segments, mirror.keys = _views(buffer, starts, (jobs + 1, 2 * jobs))
        mirror.keys = mirror.keys.view(jobs, 2)
    uploads.add(mirror, words)
    mirror.stamps, mirror.bounds, mirror.keyed = stamps, bounds, keyed
    return mirror


def _uploaded_offsets(
    mirror: Mirror | None, table: Tensor, rows: int, device: torch.device, uploads: _Uploads
) -> Mirror:
    stamps = (stamp(table),)
    words = covering(table, rows) if not uploads.capturing else [0] * len(table)
    if mirror is None:
        buffer = torch.empty(len(words), dtype=torch.int32, device=device)
        mirror = Mirror((table,), stamps, buffer)
    uploads.add(mirror, words)
    mirror.stamps = stamps
    return mirror


def _uploaded_site(
    mirror: SiteTables | None,
    tables: Sequence[Tensor],
    rows: int,
    rank_block: int,
    device: torch.device,
    stamps: tuple[object, ...],
    uploads: _Uploads,
) -> SiteTables:
    ranks, scales, rates, site = tables
    jobs = ranks.shape[0] - 1
    offsets = rank_bounds(ranks, jobs, rows)
    dropped = check_rates(rates, jobs)
    factors = check_scales(scales, jobs)
    evaluates = not is_dropping() if mirror is None else mirror.evaluates
    if evaluates:
        dropped = [0.0] * jobs
    words, starts, thresholds = _site_words(
        tuple(offsets), tuple(factors), tuple(dropped), rank_block
    )
    if mirror is None:
        buffer = torch.empty(len(words), dtype=torch.int32, device=device)
        mirror = SiteTables(tuple(tables), stamps, buffer)
        sizes = (jobs + 1, jobs + 1, jobs, jobs)
        mirror.ranks, mirror.slots, mirror.thresholds, mirror.scales = _views(buffer, starts, sizes)
        mirror.scales = mirror.scales.view(torch.float32)
        mirror.evaluates = evaluates
    uploads.add(mirror, words)
    mirror.stamps, mirror.site, mirror.jobs = stamps, int(site), jobs
    mirror.drops = any(thresholds)
    mirror.max_rank = max((stop - start for start, stop in pairwise(offsets)), default=0)
    return mirror


# Sites of equal layers have equal tables.
@lru_cache(maxsize=_MAX_COPIES)
def _site_words(
    offsets: tuple[int, ...], factors: tuple[float, ...], dropped: tuple[float, ...], block: int
) -> tuple[list[int], list[int], list[int]]:
    """A site's tables behind each other, where each begins, and its thresholds."""
    padded = [-(-(stop - start) // block) * block for start, stop in pairwise(offsets)]
    thresholds = [threshold_of(rate) for rate in dropped]
    exact = [factor * keep_scale(rate) for factor, rate in zip(factors, dropped, strict=True)]
    bits = torch.tensor(exact, dtype=torch.float32).view(torch.int32).tolist()
    return *_laid_out([offsets, [0, *accumulate(padded)], thresholds, bits]), thresholds


def _laid_out(tables: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tables behind each other, each at a multiple of 16 bytes, and where each begins."""
    words: list[int] = []
    starts = []
    for table in tables:
        starts.append(len(words))
        words.extend(table)
        words.extend([0] * (-len(words) % _ALIGNED))
    return words, starts


def _views(buffer: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class _Uploads:
    """Words for copies on a device, which go there together and without waiting.

    Their staging buffer is their own, which torch frees late.

    capturing   whether a CUDA graph is captured, into which no words may go
    """

    def __init__(self, capturing: bool) -> None:
        self.capturing = capturing
        self._waiting: dict[torch.device, list[tuple[Mirror, list[int]]]] = {}

    def add(self, mirror: Mirror, words: list[int]) -> None:
        """Add the words of one table; raises TableNotOnDevice."""
        if self.capturing:
            raise TableNotOnDevice(
                "a table reached the operator for the first time while a CUDA graph is captured",
                found=f"{len(words)} numbers that are not on the device yet",
                help="run the step once with the same tables before the capture, or refresh them",
            )
        self._waiting.setdefault(mirror.words.device, []).append((mirror, words))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error too: what came before it counts as there.
        for device, waiting in self._waiting.items():
            words = list(chain.from_iterable(words for _, words in waiting))
            pinned = device.type == "cuda"
            staging = torch.tensor(words, dtype=torch.int32, pin_memory=pinned)
            targets = [mirror.words for mirror, _ in waiting]
            if len(targets) == 1:
                targets[0].copy_(staging, non_blocking=pinned)
                continue
            there = staging.to(device, non_blocking=pinned)
            parts = torch.split(there, [len(each) for each in targets])
            torch._foreach_copy_(targets, list(parts))


def _held(tables: Iterable[Tensor]) -> list[tuple[Key, Cache]]:
    """Where the copies of some tables are kept, each once."""
    caches: dict[tuple[int, Key], Cache] = {}
    for table in tables:
        caches |= _holders.get(table.data_ptr(), {})
    return [(key, cache) for (_, key), cache in caches.items()]


def _keep(cache: Any, key: Key, mirror: Mirror) -> None:
    cache[key] = mirror
    cache.move_to_end(key)
    for table in mirror.sources:
        _holders.setdefault(table.data_ptr(), {})[id(cache), key] = cache
    while len(cache) > _MAX_COPIES and (old := _oldest(cache, key)) is not None:
        _drop(cache, old)


def _drop(cache: Cache, key: Key) -> None:
    for table in cache.pop(key).sources:
        holders = _holders.get(table.data_ptr(), {})
        holders.pop((id(cache), key), None)
        if not holders:
            _holders.pop(table.data_ptr(), None)


def _oldest(cache: Cache, newest: Key) -> Key | None:
    """The first entry but the newest that no captured graph reads."""
    held = (key for key, mirror in cache.items() if not mirror.captured and key != newest)
    return next(held, None)
