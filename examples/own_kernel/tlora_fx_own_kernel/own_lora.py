"""Let `own_kernel::fused_lora` apply the adapters of sites.

Reads   the lowered sites of `lower-adapters`.
Writes  the frozen linear by itself, and one operator behind it with the adapters of all jobs.
Keeps   numbers up to rounding; sites with dropout, DoRA or large ranks are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph, is_call
from tlora_fx.ir.lora_sites import LoweredSite, lowered_sites
from tlora_fx.pipeline import GroupPass, Numerics, count, register
from tlora_fx.rewriting import Maker, Rewriter
from tlora_fx_own_kernel.fused_lora import FusedLora

LINEAR = torch.ops.aten.linear.default
SITE = torch.ops.tlora_fx.multi_lora_linear.default


@register
@dataclass(frozen=True, slots=True)
class OwnLora(GroupPass):
    """Apply the adapters of sites by own_kernel's kernels.

    max_rank   leave sites alone where a job's rank may be larger
    """

    name: ClassVar[str] = "own-lora"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters"})
    preserves_numerics: ClassVar[Numerics] = "bound"
    statistics: ClassVar = {"sites": "sites that own_kernel serves"}

    max_rank: int = 128

    def run(self, group: GroupGraph) -> None:
        """Replace the operator of each site that `takes` it."""
        for graph in group.graphs():
            for site in [site for site in lowered_sites(graph) if self.takes(site)]:
                tags = {"role": "shared", "jobs": tuple(group.job_names), "site": ""}
                Rewriter(graph).replace(site.result, partial(_fused, site, tags))
                count("sites")

    def takes(self, site: LoweredSite) -> bool:
        """Whether the operator computes what a site does."""
        given = site.arguments
        x, a = (given[name].meta["val"] for name in ("x", "a"))
        return (
            is_call(site.call, SITE)
            and not given["drops"]
            and given["compute_dtype"] == x.dtype
            and (given["max_rank"] or a.shape[0]) <= self.max_rank
        )


def _fused(site: LoweredSite, tags: dict[str, Any], make: Maker) -> fx.Node:
    given = site.arguments
    names = ("a", "b", "ranks", "scales", "rates", "site", "segments")
    frozen = make.tagged(**tags)(LINEAR, given["x"], given["weight"], given["bias"])
    largest = given["max_rank"] or given["a"].meta["val"].shape[0]
    return make(FusedLora.target, frozen, given["x"], *(given[name] for name in names), largest)
