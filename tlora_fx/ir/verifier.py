"""Invariants of tags and stored tensors after every pass, and what a pass changed.

An adapter node belongs to exactly one job, and only that job's nodes read it; a lowered operator
takes each job's rows by themselves, so it serves the jobs that it names. A shared node may serve
all jobs, so it reads nothing of one job alone but through a segment write. There is one loss, and
it is what the model returns.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import fx

from tlora_fx.errors import GraphInvalid, TagsBroken
from tlora_fx.ir.graph import (
    HEAD,
    GroupGraph,
    JobGraph,
    TensorRef,
    behind,
    is_call,
    output_of,
)
from tlora_fx.ir.lora_sites import is_lowered, lowered_arguments, serves_several

ROLES = ("backbone", "adapter", "shared", "table", "loss")
WRITE = torch.ops.tlora_fx.segment_write.default
# What decides the values of tables that passes make.
NUMBERS = ("rate", "site_path", "site_number")
TAGS = ("role", "jobs", "site", "part", "axis", "path", "as_it_is")


def check_tags(graphs: JobGraph | GroupGraph) -> None:
    """Check all graphs that are tagged.

    raises    TagsBroken, naming the node
    """
    for owner in owners(graphs):
        if not any("role" in node.meta for node in owner.root.nodes):
            continue
        fused = isinstance(owner, GroupGraph)
        names = tuple(owner.job_names) if isinstance(owner, GroupGraph) else (owner.name,)
        nodes = [
            (where, node)
            for where, graph in named_graphs(owner)
            for node in graph.nodes
            if node.op != "output"
        ]
        for where, node in nodes:
            _check_node(node, where, names)
        for where, node in nodes if fused else ():
            if node.meta["role"] == "adapter":
                _check_readers(node, where, tuple(node.meta["jobs"]))
        if isinstance(owner, GroupGraph):
            _check_loss(owner)


def check_tensors(graphs: JobGraph | GroupGraph) -> None:
    """Check that no two tensors of a graph are stored at one path.

    raises    GraphInvalid, naming the node that reads the second one
    """
    for owner in owners(graphs):
        for where, graph in named_graphs(owner):
            stored: dict[str, TensorRef] = {}
            for node in graph.nodes:
                ref = node.meta.get("tensor") if node.op == "get_attr" else None
                if ref is None or (first := stored.setdefault(str(node.target), ref)) == ref:
                    continue
                raise GraphInvalid(
                    "a graph stores two tensors at one path",
                    node=f"{where}.{node.name}" if where else node.name,
                    target=node.target,
                    expected=_tensor_text(first),
                    found=_tensor_text(ref),
                    help="node.meta['tensor'] says what is read, and the target only where it is "
                    "stored; to read another tensor, use the node that reads it",
                )


def _tensor_text(ref: TensorRef) -> str:
    """A stored tensor in words: "base mlp.up_proj.weight [352, 128]"."""
    return f"{ref.owner} {ref.name} {list(ref.shape)}{f', as {ref.form}' if ref.form else ''}"


def adapted(graphs: JobGraph | GroupGraph) -> set[tuple[str, str]]:
    """Jobs, and paths of sites of which trained tensors reach what the graphs return."""
    found: set[tuple[str, str]] = set()
    for owner in owners(graphs):
        root = behind([output_of(owner.root)])
        called = {node.target for node in root if node.op == "call_module"}
        for name, graph in named_graphs(owner):
            layers = [""]
            # The head is no layer: its sites have the names that they have in the base.
            if name not in ("", HEAD):
                layers = [f"{path}." for path in owner.blocks[name].instances if path in called]
            for node in behind([output_of(graph)]):
                site = node.meta.get("site")
                if node.op == "get_attr" and site is not None and node.meta["role"] == "adapter":
                    jobs = node.meta.get("jobs") or ()
                    found.update((job, layer + site) for job in jobs for layer in layers)
    return found


def hands_to_all(node: fx.Node) -> bool:
    """Whether an adapter's node holds rows of all jobs, of which it changed some jobs' parts."""
    return is_call(node, WRITE) or is_lowered(node)


def _check_node(node: fx.Node, where: str, names: tuple[str, ...]) -> None:
    role, jobs = node.meta.get("role"), tuple(node.meta.get("jobs") or ())
    if role not in ROLES:
        raise _broken(node, where, f"one of {', '.join(ROLES)}", f"role {role!r}")
    if not set(jobs) <= set(names):
        raise _broken(node, where, f"jobs among {', '.join(names)}", ", ".join(jobs))
    if role == "adapter" and len(jobs) != 1 and not _serves_several(node):
        raise _broken(node, where, "an adapter node of exactly one job", _names(jobs))
    if role == "shared" and jobs != names:
        raise _broken(node, where, "a shared node that serves all jobs", _names(jobs))
    if serves_several(node):
        _check_results(node, where)


def _check_results(node: fx.Node, where: str) -> None:
    """Each site of an operator has one result, which carries the site's tags."""
    sites = len(lowered_arguments(node)["weight"])
    indices = {user.args[1] for user in node.users if is_call(user, operator.getitem)}
    if len(node.users) != sites or indices != set(range(sites)):
        found = ", ".join(user.format_node() or user.name for user in node.users) or "none"
        raise _broken(node, where, f"a getitem for each of its {sites} sites", found)


def _check_readers(node: fx.Node, where: str, jobs: tuple[str, ...]) -> None:
    """What one job's node computes reaches others through a segment write only."""
    if hands_to_all(node):
        return
    for user in node.users:
        theirs = tuple(user.meta.get("jobs") or ())
        if (
            user.op == "output"
            or user.meta.get("role") != "adapter"
            or not set(jobs) <= set(theirs)
        ):
            found = f"{user.name}, {user.meta.get('role')} of {_names(theirs)}, reads it"
            raise _broken(node, where, f"read by nodes of {_names(jobs)} only", found)


def _serves_several(node: fx.Node) -> bool:
    """Whether a node is a lowered operator, or computes what only such operators read."""
    if is_lowered(node):
        return True
    return bool(node.users) and all(_serves_several(user) for user in node.users)


def _check_loss(group: GroupGraph) -> None:
    nodes = [node for graph in group.graphs() for node in graph.nodes]
    losses = [node for node in nodes if node.meta.get("role") == "loss"]
    if not losses:
        return
    returned = [
        item for item in pytree.tree_leaves(output_of(group.root).args) if isinstance(item, fx.Node)
    ]
    if len(losses) != 1 or returned != losses:
        found = ", ".join(node.name for node in losses)
        raise _broken(losses[-1], "", "one loss, which the model returns", found)
    shape = tuple(losses[0].meta["val"].shape)
    if shape != (len(group.jobs),):
        raise _broken(losses[0], "", f"a loss for each of {len(group.jobs)} jobs", str(shape))


def _names(jobs: tuple[str, ...]) -> str:
    return ", ".join(jobs) or "no job"


def _broken(node: fx.Node, where: str, expected: str, found: str) -> TagsBroken:
    return TagsBroken(
        "a node's tags do not hold",
        node=f"{where}.{node.name}" if where else node.name,
        target=node.target,
        expected=expected,
        found=found,
        help="new nodes take role and jobs from the nodes that they are made of; an operator of "
        "your own that serves several jobs is registered with tlora_fx.ops.register_operator",
    )


# A hash of graphs, by which the pipeline sees what a pass changed.


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint of what graphs compute, and of what passes know of their nodes.

    code    of operators, arguments, tensors, and which layers run which block
    tags    of role, jobs, site, part, axis, path
    """

    code: str
    tags: str

    def change_to(self, after: Fingerprint) -> Literal["code", "tags", ""]:
        """Kind of the change to a later fingerprint: the code, only tags, or nothing."""
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
                block = owner.blocks[name]
                staged = f"{block.budget} {block.joint}" if block.is_staged else ""
                code.update(f"{block.instances}{staged}".encode())
            code.update("\n".join(_code(graph)).encode())
            lines = (" ".join(str(node.meta.get(tag)) for tag in TAGS) for node in graph.nodes)
            tags.update("\n".join(lines).encode())
        for name, value in owner.constants.items():
            code.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            if not value.is_meta:
                flat = value.detach().cpu().reshape(-1).contiguous()
                code.update(flat.view(torch.uint8).numpy().tobytes())
        code.update("\n".join(_numbers(owner)).encode())
    return Fingerprint(code.hexdigest(), tags.hexdigest())


def owners(graphs: JobGraph | GroupGraph) -> list[JobGraph | GroupGraph]:
    """Owners of the graphs that a pass rewrites: the given ones, or base and jobs before fusion."""
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
    indices = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        tensor = (
            f" {node.meta['tensor']}" if node.op == "get_attr" and "tensor" in node.meta else ""
        )
        kwargs = _shnumbers(node.kwargs, indices) if node.kwargs else ""
        numbers = "".join(f" {tag}={node.meta[tag]}" for tag in NUMBERS if tag in node.meta)
        for job, branch in (node.meta.get("branches") or {}).items():
            numbers += f" {job} {branch.scaling} {branch.dropout}"
        yield f"{node.op} {node.target} {_shnumbers(node.args, indices)}{kwargs}{tensor}{numbers}"


def _shnumbers(value: Any, indices: dict[fx.Node, int]) -> str:
    """An argument as text, nodes by their index."""
    if isinstance(value, fx.Node):
        return f"%{indices.get(value, -1)}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(_shnumbers(item, indices) for item in value)})"
    if isinstance(value, dict):
        return ",".join(f"{name}={_shnumbers(item, indices)}" for name, item in value.items())
    if isinstance(value, slice):
        return f"slice{_shnumbers((value.start, value.stop, value.step), indices)}"
    return repr(value)
