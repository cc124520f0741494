"""The launches of one call of an operator: kernels found, tables on the device, adapters packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tlora_fx.codegen.ahead import ahead
from tlora_fx.codegen.kernels import emitter, expand, lora_b_backward, shrink
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import MAX_SITES, KernelSpec, Kind, Tile
from tlora_fx.errors import AdapterTableError
from tlora_fx.ops.kernels import launch_cache, pack_together, select
from tlora_fx.ops.kernels.device_tables import (
    RowTables,
    SiteTables,
    check_masks,
    row_tables,
    site_tables,
)
from tlora_fx.ops.kernels.launch_cache import Recording
from tlora_fx.ops.kernels.packed import (
    ExtendedWeight,
    Packed,
    contents,
    extended_weight_of,
    packed_for,
    stored_form,
)
from tlora_fx.ops.kernels.support import KernelGroup, Site
from tlora_fx.ops.tables import SiteGroup, check_fit, named

_HERE = nullcontext()
_HOPPER = 90
_SMALL_BLOCK = 16
#: Gradients of rows of so few tokens, and so few for each job of the tables, leave whole: to sum up
#: chunks of 512 tokens takes longer than to leave a job to fewer programs (H200: `ours-chunked` in
#: benchmarks/results/step.md).
SHORT_ROW, _SHORT_SEGMENT = 1280, 256
# Tokens of a chunk of such rows: more than they have.
_SHORT_CHUNK = 2048
# Of a vector load.
_BYTES = 16

# Makes the tensors that kernels fill; tests put NaN into them.
empty: Callable[..., Tensor] = torch.empty


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches, within this context."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(device)


@dataclass(frozen=True, slots=True)
class Gate:
    """Gated activation that x is: activation(gate) * up, both [tokens, in]."""

    activation: str
    gate: Tensor
    up: Tensor


@dataclass(slots=True)
class KernelCall:
    """Call of kernels on a group of sites.

    row, tables   on the device, of the row and of each site
    token_index   int32 [tokens]
    gpu           the device's name, "" for the CPU
    capturing     whether a CUDA graph is captured
    recording     what is written down of this call, if anything
    helds         the sites' packed adapters that were asked for
    """

    kernel_group: KernelGroup
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
    def open(
        cls, kernels: KernelGroup, group: SiteGroup, tokens: int, device: torch.device
    ) -> KernelCall:
        """Check and mirror all tables; raises as `multi_lora_linear`, naming the site."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        try:
            row = row_tables(group.segments, group.keys, tokens, device, capturing)
        except Exception:
            with named(group.sites[0]):
                raise
        tables = []
        for index, site in enumerate(kernels.sites):
            copied = group.ranks[index], group.scales[index], group.rates[index], group.sites[index]
            try:
                mirror = site_tables(copied, site.rows, site.rank_block, device, capturing)
                _check(mirror, row, group, tokens)
            except Exception:
                with named(group.sites[index]):
                    raise
            tables.append(mirror)
        token_index = group.token_index.reshape(-1)
        if token_index.dtype != torch.int32:
            token_index = token_index.to(torch.int32)
        gpu = gpu_name(device)
        return cls(kernels, group, tokens, device, row, tables, token_index, gpu, capturing)

    @property
    def is_vacant(self) -> bool:
        """Whether no job has an adapter here, and products may have bits of their own."""
        return not select.is_strict() and not any(table.max_rank for table in self.tables)

    def on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return on_device(self.device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that a kernel fills; zeros where none starts, from which indices may be made."""
        if ahead.is_on:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if self.recording is None:
            return empty(shape, dtype=dtype, device=self.device)
        return self.recording.note_new(partial(empty, shape, dtype=dtype, device=self.device))

    def serve(self, function: Callable[..., None], *args: Any) -> None:
        """function(self, *args), or what it started for arguments like these; see launch_cache.py.

        args   tensors, lists of tensors or None, and plain values

        The function may change nothing but what its kernels write, and what `pack` notes.
        """
        if self.capturing or ahead.is_on:
            function(self, *args)
        else:
            launch_cache.serve(self, function, args)

    def choose(
        self, direction: select.Direction, index: int, extended: bool, behind: bool = False
    ) -> select.Choice:
        """The plan of a site; `behind` tells whether x or dy has columns behind its rows."""
        site = self.kernel_group.sites[index]
        sharing = len(self.kernel_group.sites)
        return select.choose(direction, site, self.tokens, extended, self.gpu, sharing, behind)

    def extended(self, index: int, behind: bool = False) -> ExtendedWeight | None:
        """Extended weight of a site, where concat-K can have it; joined ones together (`joint`).

        Without columns `behind` x or dy it would copy them, which pays for one site at most.
        """
        if len(self.kernel_group.sites) > 1 and not behind:
            return None
        weight, site = self.group.weights[index], self.kernel_group.sites[index]
        found = extended_weight_of(weight, site, select.may_copy_weights())
        return None if found is not None and found.step else found

    def pack(self, weights: dict[int, ExtendedWeight | None]) -> list[Packed]:
        """Pack the adapters of these sites, and into the tails of their weights."""
        sites = self.kernel_group.sites
        left = [index for index, weight in weights.items() if not self.is_served(index, weight)]
        for indices in self.alike(
            left, lambda index: (weights[index] is None, sites[index].layout)
        ):
            first = sites[indices[0]]
            helds, tables = map(self.held, indices), [self.tables[index] for index in indices]
            tails = [
                (
                    stored_form(self.group.weights[index], sites[index]) if weight.copy is None
                    else weight.copy,
                    weight.below, weight.beside, weight.tail(sites[index]),
                )
                for index in indices if (weight := weights[index])
            ]  # fmt: skip
            fields = {"extend": "tail", "weight_layout": first.layout} if tails else {}
            packed = [(held.a, held.b, held.flags) for held in helds]
            kernel("pack", first, None, adapter_dtype=first.adapter_dtype, **fields,
                   **self.beside(indices))(
                [self.group.a[index].contiguous() for index in indices],
                [self.group.b[index].contiguous() for index in indices],
                [table.ranks for table in tables],
                [table.slots for table in tables],
                self.row.jobs,
                *map(list, zip(*packed, strict=True)),
                *map(list, zip(*tails, strict=True)),
            )  # fmt: skip
        for index, weight in weights.items():
            self.note_packed(index, weight)
            if self.recording is not None:
                self.recording.packs.append((index, weight is not None))
        return [self.held(index) for index in weights]

    def alike(
        self, indices: Iterable[int], key: Callable[[int], object] = lambda index: None
    ) -> list[list[int]]:
        """Sites that one launch can serve, in order: of one rank block, stored type and key."""
        groups: dict[object, list[list[int]]] = {}
        for index in indices:
            site = self.kernel_group.sites[index]
            equal = groups.setdefault((site.rank_block, site.adapter_dtype, key(index)), [[]])
            if len(equal[-1]) == MAX_SITES:
                equal.append([])
            equal[-1].append(index)
        return [group for equal in groups.values() for group in equal]

    def beside(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fields of a spec for the sites behind the first."""
        outers = tuple(self.kernel_group.sites[index].outer for index in indices)
        return {"sites": len(outers), "beside": outers[1:]}

    def held(self, index: int) -> Packed:
        """The buffers of a site's packed adapters, whatever they hold."""
        if (held := self.helds.get(index)) is None:
            a, b = self.group.a[index], self.group.b[index]
            held = packed_for(a, b, self.kernel_group.sites[index], self.row.jobs)
            self.helds[index] = held
        return held

    def note_packed(self, index: int, extended: ExtendedWeight | None) -> None:
        """Note that buffers, and an extended weight, hold the adapters as they are now."""
        held = self.held(index)
        held.holds = contents(held, self.group.a[index], self.group.b[index], self.tables[index])
        if extended is not None:
            extended.holds = held.holds
        if pack_together.is_noting() and (work := self.work(index, extended)) is not None:
            pack_together.note(work)

    def is_served(self, index: int, extended: ExtendedWeight | None) -> bool:
        """Whether the row began with a launch that packs this site among others."""
        if not pack_together.is_serving():
            return False
        work = self.work(index, extended)
        return work is not None and pack_together.is_served(work)

    def work(self, index: int, extended: ExtendedWeight | None) -> pack_together.Work | None:
        """Packing of a site; None where its adapters would be copied first."""
        a, b = self.group.a[index], self.group.b[index]
        if not all(leaf.is_contiguous() and leaf.data_ptr() % _BYTES == 0 for leaf in (a, b)):
            return None
        held, tables, site = self.held(index), self.tables[index], self.kernel_group.sites[index]
        tail = None
        if extended is not None:
            weight = extended.copy
            if weight is None:
                weight = stored_form(self.group.weights[index], site)
            corner = extended.below, extended.beside, extended.tail(site)
            tail = weight.data_ptr(), weight.stride(0), *corner
        reads = a, b, tables.ranks, tables.slots
        writes = held.a, held.b, held.flags
        return pack_together.Work(
            site,
            self.row.jobs,
            tuple(tensor.data_ptr() for tensor in reads),
            tuple(tensor.data_ptr() for tensor in writes),
            len(held.flags),
            tail,
        )

    def is_packed(self, index: int, extended: ExtendedWeight | None) -> bool:
        """Whether a site's adapters, and its extended weight, hold what is to be packed."""
        held = self.held(index)
        now = contents(held, self.group.a[index], self.group.b[index], self.tables[index])
        return held.holds == now and (extended is None or extended.holds == now)

    def packed(self, index: int, extended: ExtendedWeight | None = None) -> Packed:
        """Packed adapters of the forward, packed again where something has changed since."""
        current = self.is_packed(index, extended)
        if self.recording is not None:
            self.recording.needs.append((index, extended is not None))
            self.recording.fault = self.recording.fault if current else "adapters changed"
        return self.held(index) if current else self.pack({index: extended})[0]

    def shrink(
        self,
        rows: Tensor,
        packed: Sequence[Packed],
        s: Sequence[Tensor],
        bits: Sequence[Tensor],
        extended: Tensor | None = None,
        step: int = 0,
        copies: bool = True,
        gate: Gate | None = None,
    ) -> None:
        """S and the bits of all sites; in `extended` also x and S side by side.

        step     columns from one site's S to the next one's there, all of them written
        copies   whether x is not there yet
        gate     what x is made of, on the way; then of one site, and not to be copied
        """
        for indices in self.together():
            first = self.kernel_group.sites[indices[0]]
            fields: dict[str, Any] = {"dropout": first.drops, "sites": len(indices)}
            tail: dict[str, Any] = {}
            made = {} if gate is None else {"gate": gate.gate, "up": gate.up}
            if gate is not None:
                fields["gated"] = gate.activation
            if extended is not None:
                fields["extend"] = "copy" if copies else "tail"
                tail = {
                    "extended": extended,
                    "ranks": [self.tables[index].ranks for index in indices],
                    "tail_offsets": [step * index for index in indices],
                    "tail_widths": [step] * len(indices),
                }
            width = max(self.kernel_group.sites[index].width for index in indices)
            spec = spec_of("shrink", first, None, **fields)
            tile = self._shrink_tile(spec, first, width)
            slabs = -(-first.inner // tile.slab) if tile and tile.slab else 0
            wide = torch.promote_types(torch.float32, rows.dtype)
            sums = [s[index] for index in indices]
            if slabs:
                sums = [self.empty(slabs, *part.shape, dtype=wide) for part in sums]
            kernel("shrink", first, tile, **fields)(
                rows,
                [packed[index].a for index in indices],
                [packed[index].flags for index in indices],
                self.row.segments,
                self.row.keys,
                self.token_index,
                [self.tables[index].slots for index in indices],
                [self.tables[index].scales for index in indices],
                [self.tables[index].thresholds for index in indices],
                [self.tables[index].site for index in indices],
                self.row.jobs,
                sums,
                [bits[index] for index in indices],
                **tail,
                **made,
            )
            if slabs:
                whole = replace(spec, tile=tile, **self.beside(indices))
                self._finish(indices, whole, sums, packed, s, tail)

    def _shrink_tile(self, spec: KernelSpec, first: Site, width: int) -> Tile | None:
        """How `shrink` cuts its work; measured where x is read, the rule's where it is made.

        width   columns of S, of the widest site
        """
        tile = None if spec.gated else self.tile("shrink", first, spec.sites)
        if tile is None and not select.is_strict():
            # Few programs of a whole row each would wait long: they leave shares of S.
            tile = shrink.tile_for(spec, self.tokens, width)
        if tile is not None and tile.slab >= spec.inner:
            tile = replace(tile, slab=0)
        return tile

    def _finish(
        self, indices: Sequence[int], spec: KernelSpec, parts: Sequence[Tensor],
        packed: Sequence[Packed], s: Sequence[Tensor], tail: dict[str, Any],
    ) -> None:  # fmt: skip
        """S of some sites out of the shares that `shrink` left."""
        behind = dict(tail)
        if tail:
            behind["extended"] = [tail["extended"]] * len(indices)
            behind["tail_offsets"] = [self.group.inner + first for first in tail["tail_offsets"]]
        loaded(shrink.finish(spec))(
            parts,
            [packed[index].flags for index in indices],
            self.row.segments,
            [self.tables[index].slots for index in indices],
            [self.tables[index].scales for index in indices],
            self.row.jobs,
            [s[index] for index in indices],
            **behind,
        )

    def together(self) -> list[list[int]]:
        """Sites whose kernels share one read of x."""
        groups: dict[int, list[list[int]]] = {}
        for index, site in enumerate(self.kernel_group.sites):
            open_groups = groups.setdefault(site.rank_block, [[]])
            # With masks of a fourth site registers do not suffice.
            crowded = site.drops and site.rank_block > _SMALL_BLOCK and site.arch != _HOPPER
            if len(open_groups[-1]) == MAX_SITES - crowded:
                open_groups.append([])
            open_groups[-1].append(index)
        return [indices for same_block in groups.values() for indices in same_block]

    def forward(
        self, index: int, rows: Tensor, bias: Tensor | None, s: Tensor, packed: Packed, y: Tensor,
        tile: Tile | None,
    ) -> None:  # fmt: skip
        """y = x Wᵀ + bias + S B in one GEMM."""
        site, tables = self.kernel_group.sites[index], self.tables[index]
        weight = stored_form(self.group.weights[index], site)
        fields = {"bias": bias is not None, "weight_layout": site.layout}
        kernel("forward", site, tile, **fields)(
            rows, weight, bias, s, packed.b, self.row.segments, tables.slots, self.row.jobs, y
        )

    def input_gradient(
        self, index: int, dy: Tensor, ds: Tensor, packed: Packed, bits: Tensor, dx: Tensor,
        accumulate: bool, tile: Tile | None,
    ) -> None:  # fmt: skip
        """dx = dy W + mask∘(dS A), or added to dx, in one GEMM."""
        site, tables = self.kernel_group.sites[index], self.tables[index]
        weight = stored_form(self.group.weights[index], site)
        fields = {
            "dropout": site.drops, "accumulate": accumulate, "weight_layout": site.layout,
        }  # fmt: skip
        kernel("input_gradient", site, tile, **fields)(
            dy, weight, ds, packed.a, self.row.segments, tables.slots, tables.thresholds, bits,
            self.row.jobs, dx,
        )  # fmt: skip

    def cuts_of_dy(self) -> list[Tile]:
        """Tiles of `lora_b_backward`; a narrow site takes the widest one's, to share its launch.

        In strict mode each is cut as it is alone: shares decide what bits their sums have.
        """
        sites = self.kernel_group.sites
        kind: Kind = "lora_b_backward"
        own = [self._chunked(self.tile(kind, site) or rule_of(kind, site)) for site in sites]
        if select.is_strict():
            return own
        widest, tile = max(zip(sites, own, strict=True), key=lambda each: each[0].outer)
        return [
            tile if site.rank_block == widest.rank_block and not site.outer % tile.slab else alone
            for site, alone in zip(sites, own, strict=True)
        ]

    def lora_b_backward(
        self, dys: Sequence[Tensor], s: Sequence[Tensor], packed: Sequence[Packed],
        db_parts: Sequence[Tensor], ds: Sequence[Tensor], extended: Sequence[Tensor | None],
        copies: Sequence[bool], tails: Sequence[tuple[int, int]], db: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """dS, and dB's parts, of all sites by one read of each dy; in `extended` also dy and dS.

        copies   whether a dy is not there yet
        tails    first column of dS there, and its columns, written whole
        db       of a short row what dB is added to, in place of parts
        """
        cuts = self.cuts_of_dy()

        def form(index: int) -> tuple[Tile, bool, bool]:
            behind = extended[index] is not None
            return cuts[index], behind, behind and copies[index]

        for indices in self.alike(range(len(dys)), form):
            sites = [self.kernel_group.sites[index] for index in indices]
            first, (tile, behind, copied) = sites[0], form(indices[0])
            shares = [
                self.empty(-(-site.outer // tile.slab), self.tokens, site.width, dtype=parts.dtype)
                for site, parts in zip(sites, (db_parts[index] for index in indices), strict=True)
            ]
            wide = [rows for index in indices if (rows := extended[index]) is not None]
            slots = [self.tables[index].slots for index in indices]
            joined = self.beside(indices)
            fields: dict[str, Any] = {"extend": "copy"} if copied else {}
            left = [[db_parts[index] for index in indices]]
            if db:
                fields |= {"accumulate": True, "adapter_dtype": first.adapter_dtype}
                left = [[self.tables[k].ranks for k in indices], [db[k] for k in indices]]
                tile = lora_b_backward.adding(tile, first.rank_block, first.adapter_dtype)
            kernel("lora_b_backward", first, tile, **fields, **joined)(
                [dys[index] for index in indices],
                [s[index] for index in indices],
                [packed[index].b for index in indices],
                self.row.segments,
                slots,
                self.row.jobs,
                shares,
                *left,
                wide if copied else None,
            )
            summed = replace(rule_of("sum_ds", first), slab=tile.slab)
            kernel("sum_ds", first, summed, extend="tail" if behind else "", **joined)(
                shares,
                [packed[index].flags for index in indices],
                self.row.segments,
                slots,
                [self.tables[index].scales for index in indices],
                self.row.jobs,
                [ds[index] for index in indices],
                [self.tables[index].ranks for index in indices],
                wide or None,
                [tails[index][0] for index in indices],
                [tails[index][1] for index in indices],
            )

    def lora_a_backward(
        self, rows: Tensor, ds: Sequence[Tensor], bits: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> None:
        """dA's parts of all sites by one read of x."""
        for indices in self.together():
            first = self.kernel_group.sites[indices[0]]
            fields = {"dropout": first.drops, "sites": len(indices)}
            kernel(
                "lora_a_backward",
                first,
                self.tile("lora_a_backward", first, len(indices)),
                **fields,
            )(
                rows,
                [ds[index] for index in indices],
                [bits[index] for index in indices],
                self.row.segments,
                [self.tables[index].slots for index in indices],
                [self.tables[index].thresholds for index in indices],
                self.row.jobs,
                [parts[index] for index in indices],
            )

    @property
    def is_short(self) -> bool:
        """Whether no job can have more than a chunk, so that its gradients need no sums.

        In strict mode chunks are those of the rule, in rows of any number of jobs.
        """
        sites = self.kernel_group.sites
        most = min(site.chunk for site in sites)
        if not select.is_strict():
            most = max(most, min(_SHORT_SEGMENT * self.row.jobs, SHORT_ROW))
        return self.tokens <= most and self.alike(range(len(sites))) == self.together()

    def _chunked(self, tile: Tile) -> Tile:
        """A tile of this row: all of a short one is one chunk at most."""
        widened = self.is_short and self.tokens > tile.chunk
        return replace(tile, chunk=_SHORT_CHUNK) if widened else tile

    def whole_gradients(
        self, rows: Tensor, ds: Sequence[Tensor], bits: Sequence[Tensor],
        db_parts: Sequence[Tensor], da: Sequence[Tensor], db: Sequence[Tensor], adds: bool,
    ) -> None:  # fmt: skip
        """dA and dB of all sites of a short row: `lora_a_backward` and `sum_gradients` in one.

        adds   dA is added to what is there, as `lora_b_backward` has added dB
        """
        for indices in self.together():
            first = self.kernel_group.sites[indices[0]]
            fields = {
                "dropout": first.drops, "adapter_dtype": first.adapter_dtype, "whole": True,
                "accumulate": adds, **self.beside(indices),
            }  # fmt: skip
            tile = self.tile("lora_a_backward", first, len(indices))
            if tile is None and self.tokens > first.chunk:
                spec = spec_of("lora_a_backward", first, None, **fields)
                tile = emitter("lora_a_backward").default_tile(spec)
            written = [[db_parts[index] for index in indices], [db[index] for index in indices]]
            tile = tile and self._chunked(tile)
            kernel("lora_a_backward", first, tile, **fields)(
                rows,
                [ds[index] for index in indices],
                [bits[index] for index in indices],
                self.row.segments,
                None,
                [self.tables[index].thresholds for index in indices],
                self.row.jobs,
                [self.tables[index].ranks for index in indices],
                [da[index] for index in indices],
                *([] if adds else written),
            )

    def sum_gradients(
        self, da_parts: Sequence[Tensor], db_parts: Sequence[Tensor], da: Sequence[Tensor],
        db: Sequence[Tensor], adds: bool,
    ) -> None:  # fmt: skip
        """dA and dB of all sites from their parts, in the order of chunks.

        adds   they are added to what is there
        """
        sites = self.kernel_group.sites
        for indices in self.alike(
            range(len(da)), lambda index: rule_of("sum_gradients", sites[index])
        ):
            first, tables = sites[indices[0]], [self.tables[index] for index in indices]
            fields = {"adapter_dtype": first.adapter_dtype, "accumulate": adds}
            fields |= self.beside(indices)
            kernel("sum_gradients", first, rule_of("sum_gradients", first), **fields)(
                [da_parts[index] for index in indices],
                [db_parts[index] for index in indices],
                self.row.segments,
                [table.ranks for table in tables],
                [table.slots for table in tables],
                self.row.jobs,
                [da[index] for index in indices],
                [db[index] for index in indices],
            )

    def expand(
        self, indices: Sequence[int], s: Sequence[Tensor], packed_rows: Sequence[Tensor],
        bias: Tensor | None, out: Tensor, accumulate: bool, bits: Sequence[Tensor] | None = None,
        before: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out = bias + the sum of S B over some sites, or added to out; with bits their masks.

        s, packed_rows, bits   of these sites only
        before                 what is added to, where it does not stand in out
        """
        site, tables = (
            self.kernel_group.sites[indices[0]],
            [self.tables[index] for index in indices],
        )
        columns = out.shape[1]
        fields = {
            "bias": bias is not None, "accumulate": accumulate, "dropout": bits is not None,
            "inner": columns, "outer": columns, "sites": len(indices),
        }  # fmt: skip
        written = replace(site, outer=columns, drops=bits is not None)
        tile = self.tile("expand", written, len(indices))
        if tile is None and not select.is_strict():
            tile = expand.tile_for(spec_of("expand", site, None, **fields), self.tokens)
        slots = [table.slots for table in tables]
        thresholds = [table.thresholds for table in tables]
        per_site: list[Any] = [s, packed_rows, slots, thresholds, bits]
        if len(indices) == 1:
            per_site = [None if items is None else items[0] for items in per_site]
        low, rows, slot, threshold, mask = per_site
        behind = {} if before is None else {"before": before}
        kernel("expand", site, tile, **fields)(
            low, rows, bias, self.row.segments, slot, threshold, mask, self.row.jobs, out, **behind
        )

    def tile(self, kind: Kind, site: Site, sites: int = 1) -> Tile | None:
        """The measured tile of a kernel that serves so many sites, of which this is one."""
        return select.tile_for(kind, site, self.tokens, self.gpu, sites)


def _check(tables: SiteTables, row: RowTables, group: SiteGroup, tokens: int) -> None:
    """What a site's tables must be to a row's, and to what the graph was made for."""
    if tables.jobs != row.jobs:
        raise AdapterTableError(
            "a site's tables and the row's segments are of other numbers of jobs",
            expected=f"{row.jobs} jobs",
            found=f"{tables.jobs} jobs",
        )
    check_fit(tables.max_rank, tables.drops, group.max_rank, group.drops)
    if tables.drops:
        check_masks(row, group.keys, group.token_index, tokens)


@cache
def gpu_name(device: torch.device) -> str:
    """The device's name, "" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


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
    common: dict[str, Any] = {
        "inner": site.inner,
        "outer": site.outer,
        "dtype": site.dtype,
        "rank_block": site.rank_block,
        "job_capacity": site.job_capacity,
        "arch": site.arch,
    }
    return KernelSpec(kind, **common | fields, tile=tile)


@cache
def rule_of(kind: Kind, site: Site) -> Tile:
    """Tile of one site by the rule of the kind."""
    return emitter(kind).default_tile(
        KernelSpec(
            kind, site.inner, site.outer, site.dtype, rank_block=site.rank_block, arch=site.arch
        )
    )
