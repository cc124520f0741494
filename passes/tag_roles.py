"""Say of every node whether it is backbone or adapter, and which part of a LoRA branch.

Reads   module paths (PEFT's wrapper around a site) and the owners of tensors.
Writes  role, jobs, site and part.
Keeps   the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import AdapterSite, JobGraph, TensorRef, is_call, under
from tlora_fx.pipeline import JobPass, Numerics, register
from tlora_fx.tracing.export import SOME_SCALING

aten = torch.ops.aten
PARTS = {"lora_A.default": "a", "lora_B.default": "b", "lora_dropout.default": "dropout"}


@register
@dataclass(frozen=True, slots=True)
class TagRoles(JobPass):
    """Tag nodes as backbone, or as adapter of a job at a site."""

    name: ClassVar[str] = "tag-roles"
    requires: ClassVar[frozenset[str]] = frozenset({"drop-export-noise"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, graph: JobGraph) -> None:
        for node in graph.root.nodes:
            path = _module_of(node)
            site = _site_of(path, graph.sites)
            adapter = site is not None and (
                site.rank == 0 or not under(path, f"{site.path}.base_layer")
            )
            node.meta["role"] = "adapter" if adapter else "backbone"
            node.meta["jobs"] = (graph.name,) if adapter else ()
            if adapter and site is not None:
                node.meta["site"] = site.path
                node.meta["part"] = _part(node, path, site)


def _module_of(node: fx.Node) -> str:
    ref = node.meta.get("tensor")
    if isinstance(ref, TensorRef) and ref.owner == "job":
        return str(node.target).rpartition(".")[0]
    return str(node.meta.get("path", ""))


def _site_of(path: str, sites: dict[str, AdapterSite]) -> AdapterSite | None:
    while path:
        if path in sites:
            return sites[path]
        path = path.rpartition(".")[0]
    return None


def _part(node: fx.Node, path: str, site: AdapterSite) -> str | None:
    """Which part of `scaling * B(A(dropout(x)))` a node is, None for all else."""
    if site.kind != "lora" or node.op != "call_function":
        return None
    inside = path[len(site.path) + 1 :]
    if inside in PARTS and is_call(node, aten.linear.default, aten.dropout.default):
        return PARTS[inside]
    if (
        is_call(node, aten.mul.Tensor)
        and node.args[1] in (site.scaling, SOME_SCALING)
        and not inside
    ):
        return "scale"
    return "sum" if is_call(node, aten.add.Tensor) and not inside else None
