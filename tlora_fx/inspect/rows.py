"""Group the nodes of a fused graph by module: what becomes one row of a listing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tlora_fx.inspect.cost import MOVES, operator_name
from tlora_fx.ir.graph import TensorRef
from tlora_fx.ir.lora_sites import is_lowered, lowered_site, serves_several

# What a module is called by, when it holds one of these; the first that it holds.
PRINCIPAL = {
    "multi_lora_linear": "multi_lora_linear",
    "packed_attention": "packed_attention",
    "scaled_dot_product_attention": "attention",
    "linear": "linear",
    "addmm": "linear",
    "embedding": "embedding",
    "layer_norm": "layer_norm",
    "native_layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "softmax": "softmax",
    "_softmax": "softmax",
    "matmul": "matmul",
    "bmm": "matmul",
}
RMS_NORM = {"mean", "rsqrt"}
NOT_LOWERED = "no pass lowered it"
SHOWN_OPERATORS = 3


@dataclass(slots=True)
class ModuleNodes:
    """The nodes of one module.

    nodes       what runs for all jobs, the site's multi_lora_linear, or its part of one, included
    branches    what runs for one job alone, by job
    reasons     why it does, by job
    """

    module: str
    nodes: list[fx.Node] = field(default_factory=list)
    branches: dict[str, list[fx.Node]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def matters(self) -> bool:
        """Whether the module computes anything, reads weights or has a branch of a job."""
        moved = all(operator_name(node) in MOVES for node in self.nodes)
        return not moved or bool(self.branches) or self.reads("base") != set()

    @property
    def value(self) -> torch.Tensor | None:
        """The module's result, as a fake tensor."""
        for node in reversed(self.nodes):
            found = node.meta.get("val")
            found = found[0] if isinstance(found, (tuple, list)) and found else found
            if isinstance(found, torch.Tensor):
                return found
        return None

    @property
    def source(self) -> str:
        """The line of model code that the module's last operator comes from."""
        return next((n.meta["source"] for n in reversed(self.nodes) if n.meta.get("source")), "")

    @property
    def lowered(self) -> fx.Node | None:
        """The result of the operator that serves the adapters of all jobs here."""
        return next((n for n in self.nodes if lowered_site(n) is not None), None)

    def reads(self, owner: str) -> set[fx.Node]:
        """The get_attr nodes of tensors of an owner ("base", "job") that the module reads."""
        return {
            source
            for node in (*self.nodes, *(n for own in self.branches.values() for n in own))
            for source in _read_by(node)
            if source.op == "get_attr" and owner_of(source) == owner
        }

    def operator(self) -> str:
        """What the module computes, in a word or a few."""
        names = Counter(operator_name(node) for node in self.nodes)
        named = next((PRINCIPAL[name] for name in PRINCIPAL if name in names), None)
        if named is not None:
            return named
        if set(names) >= RMS_NORM:
            return "rms_norm"
        found = [(name, n) for name, n in names.items() if name not in MOVES] or list(names.items())
        shown = [f"{name} ×{n}" if n > 1 else name for name, n in found[:SHOWN_OPERATORS]]
        return ", ".join(shown) + (", …" if len(found) > SHOWN_OPERATORS else "")


def _read_by(node: fx.Node) -> list[fx.Node]:
    """What a node reads; of an operator that several sites share, its own site's part."""
    site = lowered_site(node)
    return node.all_input_nodes if site is None else site.inputs


def owner_of(node: fx.Node) -> str | None:
    """Who owns the tensor that a get_attr node reads."""
    ref = node.meta.get("tensor")
    return ref.owner if isinstance(ref, TensorRef) else None


def tensor_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the tensors that get_attr nodes read."""
    refs: list[TensorRef] = [node.meta["tensor"] for node in nodes]
    return sum(torch.Size(ref.shape).numel() * ref.dtype.itemsize for ref in refs)


def modules_of(nodes: Iterable[fx.Node]) -> list[ModuleNodes]:
    """The modules of a graph that matter, in the order in which they end."""
    found: dict[str, ModuleNodes] = {}
    for node in nodes:
        if node.op != "call_function" or not _holds_tensors(node.meta.get("val")):
            continue
        if serves_several(node):  # each of its sites has a result of its own
            continue
        alone = is_branch(node)
        key = str(node.meta.get("site" if alone else "path", ""))
        if (alone and not key) or node.meta.get("role") == "table":
            continue
        module = found.pop(key, None) or ModuleNodes(key)
        if alone:
            (job,) = node.meta["jobs"]
            module.branches.setdefault(job, []).append(node)
            if operator_name(node) == "segment_write":
                module.reasons[job] = str(node.meta.get("as_it_is", NOT_LOWERED))
        else:
            module.nodes.append(node)
        found[key] = module
    return [module for module in found.values() if module.matters]


def is_branch(node: fx.Node) -> bool:
    """Whether a node runs for one job alone."""
    return node.meta.get("role") == "adapter" and not is_lowered(node)


def _holds_tensors(value: Any) -> bool:
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, torch.Tensor)
