"""Take a piece of a graph out into a block, and put one back.

A block's graph takes what the piece reads as inputs. Sizes of the row are read from those inputs,
never passed in. Tensors under the block's own path become its own, named relative to it. Of a fused
group, an input is every job's where it holds whole rows, whichever job wrote into it last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tlora_fx.errors import NotOutlinable
from tlora_fx.ir.graph import (
    PEFT_PREFIX,
    Block,
    GroupGraph,
    JobGraph,
    TensorRef,
    derive,
    output_of,
    placeholders,
    under,
)
from tlora_fx.ir.verifier import hands_to_all
from tlora_fx.pipeline import rewrite_allowed

# Tags that say what a node does at a site; its value as an input does nothing there.
OF_A_SITE = ("site", "branches", "as_it_is")


@dataclass(frozen=True, slots=True)
class OutlinedGraph:
    """A piece of a graph as a graph of its own; the graph that it comes from is as it was.

    graph     inputs as placeholders, the results as its output
    inputs    the outer nodes that the placeholders stand for, in order
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    results: list[fx.Node]
    nodes: list[fx.Node]

    @property
    def result(self) -> fx.Node:
        """The one result."""
        (result,) = self.results
        return result


def outline(
    nodes: Iterable[fx.Node],
    path: str = "",
    first: Mapping[fx.Node, str] | None = None,
    jobs: Sequence[str] = (),
) -> OutlinedGraph:
    """Copy a piece of a graph into a graph of its own.

    path      module path that tensors, paths and sites become relative to. "" leaves all names as
              they are, and stored tensors from outside are read by the piece itself
    first     outer nodes that are its first inputs, and what they are called
    jobs      all jobs of a fused group; none where the graph is one job's
    raises    NotOutlinable for a size that no input has
    """
    copier = _Copier(list(nodes), path, tuple(jobs))
    for source, name in (first or {}).items():
        copier.pass_in(source, name)
    copier.pass_in_all()
    for node in copier.nodes:
        copier.copy(node)
    results = [n for n in copier.nodes if any(user not in copier.inside for user in n.users)]
    outputs = [copier.made[node] for node in results]
    copier.body.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    return OutlinedGraph(copier.body, copier.inputs, results, copier.nodes)


def outline_block(
    graphs: JobGraph | GroupGraph, nodes: Iterable[fx.Node], name: str, path: str
) -> Block | None:
    """Replace a piece of the root by a call of a new block.

    nodes     of the root, in its order; stored tensors outside `path` are passed in
    name      of the block, an identifier that is free
    path      module path of its one instance
    returns   the block, None where the rewrite is held back
    raises    NotOutlinable where the piece hands on more than one value
    """
    if not rewrite_allowed(f"outline {name}"):
        return None
    kept = [node for node in nodes if node.op != "get_attr" or under(_tensor_path(node), path)]
    piece = outline(kept, path, jobs=graphs.job_names if isinstance(graphs, GroupGraph) else ())
    if len(piece.results) != 1 or name in graphs.blocks or not path:
        raise NotOutlinable(
            "a piece of a graph cannot become a block",
            block=name,
            found=f"results {', '.join(map(str, piece.results)) or 'none'}; path '{path}'",
            expected="one result, a free name and a path",
            help="leave out of the piece what others read",
        )
    (result,) = piece.results
    with graphs.root.inserting_before(result):
        call = graphs.root.call_module(path, tuple(piece.inputs))
    call.meta.update({key: result.meta[key] for key in ("role", "jobs", "val", "axis")
                      if key in result.meta}, path=path, source="")  # fmt: skip
    derive(call, *(node for node in piece.nodes if node.op == "call_function"))
    result.replace_all_uses_with(call)
    for node in reversed(piece.nodes):
        graphs.root.erase_node(node)
    graphs.blocks[name] = Block(name, piece.graph, (path,))
    return graphs.blocks[name]


def inline_block(graphs: JobGraph | GroupGraph, call: fx.Node) -> list[fx.Node] | None:
    """Replace a call of a block by the block's own nodes; these, or None where it is held back.

    raises    NotOutlinable for a node that calls no block, and a block that hands on several values
    """
    path = str(call.target)
    named = ((n, b) for n, b in graphs.blocks.items() if path in b.instances)
    name, block = next(named, ("", None))
    result = output_of(block.graph).args[0] if block is not None else None
    if block is None or not isinstance(result, fx.Node):
        raise NotOutlinable(
            "this is no call of a block, or its block hands on several values",
            node=call.format_node(),
            expected="a call of a layer: "
            + ", ".join(layer for b in graphs.blocks.values() for layer in b.instances[:2]),
            help="give inline_block a node whose op is call_module",
        )
    if not rewrite_allowed(f"inline {path}"):
        return None
    copies: dict[fx.Node, fx.Node] = dict(
        zip(placeholders(block.graph).values(), call.args, strict=True)  # type: ignore[arg-type]
    )
    new = []
    for node in block.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with graphs.root.inserting_before(call):
            copies[node] = graphs.root.node_copy(node, lambda n: copies[n])
        _make_absolute(copies[node], path)
        new.append(copies[node])
    call.replace_all_uses_with(copies[result])
    graphs.root.erase_node(call)
    left = tuple(layer for layer in block.instances if layer != path)
    if left:
        graphs.blocks[name] = replace(block, instances=left)
    else:
        del graphs.blocks[name]
    return new


class _Copier:
    def __init__(self, nodes: list[fx.Node], path: str, jobs: tuple[str, ...] = ()) -> None:
        self.nodes, self.path, self.jobs = nodes, path, jobs
        self.inside = set(nodes)
        self.body = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []

    def pass_in(self, source: fx.Node, name: str) -> None:
        self.made[source] = copied = self.body.placeholder(name)
        copied.meta = dict(source.meta)
        if self.jobs and hands_to_all(source):
            copied.meta = {tag: value for tag, value in copied.meta.items() if tag not in OF_A_SITE}
            copied.meta.update(role="shared", jobs=self.jobs)
        self.inputs.append(source)

    def pass_in_all(self) -> None:
        for node in self.nodes:
            for source in node.all_input_nodes:
                own = source.op == "get_attr" and not self.path
                known = source in self.inside or source in self.made
                if not known and not own and not _is_size(source):
                    self.pass_in(source, _input_name(source))

    def copy(self, node: fx.Node) -> fx.Node:
        copied = self.body.node_copy(node, self._take)
        if self.path:
            _make_relative(copied, self.path)
        self.made[node] = copied
        return copied

    def _take(self, source: fx.Node) -> fx.Node:
        if source in self.made:
            return self.made[source]
        return self.copy(source) if source.op == "get_attr" else self._size(source)

    def _size(self, size: fx.Node) -> fx.Node:
        """A size of the row, read from an input or computed anew from those that are."""
        value = size.meta["val"]
        for source in self.inputs:
            tensor = source.meta.get("val")
            for dim, extent in enumerate(tensor.shape if isinstance(tensor, torch.Tensor) else ()):
                if not isinstance(extent, int) and str(extent) == str(value):
                    with self.body.inserting_after(self.made[self.inputs[-1]]):
                        args = (self.made[source], dim)
                        copied = self.body.call_function(torch.ops.aten.sym_size.int, args)
                    return self._keep_size(size, copied)
        if size.op != "call_function" or not size.all_input_nodes or not _is_size(size):
            raise NotOutlinable(
                "a piece of a graph needs a size that none of its inputs has",
                found=size.format_node(),
            )
        return self._keep_size(size, self.body.node_copy(size, self._take))

    def _keep_size(self, size: fx.Node, copied: fx.Node) -> fx.Node:
        copied.meta = {**size.meta, "path": ""}
        self.made[size] = copied
        return copied


def _input_name(source: fx.Node) -> str:
    if source.op == "placeholder":
        return str(source.target)
    ref = source.meta.get("tensor")
    return ref.name.replace(".", "_") if ref is not None else source.name


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _tensor_path(node: fx.Node) -> str:
    """The name of a stored tensor as the base has it; constants belong to no module."""
    ref: TensorRef = node.meta["tensor"]
    return "" if ref.owner == "constant" else ref.name.removeprefix(PEFT_PREFIX)


def _make_relative(node: fx.Node, path: str) -> None:
    """Name a copied node's tensor, module and site relative to a path."""
    if node.op == "get_attr":
        ref: TensorRef = node.meta["tensor"]
        # A fused graph puts the job before the path: "j0.model.layers.0...".
        node.target = str(node.target).replace(f"{path}.", "", 1)
        if ref.owner != "constant":
            node.meta["tensor"] = replace(ref, name=_tensor_path(node)[len(path) + 1 :])
    else:
        node.meta["path"] = _inside(str(node.meta.get("path") or ""), path)
    if "site" in node.meta:
        node.meta["site"] = _inside(node.meta["site"], path)


def _make_absolute(node: fx.Node, path: str) -> None:
    """Name a copied node's tensor, module and site as the whole model does."""
    if node.op == "get_attr":
        ref: TensorRef = node.meta["tensor"]
        prefix = "" if ref.owner == "constant" else f"{path}."
        node.target = f"{prefix}{node.target}"
        peft = PEFT_PREFIX if ref.owner == "job" else ""
        node.meta["tensor"] = replace(ref, name=f"{peft if prefix else ''}{prefix}{ref.name}")
    for key in ("path", "site", "site_path"):
        if key in node.meta:
            node.meta[key] = f"{path}.{node.meta[key]}".removesuffix(".")


def _inside(name: str, path: str) -> str:
    """A module path relative to another that it lies in; others stay."""
    return name[len(path) + 1 :] if under(name, path) else name
