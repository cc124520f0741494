"""A hash of graphs, by which the pipeline sees what a pass changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph, JobGraph

# What decides the values of tables that passes make.
NUMBERS = ("rate", "site_path", "site_number")
TAGS = ("role", "jobs", "site", "part", "axis", "path", "as_it_is")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What graphs compute, and what passes know of their nodes.

    code    of operators, arguments, tensors, and which layers run which block
    tags    of role, jobs, site, part, axis, path
    """

    code: str
    tags: str

    def change_to(self, after: Fingerprint) -> Literal["code", "tags", ""]:
        """What differs after: the code, only tags, or nothing."""
        if self.code != after.code:
            return "code"
        return "tags" if self.tags != after.tags else ""


def fingerprint(graphs: JobGraph | GroupGraph) -> Fingerprint:
    """The fingerprint of all graphs that a pass may rewrite."""
    code, tags = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for owner in owners(graphs):
        for name, graph in named_graphs(owner):
            code.update(f"\n{name}".encode())
            if name:
                code.update(str(owner.blocks[name].instances).encode())
            code.update("\n".join(_code(graph)).encode())
            tags.update("\n".join(_tags(graph)).encode())
        for name, value in owner.constants.items():
            code.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            if not value.is_meta:
                flat = value.detach().cpu().reshape(-1).contiguous()
                code.update(flat.view(torch.uint8).numpy().tobytes())
        code.update("\n".join(_numbers(owner)).encode())
    return Fingerprint(code.hexdigest(), tags.hexdigest())


def owners(graphs: JobGraph | GroupGraph) -> list[JobGraph | GroupGraph]:
    """Whose graphs a pass rewrites: the given ones; base and jobs of a group that is not fused."""
    if isinstance(graphs, GroupGraph) and not graphs.fused:
        distinct: dict[int, JobGraph] = {}
        for job in graphs.jobs:
            distinct.setdefault(id(job.root), job)
        return [graphs.base, *distinct.values()]
    return [graphs]


def named_graphs(graphs: JobGraph | GroupGraph) -> Iterator[tuple[str, fx.Graph]]:
    """The root, named "", and every block's graph with the block's name."""
    yield "", graphs.root
    for name, block in graphs.blocks.items():
        yield name, block.graph


def _numbers(owner: JobGraph | GroupGraph) -> Iterator[str]:
    """Ranks, scalings and rates: they stand in no operator, and still decide what comes out."""
    if isinstance(owner, GroupGraph):
        yield f"{owner.exact} {owner.compute}"
    for job in owner.jobs if isinstance(owner, GroupGraph) else [owner]:
        for site in job.sites.values():
            yield f"{job.name} {site.path} {site.rank} {site.scaling} {site.dropout} {site.kind}"


def _code(graph: fx.Graph) -> Iterator[str]:
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        tensor = (
            f" {node.meta['tensor']}" if node.op == "get_attr" and "tensor" in node.meta else ""
        )
        kwargs = _shown(node.kwargs, places) if node.kwargs else ""
        own = "".join(f" {tag}={node.meta[tag]}" for tag in NUMBERS if tag in node.meta)
        for job, branch in (node.meta.get("branches") or {}).items():
            own += f" {job} {branch.scaling} {branch.dropout}"
        yield f"{node.op} {node.target} {_shown(node.args, places)}{kwargs}{tensor}{own}"


def _shown(value: Any, places: dict[fx.Node, int]) -> str:
    """An argument as text, nodes by their place."""
    if isinstance(value, fx.Node):
        return f"%{places.get(value, -1)}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(_shown(item, places) for item in value)})"
    if isinstance(value, dict):
        return ",".join(f"{name}={_shown(item, places)}" for name, item in value.items())
    if isinstance(value, slice):
        return f"slice{_shown((value.start, value.stop, value.step), places)}"
    return repr(value)


def _tags(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        yield " ".join(str(node.meta.get(tag)) for tag in TAGS)
