"""The launchers of the kernels of a site, by kind, site and tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec, Kind, Tile
from tlora_fx.ops.kernels.support import Site


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
