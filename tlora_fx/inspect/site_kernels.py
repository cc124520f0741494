"""The generated kernels that serve a model's sites, as text, for its dump.

Which of them run is chosen by token count when the operators are called; here stand those of the
plan that fuses the rank block into the GEMM, and of the one that leaves the GEMM to the library.
Triton is not needed, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from tlora_fx.codegen.kernels import build
from tlora_fx.codegen.spec import DTYPES, MOST_SITES, KernelSpec
from tlora_fx.errors import KernelSpecError
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.lora_sites import LoweredSite, lowered_sites
from tlora_fx.ops.kernels.support import job_capacity, rank_block

GRANULE = 16
ARCHITECTURE = 90


@dataclass(frozen=True, slots=True)
class _Served:
    """A site as kernels see it: what all of its specs have in common, and the rest."""

    plain: KernelSpec
    adapter_dtype: Any
    dropout: bool
    bias: bool
    layout: Any
    frozen: bool


def kernel_files(group: GroupGraph, arch: int = ARCHITECTURE) -> dict[str, str]:
    """The text of each kernel of a model's sites by file name, without repetition.

    arch    compute capability that they are generated for
    """
    specs: dict[KernelSpec, None] = {}
    for graph in group.graphs():
        for _, sites in groupby(lowered_sites(graph), key=lambda site: site.call):
            specs.update(dict.fromkeys(_specs(list(sites), len(group.jobs), arch)))
    files = {}
    for spec in specs:
        try:
            made = build(spec)
        except KernelSpecError:
            continue  # the operators take another plan there, too
        files[f"{made.name}.py"] = made.text
    return dict(sorted(files.items()))


def _specs(sites: list[LoweredSite], jobs: int, arch: int) -> Iterator[KernelSpec]:
    found = [_served(site, jobs, arch) for site in sites]
    served = [site for site in found if site is not None]
    if len(served) < len(sites):
        return  # PyTorch serves the whole group
    for _, together in groupby(served, key=lambda site: site.plain.rank_block):
        alike = list(together)
        for start in range(0, len(alike), MOST_SITES):
            count, first = len(alike[start : start + MOST_SITES]), alike[start]
            read = replace(first.plain, sites=count, dropout=first.dropout)
            yield replace(read, kind="shrink")
            yield replace(read, kind="lora_a_backward")
            # An expand has one width, that of what it writes.
            yield replace(read, kind="expand", outer=read.inner, accumulate=start > 0)
    for place, site in enumerate(served):
        yield from _own(site, place > 0)


def _own(site: _Served, later: bool) -> Iterator[KernelSpec]:
    """What a site has for itself; a later one adds its part of dx to the first one's."""
    plain, outer = site.plain, site.plain.outer
    stored = replace(plain, adapter_dtype=site.adapter_dtype)
    biased = replace(plain, bias=site.bias, weight_layout=site.layout)
    back = replace(plain, dropout=site.dropout, accumulate=later)
    yield replace(stored, kind="pack")
    yield replace(plain, kind="lora_b_backward")
    yield replace(plain, kind="sum_ds")
    yield replace(stored, kind="sum_gradients")
    if site.frozen:
        yield replace(biased, kind="forward")
        yield replace(back, kind="input_gradient", weight_layout=site.layout)
    yield replace(plain, kind="expand", inner=outer, bias=site.bias, accumulate=not site.frozen)


def _served(site: LoweredSite, jobs: int, arch: int) -> _Served | None:
    """The site's specs, or None where PyTorch serves it: its types or sizes have no kernels."""
    given = site.arguments
    x, a, b = (given[name].meta["val"] for name in ("x", "a", "b"))
    dtype, stored = (str(value.dtype).removeprefix("torch.") for value in (x, a))
    inner, outer = int(a.shape[1]), int(b.shape[1])
    fits = dtype in DTYPES and stored in DTYPES and x.dtype != torch.float64
    if not fits or given["compute_dtype"] != x.dtype or inner % GRANULE or outer % GRANULE:
        return None
    weight = given.get("weight")
    turned = weight is not None and weight.meta["val"].stride(1) != 1
    plain = KernelSpec(
        "pack",
        inner,
        outer,
        dtype=dtype,  # type: ignore[arg-type]  # it is one of DTYPES
        rank_block=rank_block(given["max_rank"] or int(a.shape[0])),
        job_capacity=job_capacity(jobs),
        arch=arch,
    )
    return _Served(
        plain=plain,
        adapter_dtype=stored,
        dropout=bool(given["drops"]),
        bias=given.get("bias") is not None,
        layout="in_out" if turned else "out_in",
        frozen=weight is not None,
    )
