"""Let sites that read one input share one operator, which reads that input once.

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
from typing import Any, ClassVar

from torch import fx

from tlora_fx.ir.graph import MADE_FROM, ORIGIN, GroupGraph, derive, is_call
from tlora_fx.ir.lora_sites import LISTED, ONE, SEVERAL, LoweredSite, lowered_site, lowered_sites
from tlora_fx.ir.shapes import RUN
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import Maker, Rewriter

# Generated kernels unroll over the sites of one operator.
MOST_SITES = 4
# What all sites of one operator must have in common.
COMMON = ("x", "segments", "keys", "token_index", "compute_dtype")
# What belongs to the node itself and goes with it.
OWN = ("val", RUN, ORIGIN, MADE_FROM)


@register
@dataclass(frozen=True, slots=True)
class ShareInput(GroupPass):
    """Group lowered sites that read one input.

    max_sites   sites that one operator may serve, at most 4
    """

    name: ClassVar[str] = "share-input"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters"})
    preserves_numerics: ClassVar[Numerics] = "bound"

    max_sites: int = MOST_SITES

    def run(self, group: GroupGraph) -> None:
        most = min(self.max_sites, MOST_SITES)
        for where, graph in named_graphs(group):
            for results in list(_sharing(graph, most)):
                sites = [site for node in results if (site := lowered_site(node)) is not None]
                needed = _needed(graph, sites)
                paths = ", ".join(f"{where}.{site.path}".strip(".") for site in sites)
                if needed is not None and rewrite_allowed(f"multi_lora_linears at {paths}"):
                    _share(graph, sites, needed, group.job_names)


def _sharing(graph: fx.Graph, most: int) -> Iterator[list[fx.Node]]:
    """The results of sites that may become one operator, two at least, in the graph's order."""
    groups: dict[Any, list[list[LoweredSite]]] = {}
    for site in lowered_sites(graph):
        if not is_call(site.call, ONE):
            continue
        dtype = site.arguments["a"].meta["val"].dtype
        sets = groups.setdefault((dtype, *(site.arguments[name] for name in COMMON)), [[]])
        if len(sets[-1]) == most or _needed(graph, [*sets[-1], site]) is None:
            sets.append([])
        sets[-1].append(site)
    for sites in (sites for sets in groups.values() for sites in sets if len(sites) > 1):
        yield [site.result for site in sites]


def _needed(graph: fx.Graph, sites: list[LoweredSite]) -> list[fx.Node] | None:
    """What must stand before the first site so that all may run there, in the graph's order.

    returns   None where one site reads what another one computes
    """
    needed: dict[fx.Node, None] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}
    results = [site.result for site in sites]
    stack = list(results)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in results:
                return None
            if source not in needed and order[source] > order[results[0]]:
                needed[source] = None
                stack.append(source)
    return sorted(needed, key=order.__getitem__)


def _share(
    graph: fx.Graph, sites: list[LoweredSite], needed: list[fx.Node], names: list[str]
) -> None:
    """Put one operator in place of several, where the first of them stands."""
    results = [site.result for site in sites]
    for node in needed:
        results[0].prepend(node)
    served = {job for site in sites for job in site.jobs}
    tags = {
        "role": "adapter",
        "jobs": tuple(name for name in names if name in served),
        "site": "",
        "path": _common([site.path for site in sites]),
    }
    make = Rewriter(graph).at(results[0], tags)
    shared = make(SEVERAL, *_arguments(sites))
    derive(shared, *results)
    shared_results = [_result(make, shared, index, old) for index, old in enumerate(results)]
    for old, new in zip(results, shared_results, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)


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


def _result(make: Maker, shared: fx.Node, index: int, old: fx.Node) -> fx.Node:
    """One site's result, with everything that passes know of the node that it stands for."""
    result = make(operator.getitem, shared, index)
    result.meta.update({tag: value for tag, value in old.meta.items() if tag not in OWN})
    return derive(result, old)


def _common(paths: list[str]) -> str:
    """The module that all of these lie in, "" for the root."""
    parts = [path.split(".")[:-1] for path in paths]
    same = 0
    while all(len(own) > same and own[same] == parts[0][same] for own in parts):
        same += 1
    return ".".join(parts[0][:same])
