"""Merge the operators of sites that read one input, so that it is read once.

Reads   the multi_lora_linear nodes that lower-adapters made.
Writes  one multi_lora_linears for those that read the same value (q, k and v; gate and up), and a
        getitem for each site, which takes over the tags of the node that it stands for.
Keeps   every site's numbers. Gradients of the shared input are summed inside the operator instead
        of behind it, so they may differ by rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from tlora_fx.ir.graph import GroupGraph, is_call
from tlora_fx.ir.lora_sites import LISTED, ONE, SEVERAL, LoweredSite, lowered_site, lowered_sites
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import Maker, Rewriter
from tlora_fx.rewriting.rewriter import needed_before

# Generated kernels unroll over the sites of one operator.
MAX_SITES = 4
# What all sites of one operator must have in common.
COMMON = ("x", "segments", "keys", "token_index", "compute_dtype")


@register
@dataclass(frozen=True, slots=True)
class ShareInput(GroupPass):
    """Group lowered sites that read one input.

    max_sites   largest number of sites that one operator serves, at most 4
    """

    name: ClassVar[str] = "share-input"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    max_sites: int = MAX_SITES

    def run(self, group: GroupGraph) -> None:
        most = min(self.max_sites, MAX_SITES)
        for where, graph in named_graphs(group):
            for results in list(_sharing(graph, most)):
                sites = [site for node in results if (site := lowered_site(node)) is not None]
                paths = ", ".join(f"{where}.{site.path}".strip(".") for site in sites)
                Rewriter(graph).replace_several(
                    [site.result for site in sites],
                    partial(_shared, sites),
                    f"multi_lora_linears at {paths}",
                    _tags(sites, group.job_names),
                )


def _sharing(graph: fx.Graph, most: int) -> Iterator[list[fx.Node]]:
    """The results of sites that may become one operator, two at least, in the graph's order."""
    groups: dict[Any, list[list[LoweredSite]]] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for site in lowered_sites(graph):
        if not is_call(site.call, ONE):
            continue
        dtype = site.arguments["a"].meta["val"].dtype
        sets = groups.setdefault((dtype, *(site.arguments[name] for name in COMMON)), [[]])
        results = [known.result for known in (*sets[-1], site)]
        # None of them may read what another one computes.
        if len(results) > most or needed_before(results[0], results, order) is None:
            sets.append([])
        sets[-1].append(site)
    for sites in (sites for sets in groups.values() for sites in sets if len(sites) > 1):
        yield [site.result for site in sites]


def _tags(sites: list[LoweredSite], names: list[str]) -> dict[str, Any]:
    """Of the operator that several sites share."""
    served = {job for site in sites for job in site.jobs}
    return {
        "role": "adapter",
        "jobs": tuple(name for name in names if name in served),
        "site": "",
        "path": _common([site.path for site in sites]),
    }


def _shared(sites: list[LoweredSite], make: Maker) -> list[fx.Node]:
    """One operator in place of several, and each site's result."""
    shared = make(SEVERAL, *_arguments(sites))
    return [make(operator.getitem, shared, index) for index in range(len(sites))]


def _arguments(sites: list[LoweredSite]) -> Iterator[Any]:
    """What the operator takes: a list for what each site has for itself."""
    for name, common in sites[0].arguments.items():
        own = [site.arguments[name] for site in sites]
        if name in LISTED:
            yield own
        elif name == "max_rank":
            yield max(own)
        elif name == "drops":
            yield any(own)
        else:
            yield common


def _common(paths: list[str]) -> str:
    """The module that all of these lie in, "" for the root."""
    parts = [path.split(".")[:-1] for path in paths]
    same = 0
    while all(len(own) > same and own[same] == parts[0][same] for own in parts):
        same += 1
    return ".".join(parts[0][:same])
